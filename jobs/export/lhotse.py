"""The formats `lhotse` and `shar`: Lhotse's manifests, and its archives that hold the audio too.

    lhotse: train/recordings.jsonl.gz  train/supervisions.jsonl.gz  train/cuts.jsonl.gz
    shar:   train/cuts.000000.jsonl.gz  train/recording.000000.tar

Source: lhotse 1.33, `lhotse.audio.Recording`, `lhotse.supervision.SupervisionSegment`, `lhotse.cut.MonoCut` and
`lhotse.shar`, whose archives hold for each cut its audio and then its recording as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, ItemMetadata, item_metadata, origin
from jobs.export.plan import Part
from jobs.export.webdataset import tar_file
from jobs.ledger.records import Job

_encode = msgspec.json.Encoder().encode


def write_lhotse(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, str]]) -> None:
    """Manifests whose ids are those of the items."""
    folder = part.split
    with (
        files.gzip(f"{folder}/recordings.jsonl.gz") as recordings,
        files.gzip(f"{folder}/supervisions.jsonl.gz") as supervisions,
        files.gzip(f"{folder}/cuts.jsonl.gz") as cuts,
    ):
        for item, where in items:
            known = item_metadata(job, item)
            named = files.audio_name(f"{folder}/cuts.jsonl.gz", where)
            source = {"type": "url" if "://" in where else "file", "channels": [0], "source": named}
            recording = _recording(item.id, item, source)
            supervision = _supervision(item.id, job, item, known)
            recordings.write(_encode(recording) + b"\n")
            supervisions.write(_encode(supervision) + b"\n")
            cuts.write(_encode(_cut(item.id, item, recording, supervision)) + b"\n")


def write_shar(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]) -> None:
    """One shard of an archive. Ids are the names of the audio in the store, since they name members of a tar file."""
    number = f"{part.number:06d}"
    with (
        tar_file(files.open(f"{part.split}/recording.{number}.tar")) as add,
        files.gzip(f"{part.split}/cuts.{number}.jsonl.gz") as cuts,
    ):
        for item, audio in items:
            recording = _recording(item.name, item, {"type": "shar", "channels": [0], "source": ""})
            add(f"{item.name}.{item.extension}", audio)
            add(f"{item.name}.json", _encode(recording) + b"\n")
            supervision = _supervision(item.name, job, item, item_metadata(job, item))
            cuts.write(_encode(_cut(item.name, item, recording, supervision)) + b"\n")


def _recording(id: str, item: AudioItem, source: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": id,
        "sources": [source],
        "sampling_rate": item.artifact.sample_rate,
        "num_samples": item.artifact.samples,
        "duration": item.seconds,
        "channel_ids": [0],
    }


def _supervision(id: str, job: Job, item: AudioItem, known: ItemMetadata) -> dict[str, Any]:
    turn = {"role": known.role, "message_index": known.message_index}
    source = {"sha256": item.artifact.sha256, "spec_sha": job.spec_sha, **origin(job, item, known)}
    custom = {"example_id": item.example_id, **turn, **source}
    language = {} if known.language is None else {"language": known.language}
    return {
        "id": id,
        "recording_id": id,
        "start": 0.0,
        "duration": item.seconds,
        "channel": 0,
        "text": known.text,
        **language,
        "speaker": known.speaker,
        "custom": custom,
    }


def _cut(id: str, item: AudioItem, recording: dict[str, Any], supervision: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": id,
        "start": 0.0,
        "duration": item.seconds,
        "channel": 0,
        "supervisions": [supervision],
        "recording": recording,
        "type": "MonoCut",
    }


LHOTSE = ExportFormat(name="lhotse", summary="Lhotse's recordings, supervisions and cuts", write_part=write_lhotse)
SHAR = ExportFormat(name="shar", summary="Lhotse's archives", write_part=write_shar, embeds_audio=True)
