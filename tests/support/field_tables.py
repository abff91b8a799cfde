"""Tables that send each field of a type through a layer: every field of a value by its path, and what
differs between two values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec


def fields_of(value: Any, *leaves: type) -> dict[str, Any]:
    """Path -> value of every field of a struct or dataclass, and of those within it apart from `leaves`. A
    mapping is one value."""
    if isinstance(value, leaves):
        return {"": value}
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    elif dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
    elif hasattr(value, "_fields"):
        names = value._fields
    else:
        return {"": value}
    found: dict[str, Any] = {}
    for name in names:
        for path, inner in fields_of(getattr(value, name), *leaves).items():
            found[f"{name}.{path}" if path else name] = inner
    return found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `after` that `before` does not have, or has with another value."""
    return {path: value for path, value in after.items() if path not in before or before[path] != value}
