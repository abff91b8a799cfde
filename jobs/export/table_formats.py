"""Formats with a Parquet table and a dataset card, for Hugging Face `datasets`: with the audio in the table or
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
from functools import partial
from importlib import resources
from itertools import chain, groupby
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from jobs.export.column_types import Type, arrow_type, feature_of, metadata_cell
from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, Part, Plan, facts, picked
from jobs.ledger.records import Job

if TYPE_CHECKING:
    import pyarrow

#: Limits of a row group, which a reader loads as a whole.
GROUP_ROWS = 100
_GROUP_BYTES = 32 << 20
#: Rows of a group in a table without the audio.
_FOLDER_GROUP_ROWS = 10_000
#: The hub's size categories.
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
_REPEATED = ("role", "speaker", "language", "spec_sha", "model", "voice")
_TEXTS = ("text", "example_id", "sha256", "transcript", *_REPEATED)
_CODES: Type = [["int16"]]
#: The types of the columns other than the audio; a job without checks has no `draw` and `transcript`.
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
    "codec": {
        "name": "string",
        "sha256": "string",
        "frame_rate": "float64",
        "sample_rate": "int64",
        "codebook_sizes": ["int64"],
    },
    "voice_codes": _CODES,
    "codes": _CODES,
}


def _row(job: Job, item: AudioItem) -> dict[str, Any]:
    """The values of the columns other than the audio. Each score has its own column, so that readers of
    tables can filter by it."""
    about = facts(job, item)
    scores = {f"score_{name}": value for name, value in about.get("scores", {}).items()}
    row = picked(about, *_COLUMNS) | scores
    if item.codes is not None and not item.is_codes:
        row["codes"] = [*item.codes.codes]
    if item.metadata_types:
        row["metadata"] = metadata_cell(item.metadata_types, about.get("metadata", {}))
    return row


def _write_table(
    file: IO[bytes],
    job: Job,
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
    # All items of a job have the same columns.
    known: dict[str, Type] = {**_COLUMNS, "metadata": first[0].metadata_types}
    types = {name: known.get(name, "float64") for name in _row(job, first[0])}
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
            rows.append({column.name: cell, **_row(job, item)})
            size += cell_bytes
        writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def write_parquet(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]) -> None:
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
        job,
        column,
        (cell(*one) for one in items),
        GROUP_ROWS if job.spec.main_kind == "audio" else _FOLDER_GROUP_ROWS,
        # Audio is not compressed, because that saves little space and takes long.
        compression=dict.fromkeys((*_TEXTS, "codes.list.element.list.element"), "zstd"),
        use_dictionary=list(_REPEATED),
        write_statistics=["index", "duration"],
    )


def write_audiofolder(
    part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]
) -> None:
    """Writes the audio of a part and its table."""
    import pyarrow

    folder = f"data/{part.split}/{part.number:05d}"

    def cells() -> Iterator[tuple[AudioItem, str, int]]:
        for item, data in items:
            name = f"{item.name}.{item.extension}"
            files.add(f"{folder}/{name}", data)
            yield item, name, 0

    table, column = files.open(f"{folder}/metadata.parquet"), pyarrow.field("file_name", pyarrow.string())
    _write_table(table, job, column, cells(), _FOLDER_GROUP_ROWS, compression="zstd")


def dataset_card(job: Job, plan: Plan, files: str = "data/{}-*.parquet") -> bytes:
    """The card of a job's dataset, from `card.md`, without empty splits, which have no files. `files`: the
    pattern for the files of a split."""
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701
    )
    # A JSON string is valid YAML.
    environment.filters["yaml"] = lambda text: msgspec.json.encode(text).decode()
    environment.filters["line"] = lambda text: " ".join(text.replace("`", "'").split())
    template = resources.files("jobs.export").joinpath("card.md").read_text(encoding="utf-8")
    return (
        environment.from_string(template)
        .render(
            job=job,
            size=_SIZES[max(0, min(len(str(plan.items)) - 3, len(_SIZES) - 1))],
            splits={name: list(parts) for name, parts in groupby(plan.parts, lambda part: part.split)},
            reasons=plan.reasons,
            spec=msgspec.json.format(msgspec.json.encode(job.spec, order="sorted"), indent=2).decode(),
            files=files,
        )
        .encode()
    )


PARQUET = ExportFormat(
    name="parquet",
    summary="Parquet files for Hugging Face datasets",
    write_part=write_parquet,
    embeds_audio=True,
    codes=True,
    card=dataset_card,
    typed=True,
    library="pyarrow",
)
AUDIOFOLDER = ExportFormat(
    name="audiofolder",
    summary="audio files and a table, for the loader AudioFolder of Hugging Face datasets",
    write_part=write_audiofolder,
    embeds_audio=True,
    card=partial(dataset_card, files="data/{}/**"),
    typed=True,
    library="pyarrow",
)
