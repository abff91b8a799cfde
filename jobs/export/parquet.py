"""The format `parquet`: files that Hugging Face `datasets` reads with its audio feature, and a dataset card.

    README.md  data/train-00000-of-00002.parquet  data/train-00001-of-00002.parquet

Source: https://huggingface.co/docs/datasets/audio_dataset and `datasets.features.Audio`: a struct of the file's bytes and its
path, and the features under the key `huggingface` of the schema's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, item_metadata, origin
from jobs.export.plan import Part, Plan
from jobs.ledger.records import Job

if TYPE_CHECKING:
    import pyarrow


#: A reader loads a row group at a time.
_GROUP_ROWS = 100
_GROUP_BYTES = 32 << 20
_TEXTS = ("text", "example_id", "role", "speaker", "language", "spec_sha", "sha256", "model", "voice", "transcript")
_REPEATED = ("role", "speaker", "language", "spec_sha", "model", "voice")


def write_parquet(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]) -> None:
    """One Parquet file; a part has at least one item."""
    from pyarrow import parquet

    # Its annotations lack what its documentation says of columns.
    open_writer: Any = parquet.ParquetWriter
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
                    open_writer(
                        file,
                        _schema(job, item),
                        # Audio is left as it is: it shrinks by little and takes long to do so.
                        compression=dict.fromkeys(_TEXTS, "zstd"),
                        use_dictionary=list(_REPEATED),
                        write_statistics=["index", "duration"],
                    )
                )
            rows.append(_row(job, item, audio))
            size += len(audio)
        writer.write_table(_table(rows, writer.schema))


def _row(job: Job, item: AudioItem, audio: bytes) -> dict[str, Any]:
    return {"audio": {"bytes": audio, "path": f"{item.name}.{item.extension}"}, **metadata_row(job, item)}


def metadata_row(job: Job, item: AudioItem) -> dict[str, Any]:
    """What `metadata_types` names, of one item."""
    known = item_metadata(job, item)
    made = origin(job, item, known)
    scores: dict[str, float | None] = made.pop("scores", {})
    return {
        "text": known.text,
        "example_id": item.example_id,
        "role": known.role,
        "message_index": known.message_index,
        "index": item.artifact.index,
        "speaker": known.speaker,
        "language": known.language,
        "duration": round(item.seconds, 6),
        "sha256": item.artifact.sha256,
        "spec_sha": job.spec_sha,
        **made,
        **{f"score_{name}": value for name, value in scores.items()},
    }


def metadata_types(job: Job, item: AudioItem) -> dict[str, str]:
    """The columns beside the audio, with their types, the same for all items of a job. A score has a column of its own, so that it can be
    filtered and shown by everything that reads tables."""
    types = dict.fromkeys(metadata_row(job, item), "string")
    types |= dict.fromkeys(("message_index", "index", "seed"), "int64") | {"duration": "float64"}
    if "draw" in types:
        types["draw"] = "int64"
    return types | {f"score_{name}": "float64" for name in item.score_names}


def metadata_schema(job: Job, item: AudioItem, first: Sequence[tuple[str, pyarrow.DataType]]) -> pyarrow.Schema:
    """The schema of a table of metadata behind its first columns."""
    import pyarrow

    return pyarrow.schema([*first, *((name, pyarrow.type_for_alias(dtype)) for name, dtype in metadata_types(job, item).items())])


def _schema(job: Job, item: AudioItem) -> pyarrow.Schema:
    import pyarrow

    features: dict[str, object] = {"audio": {"sampling_rate": item.artifact.sample_rate, "_type": "Audio"}}
    features |= {name: {"dtype": dtype, "_type": "Value"} for name, dtype in metadata_types(job, item).items()}
    audio = ("audio", pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    metadata = {"huggingface": msgspec.json.encode({"info": {"features": features}})}
    return metadata_schema(job, item, [audio]).with_metadata(metadata)


def _table(rows: list[dict[str, Any]], schema: pyarrow.Schema) -> pyarrow.Table:
    import pyarrow

    return pyarrow.Table.from_pylist(rows, schema=schema)


#: Upper bound of the examples -> the hub's word for it.
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"), (10**8, "10M<n<100M"))


def dataset_card(job: Job, plan: Plan, files: str = "data/{}-*.parquet") -> bytes:
    """The card of a job's dataset; splits without an item are not in it, since their files do not exist. `files`: those of a split."""
    splits = [(name, list(parts)) for name, parts in groupby(plan.parts, lambda part: part.split)]
    counts = [(name, sum(part.items for part in parts), sum(part.audio_bytes for part in parts)) for name, parts in splits]
    size = next((word for bound, word in _SIZES if plan.items < bound), "100M<n<1B")
    configs = [f"  - split: {name}\n    path: {files.format(name)}" for name, _, _ in counts]
    header = [
        f"pretty_name: {_text(job.name or job.id)}",
        "task_categories:",
        "- text-to-speech",
        "tags:",
        "- synthetic",
        "- audio",
        "size_categories:",
        f"- {size}",
    ]
    if configs:
        header += ["configs:", "- config_name: default", "  data_files:", *configs]
    rows = [f"| {name} | {items} | {audio_bytes} |" for name, items, audio_bytes in counts]
    spec = msgspec.json.format(msgspec.json.encode(job.spec, order="sorted"), indent=2).decode()
    without = plan.reasons.without_audio
    body = [
        f"# {_line(job.name or job.id)}",
        "",
        f"Synthetic speech, made by Nightjar job `{job.id}` with the model `{_line(job.spec.model)}`"
        + (f" at revision `{_line(job.spec.model_revision)}`." if job.spec.model_revision else "."),
        "",
        "| split | examples | bytes of audio, as it was made |",
        "|---|---|---|",
        *rows,
        "",
        *([f"Left out of the job: {plan.reasons}.", ""] if plan.reasons.filtered else []),
        *([f"The job was still running: {plan.reasons.pending} items were pending.", ""] if plan.reasons.running else []),
        f"{without} items of the job have no audio and are left out. `audio` is the speech, `text` what was asked for, `transcript`",
        "what a recognizer heard, `role` whose turn it is; `score_…` are the measurements of the attempt `draw`, which was kept. `seed`",
        "and the spec make it again, in the default mode of a GPU not always with the same bits. The license of the texts and of the",
        "model applies.",
        "",
        "```json",
        spec,
        "```",
        "",
        f"Input SHA-256: `{job.input_sha256}`; spec SHA-256: `{job.spec_sha}`. More is in `provenance.json`.",
    ]
    return "\n".join(["---", *header, "---", "", *body, ""]).encode()


def _text(value: str) -> str:
    """A string of YAML: every JSON string is one."""
    return msgspec.json.encode(value).decode()


def _line(value: str) -> str:
    return " ".join(value.replace("`", "'").split())


PARQUET = ExportFormat(
    name="parquet",
    summary="Parquet of Hugging Face datasets",
    write_part=write_parquet,
    embeds_audio=True,
    card=dataset_card,
    library="pyarrow",
)
