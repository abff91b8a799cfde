"""Formats with a table in Parquet and a dataset card, for Hugging Face `datasets`: the audio in the table,
or in files beside it.

    parquet      README.md  data/train-00000-of-00002.parquet  data/train-00001-of-00002.parquet
    audiofolder  README.md  data/train/00000/metadata.parquet  data/train/00000/000000000-utt1.wav ...

The table of `audiofolder` is Parquet rather than CSV or JSON Lines: only there a column has its type where
all of its values are null, and the loader refuses tables whose columns differ. Each part of a split has a
folder of its own.

Source: https://huggingface.co/docs/datasets/audio_dataset and `datasets.features.Audio`: a struct of the
file's bytes and its path, and the features under the key `huggingface` of the schema's metadata. In an
AudioFolder `file_name` is relative to its table.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import msgspec

from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, Part, Plan, facts, picked
from jobs.ledger.records import Job

if TYPE_CHECKING:
    import pyarrow

#: A reader loads a row group at a time.
_GROUP_ROWS = 100
_GROUP_BYTES = 32 << 20
#: Of a table without the audio.
_FOLDER_GROUP_ROWS = 10_000
_REPEATED = ("role", "speaker", "language", "spec_sha", "model", "voice")
_TEXTS = ("text", "example_id", "sha256", "transcript", *_REPEATED)
#: The columns beside the audio; a job without checks has no `draw` and `transcript`.
_COLUMNS = (
    *(
        "text",
        "example_id",
        "role",
        "message_index",
        "index",
        "speaker",
        "language",
        "duration",
        "sha256",
        "spec_sha",
    ),
    *("seed", "model", "voice", "draw", "transcript"),
)
_TYPES = {"message_index": "int64", "index": "int64", "seed": "int64", "draw": "int64", "duration": "float64"}


def _row(job: Job, item: AudioItem) -> dict[str, Any]:
    """The columns beside the audio. A score has a column of its own, so that it can be filtered and shown
    by everything that reads tables."""
    about = facts(job, item)
    return picked(about, *_COLUMNS) | {
        f"score_{name}": value for name, value in about.get("scores", {}).items()
    }


def _types(job: Job, item: AudioItem) -> dict[str, str]:
    """The types of the columns beside the audio, the same for all items of a job."""
    return {
        name: "float64" if name.startswith("score_") else _TYPES.get(name, "string")
        for name in _row(job, item)
    }


def _schema(types: dict[str, str], name: str, of_audio: pyarrow.DataType) -> pyarrow.Schema:
    """The schema of a table whose first column stands for the audio."""
    import pyarrow

    return pyarrow.schema(
        [(name, of_audio), *((column, pyarrow.type_for_alias(dtype)) for column, dtype in types.items())]
    )


def write_parquet(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]) -> None:
    """One Parquet file; a part has at least one item."""
    import pyarrow
    from pyarrow import parquet

    first, audio = next(items)
    types = _types(job, first)
    features: dict[str, object] = {"audio": {"sampling_rate": first.artifact.sample_rate, "_type": "Audio"}}
    features |= {name: {"dtype": dtype, "_type": "Value"} for name, dtype in types.items()}
    of_audio = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = _schema(types, "audio", of_audio).with_metadata(
        {"huggingface": msgspec.json.encode({"info": {"features": features}})}
    )
    # Its annotations lack what its documentation says of columns.
    open_writer: Any = parquet.ParquetWriter
    file: Any = files.open(f"data/{part.split}-{part.number:05d}-of-{part.of:05d}.parquet")
    # Audio is left as it is: it shrinks by little and takes long to do so.
    options = {
        "compression": dict.fromkeys(_TEXTS, "zstd"),
        "use_dictionary": list(_REPEATED),
        "write_statistics": ["index", "duration"],
    }
    rows: list[dict[str, Any]] = []
    size = 0
    with open_writer(file, schema, **options) as writer:
        for item, data in chain([(first, audio)], items):
            if rows and (len(rows) == _GROUP_ROWS or size + len(data) > _GROUP_BYTES):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows, size = [], 0
            rows.append(
                {"audio": {"bytes": data, "path": f"{item.name}.{item.extension}"}, **_row(job, item)}
            )
            size += len(data)
        writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def write_audiofolder(
    part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]
) -> None:
    """The audio of a part and its table; a part has at least one item."""
    import pyarrow
    from pyarrow import parquet

    folder = f"data/{part.split}/{part.number:05d}"
    table: Any = files.open(f"{folder}/metadata.parquet")
    first, audio = next(items)
    schema = _schema(_types(job, first), "file_name", pyarrow.string())
    rows: list[dict[str, Any]] = []
    with parquet.ParquetWriter(table, schema, compression="zstd") as writer:
        for item, data in chain([(first, audio)], items):
            if len(rows) == _FOLDER_GROUP_ROWS:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows = []
            name = f"{item.name}.{item.extension}"
            files.add(f"{folder}/{name}", data)
            rows.append({"file_name": name, **_row(job, item)})
        writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


#: Upper bound of the examples -> the hub's word for it.
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
)


def dataset_card(job: Job, plan: Plan, files: str = "data/{}-*.parquet") -> bytes:
    """The card of a job's dataset; splits without an item are not in it, since their files do not exist.
    `files`: those of a split."""
    splits = [(name, list(parts)) for name, parts in groupby(plan.parts, lambda part: part.split)]
    counts = [
        (name, sum(part.items for part in parts), sum(part.audio_bytes for part in parts))
        for name, parts in splits
    ]
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
        *(
            [f"The job was still running: {plan.reasons.pending} items were pending.", ""]
            if plan.reasons.running
            else []
        ),
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
AUDIOFOLDER = ExportFormat(
    name="audiofolder",
    summary="audio files and a table, as Hugging Face AudioFolder",
    write_part=write_audiofolder,
    embeds_audio=True,
    card=partial(dataset_card, files="data/{}/**"),
    library="pyarrow",
)
