"""Manifests: one JSON line for each item with audio, in index order.

Those of a job and of its shards are in the store beside the audio. Exports add what was measured of each
item, also the format `manifest`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from jobs.dialogue import spoken_text
from jobs.export.formats import ExportFormat
from jobs.export.items import ORIGIN, AudioItem, audio_items, facts, item_metadata, picked
from jobs.layout import job_manifest_key, put_numbered, shard_manifest_key
from jobs.ledger.records import Artifact, Job
from jobs.shard_file import ShardLine
from jobs.store.base import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from jobs.ledger import Ledger

CONTENT_TYPE = "application/x-ndjson"


class ManifestEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a manifest in the store."""

    example_id: str
    index: int
    #: Key of the audio in the store; in a pack: the name of the member.
    key: str
    sha256: str
    bytes: int
    sample_rate: int
    samples: int
    #: Seconds.
    duration: float
    seed: int
    spec_sha: str
    #: The requested text.
    text: str
    #: Whose turn it is: `user` or `assistant`.
    role: str
    #: Index of the spoken message in the dialogue; None: the audio answers the whole of it.
    message_index: int | None = None
    #: Key of the pack whose member the audio is, and where its bytes begin in it; left out where it is an
    #: object of its own.
    pack: str | None = None
    pack_offset: int | None = None


_OF_THE_ARTIFACT = tuple(name for name in ManifestEntry.__struct_fields__ if hasattr(Artifact, name))


def _entry(job: Job, example_id: str, artifact: Artifact, **spoken: Any) -> ManifestEntry:
    """The line of an audio artifact; `spoken`: its text, role and message."""
    return ManifestEntry(
        example_id=example_id,
        duration=round(artifact.samples / artifact.sample_rate, 6),
        spec_sha=job.spec_sha,
        **{name: getattr(artifact, name) for name in _OF_THE_ARTIFACT},
        **spoken,
    )


def manifest_line(job: Job, item: AudioItem, where: str) -> bytes:
    """One line of JSON of an export; `key` names the audio in the store, so `where` is not used."""
    about = facts(job, item)
    entry = _entry(job, item.example_id, item.artifact, **picked(about, "text", "role", "message_index"))
    line: dict[str, Any] = msgspec.to_builtins(entry)
    return msgspec.json.encode(line | picked(about, *ORIGIN)) + b"\n"


MANIFEST = ExportFormat(
    name="manifest", summary="our own manifest", item_line=manifest_line, names_audio=False
)


def put_shard_manifest(
    store: ObjectStore, job: Job, shard_no: int, items: Iterable[Artifact], lines: Iterable[ShardLine]
) -> tuple[str, str]:
    """Writes the manifest of a shard, of whose lines `items` are made. Returns its key and SHA-256, which
    the ledger may name now."""
    spoken = {line.index: line for line in lines}
    entries: list[bytes] = []
    for audio in items:
        line = spoken[audio.index]
        entry = _entry(
            job,
            line.example_id,
            audio,
            text=spoken_text(line.messages),
            role=line.role or "assistant",
            message_index=None if line.role is None else line.message_index,
        )
        entries.append(msgspec.json.encode(entry) + b"\n")
    info = put_numbered(store, shard_manifest_key(job.id, shard_no), b"".join(entries), CONTENT_TYPE).info
    store.sync()
    return info.key, info.sha256


def put_manifest(ledger: Ledger, store: ObjectStore, job_id: str) -> ObjectInfo:
    """Writes the manifest of a whole job in bounded memory: `manifest.jsonl`, or the next number if the
    content has changed. The ledger notes it if the job has ended."""
    job = ledger.job(job_id)
    # A file without a name: a process that is killed leaves none behind.
    with tempfile.TemporaryFile(prefix="nightjar-manifest-") as file:
        for item in audio_items(ledger, store, job_id):
            known = item_metadata(job, item)
            spoken = {"text": known.text, "role": known.role, "message_index": known.message_index}
            entry = _entry(job, item.example_id, item.artifact, **spoken)
            file.write(msgspec.json.encode(entry) + b"\n")
        file.seek(0)
        info = put_numbered(store, job_manifest_key(job.id), cast("BinaryIO", file), CONTENT_TYPE).info
    store.sync()
    if job.state.final:
        ledger.note_manifest(job)
    return info
