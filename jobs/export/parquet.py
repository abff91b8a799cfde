"""The format `parquet`: files that Hugging Face `datasets` reads with its audio feature, and a dataset card.

    README.md  data/train-00000-of-00002.parquet  data/train-00001-of-00002.parquet

Source: https://huggingface.co/docs/datasets/audio_dataset and `datasets.features.Audio`: a struct of the file's bytes and its
path, and the features under the key `huggingface` of the schema's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from jobs.export.files import PartFiles
from jobs.export.made import MadeItem, facts
from jobs.export.plan import Part
from jobs.ledger.records import Job
from pipelines.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    import pyarrow

#: A reader loads a row group at a time.
_GROUP_ROWS = 100
_GROUP_BYTES = 32 << 20
_TEXTS = ("text", "example_id", "role", "speaker", "language", "spec_sha", "sha256")


def write_parquet(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[MadeItem, bytes]]) -> None:
    """One Parquet file; a part has at least one item. Raises `model.missing_extra` without pyarrow."""
    _, parquet = _pyarrow()
    rows: list[dict[str, Any]] = []
    size = 0
    file: Any = files.open(f"data/{part.split}-{part.number:05d}-of-{part.of:05d}.parquet")
    with ExitStack() as stack:
        writer: Any = None
        for item, audio in items:
            if rows and (len(rows) == _GROUP_ROWS or size + len(audio) > _GROUP_BYTES):
                writer.write_table(_table(rows, writer.schema))
                rows, size = [], 0
            if writer is None:
                writer = stack.enter_context(
                    parquet.ParquetWriter(
                        file,
                        _schema(item.artifact.sample_rate),
                        # Audio is left as it is: it shrinks by little and takes long to do so.
                        compression=dict.fromkeys(_TEXTS, "zstd"),
                        use_dictionary=["role", "speaker", "language", "spec_sha"],
                        write_statistics=["index", "duration"],
                    )
                )
            rows.append(_row(job, item, audio))
            size += len(audio)
        writer.write_table(_table(rows, writer.schema))


def _row(job: Job, item: MadeItem, audio: bytes) -> dict[str, Any]:
    known = facts(job, item)
    return {
        "audio": {"bytes": audio, "path": f"{item.name}.{item.extension}"},
        "text": known.text,
        "example_id": item.example_id,
        "role": known.role,
        "message_index": known.message_index,
        "index": item.artifact.index,
        "speaker": known.speaker,
        "language": known.language,
        "duration": round(item.seconds, 6),
        "seed": item.artifact.seed,
        "sha256": item.artifact.sha256,
        "spec_sha": job.spec_sha,
    }


def _schema(sample_rate: int) -> pyarrow.Schema:
    arrow, _ = _pyarrow()
    text = ("string", arrow.string())
    columns: dict[str, tuple[str, Any]] = {
        "text": text,
        "example_id": text,
        "role": text,
        "message_index": ("int64", arrow.int64()),
        "index": ("int64", arrow.int64()),
        "speaker": text,
        "language": text,
        "duration": ("float64", arrow.float64()),
        "seed": ("int64", arrow.int64()),
        "sha256": text,
        "spec_sha": text,
    }
    features: dict[str, object] = {"audio": {"sampling_rate": sample_rate, "_type": "Audio"}}
    features |= {name: {"dtype": dtype, "_type": "Value"} for name, (dtype, _) in columns.items()}
    audio = arrow.field("audio", arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))
    fields = [audio, *(arrow.field(name, kind) for name, (_, kind) in columns.items())]
    return arrow.schema(fields, metadata={"huggingface": msgspec.json.encode({"info": {"features": features}})})


def _table(rows: list[dict[str, Any]], schema: pyarrow.Schema) -> pyarrow.Table:
    arrow, _ = _pyarrow()
    return arrow.Table.from_pylist(rows, schema=schema)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError(
            ErrorCode.MODEL_MISSING_EXTRA,
            "The format parquet needs the library pyarrow.",
            "Install it with: pip install 'nightjar-speech[export]'.",
        ) from None
    return pyarrow, pyarrow.parquet
