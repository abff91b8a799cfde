"""The types of the metadata of a job's items in tables.

JSON does not say the types of columns, so they are found in the values of all lines. A type is the name of a
type of Arrow, a list with the type of its elements, or the types of the keys of an object. Values that have
no common type are JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import pyarrow

Type = str | list["Type"] | dict[str, "Type"]
JSON = "json"
#: Whole numbers that a double does not hold exactly.
_WIDE = "wide"
#: Maximum number of columns, above which all metadata is one JSON text, and maximum depth of typed values.
MAX_COLUMNS, MAX_DEPTH = 1000, 16
_ALIASES = {JSON: "string", _WIDE: "int64"}


def type_of(value: Any, depth: int = 0) -> Type:
    """The type of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int):
        return "int64" if abs(value) <= 2**53 else _WIDE if -(2**63) <= value < 2**63 else JSON
    if isinstance(value, float):
        return "float64" if isfinite(value) else JSON
    if depth == MAX_DEPTH or value == {}:
        # Parquet has no object without keys.
        return JSON
    if isinstance(value, dict):
        return _nested({name: type_of(own, depth + 1) for name, own in value.items()})
    return _nested([reduce(common, (type_of(own, depth + 1) for own in value), "null")])


def common(one: Type, other: Type) -> Type:
    """The type for values of both types."""
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    if isinstance(one, list) and isinstance(other, list):
        return _nested([common(one[0], other[0])])
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return _nested({name: common(own, other[name]) for name, own in one.items()})
    wider = other if one == "int64" else one
    return wider if "int64" in (one, other) and wider in ("float64", _WIDE) else JSON


def _nested(type: list[Type] | dict[str, Type]) -> Type:
    return JSON if JSON in (type if isinstance(type, list) else type.values()) else type


def widened(types: Type, metadata: Mapping[str, msgspec.Raw]) -> Type:
    """The types of the columns, which also hold the metadata of one more line."""
    if not isinstance(types, dict):
        return types
    for name, value in metadata.items():
        if (known := types.get(name, "null")) != JSON:
            types[name] = common(known, type_of(json.loads(bytes(value))))
    return types if len(types) <= MAX_COLUMNS else JSON


def metadata_cell(types: Type, metadata: Mapping[str, msgspec.Raw]) -> Any:
    """The metadata of an item for a column of this type."""
    if not isinstance(types, dict):
        return msgspec.json.encode(metadata).decode()
    texts = {name: bytes(value).decode() for name, value in metadata.items()}
    return {
        name: text if types[name] == JSON and text != "null" else json.loads(text)
        for name, text in texts.items()
    }


def arrow_type(type: Type) -> pyarrow.DataType:
    """The type in Arrow."""
    import pyarrow

    if isinstance(type, list):
        return pyarrow.list_(arrow_type(type[0]))
    if isinstance(type, dict):
        return pyarrow.struct([(name, arrow_type(own)) for name, own in type.items()])
    return pyarrow.type_for_alias(_ALIASES.get(type, type))


def feature_of(type: Type) -> object:
    """The type as a feature of Hugging Face `datasets`, which reads a list in any version as a list."""
    if isinstance(type, list):
        return [feature_of(type[0])]
    if isinstance(type, dict):
        return {name: feature_of(own) for name, own in type.items()}
    return {"dtype": _ALIASES.get(type, type), "_type": "Value"}
