"""Formats with a Parquet table, for Hugging Face `datasets`: with the audio in the table or
in separate files.

    parquet      README.md  data/train-00000-of-00002.parquet  data/train-00001-of-00002.parquet
    audiofolder  README.md  data/train/00000/metadata.parquet  data/train/00000/000000000-utt1.wav ...

The table of `audiofolder` is Parquet rather than CSV or JSON Lines: there a column of nulls would have no
type, and the loader refuses tables whose columns differ in type. Each part of a split has its own folder.

JSON does not say the types of columns, so those of the metadata are found in the values of all lines. A type is the
name of a type of Arrow, a list with the type of its elements, or the types of the keys of an object. Values that
have no common type are JSON text.

Source: https://huggingface.co/docs/datasets/audio_dataset and `datasets.features.Audio`: a struct of the
file's bytes and its path, and the features under the key `huggingface` of the schema's metadata. In an
AudioFolder `file_name` is relative to its table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import chain
from math import isfinite
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from jobs.export.dataset import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, Loaded, Part, facts, picked
from jobs.formatting import JsonObject
from jobs.ledger.records import Job

if TYPE_CHECKING:
    import pyarrow

Type = str | list["Type"] | dict[str, "Type"]
JSON = "json"
#: Whole numbers that a double does not hold exactly.
_WIDE = "wide"
#: Maximum number of columns, above which all metadata is one JSON text, and maximum depth of typed values.
MAX_COLUMNS, MAX_DEPTH = 1000, 16
_ALIASES = {JSON: "string", _WIDE: "int64"}
#: Limits of a row group, which a reader loads as a whole.
GROUP_ROWS = 100
_GROUP_BYTES = 32 << 20
#: Rows of a group in a table without the audio.
_FOLDER_GROUP_ROWS = 10_000
_REPEATED = ("role", "speaker", "language", "spec_sha", "model", "voice", "job")
_CODES: Type = [["int16"]]
#: The types of the columns other than the audio; jobs without checks have no `draw` and
#: `transcript`, and only datasets of several jobs have `job`.
_COLUMNS = {
    "text": "string",
    "example_id": "string",
    "role": "string",
    "message_index": "int64",
    "index": "int64",
    "speaker": "string",
    "language": "string",
    "duration": "float64",
    "sha256": "string",
    "spec_sha": "string",
    "seed": "int64",
    "model": "string",
    "voice": "string",
    "draw": "int64",
    "transcript": "string",
    "spoken_text": "string",
    "codec": {
        "name": "string",
        "sha256": "string",
        "frame_rate": "float64",
        "sample_rate": "int64",
        "codebook_sizes": ["int64"],
    },
    "voice_codes": _CODES,
    "codes": _CODES,
    "job": "string",
}
_TEXTS = [name for name, kind in _COLUMNS.items() if kind == "string"]
#: The fields of a word in the column `words`, which a job with `--timestamps` has.
_WORD = {"text": "string", "start_s": "float64", "end_s": "float64"}


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
    if other in (one, "null"):
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


def _row(item: AudioItem) -> JsonObject:
    """The values of the columns other than the audio. Each score has its own column, so that readers of
    tables can filter by it."""
    about = facts(item)
    scores = {f"score_{name}": value for name, value in about.get("scores", {}).items()}
    row: JsonObject = picked(about, *_COLUMNS) | scores
    if item.codes is not None and not item.is_codes:
        row["codes"] = [*item.codes.codes]
    if types := item.columns.metadata:
        row["metadata"] = metadata_cell(types, about.get("metadata", {}))
    if "words" in about:
        row["words"] = [msgspec.structs.asdict(word) for word in item.words]
    return row


def _write_table(
    file: IO[bytes],
    column: pyarrow.Field,
    cells: Iterator[tuple[AudioItem, object, int]],
    group_rows: int,
    **options: Any,
) -> None:
    """Writes a table whose first column is the audio or its name. `cells`: at least one item, each with its
    cell and the size that it adds to a row group. `options`: arguments of `ParquetWriter`."""
    import pyarrow
    from pyarrow import parquet

    first = next(cells)
    # All items of a dataset have the same columns.
    known = {**_COLUMNS, "words": [_WORD], "metadata": first[0].columns.metadata}
    types = {name: known.get(name, "float64") for name in _row(first[0])}
    metadata: dict[str, bytes] | None = None
    if column.name == "audio":
        features = {"audio": {"sampling_rate": first[0].artifact.sample_rate, "_type": "Audio"}}
        features |= {name: feature_of(kind) for name, kind in types.items()}
        metadata = {"huggingface": msgspec.json.encode({"info": {"features": features}})}
    columns = [pyarrow.field(name, arrow_type(kind)) for name, kind in types.items()]
    schema = pyarrow.schema([column, *columns], metadata)
    rows: list[JsonObject] = []
    size = 0
    with parquet.ParquetWriter(cast("Any", file), schema, **options) as writer:
        for item, cell, cell_bytes in chain([first], cells):
            if rows and (len(rows) == group_rows or size + cell_bytes > _GROUP_BYTES):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows = []
                size = 0
            rows.append({column.name: cell, **_row(item)})
            size += cell_bytes
        writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def write_parquet(part: Part, files: PartFiles, job: Job, items: Iterator[Loaded]) -> None:
    """Writes one Parquet file."""
    import pyarrow

    def cell(item: AudioItem, data: bytes) -> tuple[AudioItem, object, int]:
        if item.codes is not None and item.is_codes:
            return item, [*item.codes.codes], item.artifact.bytes
        return item, {"bytes": data, "path": f"{item.name}.{item.extension}"}, len(data)

    column = pyarrow.field("codes", arrow_type(_CODES))
    rows = _FOLDER_GROUP_ROWS
    if job.spec.main_kind == "audio":
        column = pyarrow.field(
            "audio", pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        )
        rows = GROUP_ROWS
    _write_table(
        files.open(f"data/{part.split}-{part.number:05d}-of-{part.of:05d}.parquet"),
        column,
        (cell(*one) for one in items),
        rows,
        # Audio is not compressed, because that saves little space and takes long.
        compression=dict.fromkeys((*_TEXTS, "codes.list.element.list.element"), "zstd"),
        use_dictionary=list(_REPEATED),
        write_statistics=["index", "duration"],
    )


def write_audiofolder(part: Part, files: PartFiles, job: Job, items: Iterator[Loaded]) -> None:
    """Writes the audio of a part and its table."""
    import pyarrow

    folder = f"data/{part.split}/{part.number:05d}"

    def cells() -> Iterator[tuple[AudioItem, str, int]]:
        for item, data in items:
            name = f"{item.name}.{item.extension}"
            files.add(f"{folder}/{name}", data)
            yield item, name, 0

    table = files.open(f"{folder}/metadata.parquet")
    _write_table(
        table, pyarrow.field("file_name", pyarrow.string()), cells(), _FOLDER_GROUP_ROWS, compression="zstd"
    )


PARQUET = ExportFormat(
    name="parquet",
    summary="Parquet files for Hugging Face datasets",
    write_part=write_parquet,
    embeds_audio=True,
    codes=True,
    equal=("sample rate",),
    data_files="data/{}-*.parquet",
    typed=True,
    library="pyarrow",
)
AUDIOFOLDER = ExportFormat(
    name="audiofolder",
    summary="audio files and a table, for the loader AudioFolder of Hugging Face datasets",
    write_part=write_audiofolder,
    embeds_audio=True,
    data_files="data/{}/**",
    typed=True,
    library="pyarrow",
)
