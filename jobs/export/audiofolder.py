"""The format `audiofolder`: audio files with a table beside them, as the loader `audiofolder` of Hugging Face `datasets` reads them.

    README.md  data/train/00000/metadata.parquet  data/train/00000/000000000-utt1.wav ...

The table is Parquet rather than CSV or JSON Lines: only there a column has its type where all of its values are null, and the loader
refuses tables whose columns differ. Each part of a split has a folder of its own.

Source: https://huggingface.co/docs/datasets/audio_dataset#audiofolder: `file_name` is relative to its table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem
from jobs.export.parquet import dataset_card, metadata_row, metadata_schema
from jobs.export.plan import Part
from jobs.ledger.records import Job

_GROUP_ROWS = 10_000


def write_audiofolder(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]) -> None:
    """The audio of a part and its table; a part has at least one item."""
    import pyarrow
    from pyarrow import parquet

    folder = f"data/{part.split}/{part.number:05d}"
    table: Any = files.open(f"{folder}/metadata.parquet")
    first, audio = next(items)
    schema = metadata_schema(job, first, [("file_name", pyarrow.string())])
    rows: list[dict[str, Any]] = []

    def add(item: AudioItem, audio: bytes) -> None:
        name = f"{item.name}.{item.extension}"
        files.add(f"{folder}/{name}", audio)
        rows.append({"file_name": name, **metadata_row(job, item)})

    with parquet.ParquetWriter(table, schema, compression="zstd") as writer:
        add(first, audio)
        for item, data in items:
            if len(rows) == _GROUP_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows.clear()
            add(item, data)
        writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


AUDIOFOLDER = ExportFormat(
    name="audiofolder",
    summary="audio files and a table, as Hugging Face AudioFolder",
    write_part=write_audiofolder,
    embeds_audio=True,
    card=partial(dataset_card, files="data/{}/**"),
    library="pyarrow",
)
