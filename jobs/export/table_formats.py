"""Formats with a Parquet table, for Hugging Face `datasets`: with the audio in the table or
in separate files.

    parquet      README.md  data/train-00000-of-00002.parquet  data/train-00001-of-00002.parquet
    audiofolder  README.md  data/train/00000/metadata.parquet  data/train/00000/000000000-utt1.wav ...

The table of `audiofolder` is Parquet rather than CSV or JSON Lines: there a column of nulls would have no
type, and the loader refuses tables whose columns differ in type. Each part of a split has its own folder.

Source: https://huggingface.co/docs/datasets/audio_dataset and `datasets.features.Audio`: a struct of the
file's bytes and its path, and the features under the key `huggingface` of the schema's metadata. In an
AudioFolder `file_name` is relative to its table.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from jobs.export.column_types import Type, arrow_type, feature_of, metadata_cell
from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, Loaded, Part, facts, picked
from jobs.ledger.records import Job

if TYPE_CHECKING:
    import pyarrow

#: Limits of a row group, which a reader loads as a whole.
GROUP_ROWS = 100
_GROUP_BYTES = 32 << 20
#: Rows of a group in a table without the audio.
_FOLDER_GROUP_ROWS = 10_000
_REPEATED = ("role", "speaker", "language", "spec_sha", "model", "voice", "job")
_CODES: Type = [["int16"]]
#: The types of the columns other than the audio; jobs without checks have no `draw` and
#: `transcript`, and only datasets of several jobs have `job`.
_COLUMNS: dict[str, Type] = {
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
_WORD: dict[str, Type] = {"text": "string", "start_s": "float64", "end_s": "float64"}


def _row(item: AudioItem) -> dict[str, Any]:
    """The values of the columns other than the audio. Each score has its own column, so that readers of
    tables can filter by it."""
    about = facts(item)
    scores = {f"score_{name}": value for name, value in about.get("scores", {}).items()}
    row: dict[str, Any] = picked(about, *_COLUMNS) | scores
    if item.codes is not None and not item.is_codes:
        row["codes"] = [*item.codes.codes]
    if item.metadata_types:
        row["metadata"] = metadata_cell(item.metadata_types, about.get("metadata", {}))
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
    known: dict[str, Type] = {**_COLUMNS, "words": [_WORD], "metadata": first[0].metadata_types}
    types = {name: known.get(name, "float64") for name in _row(first[0])}
    metadata: dict[str, bytes] | None = None
    if column.name == "audio":
        rate = first[0].artifact.sample_rate
        features: dict[str, object] = {"audio": {"sampling_rate": rate, "_type": "Audio"}}
        features |= {name: feature_of(kind) for name, kind in types.items()}
        metadata = {"huggingface": msgspec.json.encode({"info": {"features": features}})}
    columns = [pyarrow.field(name, arrow_type(kind)) for name, kind in types.items()]
    schema = pyarrow.schema([column, *columns], metadata)
    rows: list[dict[str, Any]] = []
    size = 0
    with parquet.ParquetWriter(cast("Any", file), schema, **options) as writer:
        for item, cell, cell_bytes in chain([first], cells):
            if rows and (len(rows) == group_rows or size + cell_bytes > _GROUP_BYTES):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows, size = [], 0
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
    if job.spec.main_kind == "audio":
        sound = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
        column = pyarrow.field("audio", sound)
    _write_table(
        files.open(f"data/{part.split}-{part.number:05d}-of-{part.of:05d}.parquet"),
        column,
        (cell(*one) for one in items),
        GROUP_ROWS if job.spec.main_kind == "audio" else _FOLDER_GROUP_ROWS,
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

    table, column = files.open(f"{folder}/metadata.parquet"), pyarrow.field("file_name", pyarrow.string())
    _write_table(table, column, cells(), _FOLDER_GROUP_ROWS, compression="zstd")


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
