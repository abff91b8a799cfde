"""Manifests: one JSON line for each item with audio, in index order.

The manifests of a job and of its shards are in the store. Exports and the format `manifest` add the
measurements of each item.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any, BinaryIO, cast

import msgspec

from jobs.dialogue import metadata_json, spoken_text
from jobs.export.files import json_line
from jobs.export.formats import ExportFormat
from jobs.export.items import ORIGIN, AudioItem, Place, audio_items, facts, item_metadata, picked
from jobs.formatting import JsonObject
from jobs.layout import job_manifest_key, put_numbered, shard_manifest_key
from jobs.ledger import Ledger
from jobs.ledger.records import Artifact, Job
from jobs.shard_file import ShardLine
from jobs.status import decision_view
from jobs.store.base import ObjectInfo, ObjectStore
from pipelines.request import Word


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
    #: Role of the turn: `user` or `assistant`.
    role: str
    #: Index of the spoken message in the dialogue; None: the audio answers the whole dialogue.
    message_index: int | None = None
    #: Key of the pack that contains the audio, and the offset of its bytes; left out if the audio is an
    #: object.
    pack: str | None = None
    pack_offset: int | None = None
    #: When each word is said, in a job with `--timestamps`; not in the manifests of shards.
    words: tuple[Word, ...] = ()
    #: The other columns or keys of the record.
    metadata: dict[str, msgspec.Raw] = {}
    #: The text as it was spoken, if it is written otherwise.
    spoken_text: str | None = None
    #: What a person decided about it; not in the manifests of shards, and refused items are in none.
    decision: JsonObject | None = None


_ARTIFACT_FIELDS = tuple(name for name in ManifestEntry.__struct_fields__ if hasattr(Artifact, name))


def _entry(job: Job, artifact: Artifact, **known: Any) -> ManifestEntry:
    """The entry of an audio artifact. `known`: what is known of its item, by the names of the fields."""
    duration = round(artifact.samples / artifact.sample_rate, 6)
    own = {name: getattr(artifact, name) for name in _ARTIFACT_FIELDS}
    return ManifestEntry(duration=duration, spec_sha=job.spec_sha, **own, **known)


def _item_entry(item: AudioItem, **known: Any) -> ManifestEntry:
    """The entry of an item. `known`: its metadata, if they are written here."""
    about = item_metadata(item.job, item)
    return _entry(
        item.job,
        item.artifact,
        example_id=item.example_id,
        text=about.text,
        role=about.role,
        message_index=about.message_index,
        words=item.words,
        spoken_text=item.spoken,
        decision=None if item.decision is None else decision_view(item.decision),
        **known,
    )


def manifest_line(job: Job, item: AudioItem, where: str) -> bytes:
    """A line of an export; `key` names the audio in the store, so `where` is not used."""
    line: JsonObject = msgspec.to_builtins(_item_entry(item))
    place = ("speaker", *Place._fields) if item.place.dialogue else ()
    return json_line(line | picked(facts(item), *ORIGIN, *place))


MANIFEST = ExportFormat(
    name="manifest",
    summary="JSONL with text, key, hash and length of the audio",
    item_line=manifest_line,
    names_audio=False,
    codes=True,
)


def put_shard_manifest(
    store: ObjectStore, job: Job, shard_no: int, items: Iterable[Artifact], lines: Iterable[ShardLine]
) -> tuple[str, str]:
    """Writes the manifest of a shard. `items`: the audio of its items; `lines`: their input lines. Returns
    the manifest's key and SHA-256."""
    by_index = {line.index: line for line in lines}
    entries: list[bytes] = []
    for audio in items:
        line = by_index[audio.index]
        text = spoken_text(line.messages)
        entry = _entry(
            job,
            audio,
            example_id=line.example_id,
            text=line.written or text,
            role=line.role or "assistant",
            message_index=None if line.role is None else line.message_index,
            metadata=line.metadata,
            spoken_text=None if line.written is None else text,
        )
        entries.append(json_line(entry))
    info = put_numbered(store, shard_manifest_key(job.id, shard_no), b"".join(entries))
    store.sync()
    return info.key, info.sha256


def renew_manifest(ledger: Ledger, store: ObjectStore, job_id: str) -> None:
    """Writes the manifest of a job, if the job has ended and its newest manifest is missing or old. A job without
    audio gets none."""
    if ledger.needs_manifest(job_id):
        mark = ledger.begin_manifest(job_id)
        if ledger.status(job_id).items.done or store.head(job_manifest_key(job_id)):
            put_manifest(ledger, store, job_id)
        else:
            ledger.note_manifest(ledger.job(job_id), mark)


def put_manifest(ledger: Ledger, store: ObjectStore, job_id: str) -> ObjectInfo:
    """Writes the manifest of a job in bounded memory: `manifest.jsonl`, or the next number if the content has
    changed. If the job has ended, the ledger records that its manifest is written, unless a decision was made
    meanwhile."""
    mark = ledger.begin_manifest(job_id)
    job = ledger.job(job_id)
    # A file without a name, so that a killed process leaves none.
    with tempfile.TemporaryFile(prefix="nightjar-manifest-") as file:
        for item in audio_items(ledger, store, job_id):
            file.write(json_line(_item_entry(item, metadata=metadata_json(item.dialogue))))
        file.seek(0)
        info = put_numbered(store, job_manifest_key(job.id), cast("BinaryIO", file), newest=True)
    store.sync()
    ledger.note_manifest(job, mark)
    return info
