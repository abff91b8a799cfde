"""Manifests: one JSON line for each item with audio, in index order, in the store beside the audio."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from jobs.dialogue import spoken_text
from jobs.layout import job_manifest_key, numbered_key, put_numbered, shard_manifest_key
from jobs.ledger.records import Artifact, Job, ShardAudio
from jobs.shard_file import ShardLine
from jobs.store.base import ObjectInfo, ObjectStore

CONTENT_TYPE = "application/x-ndjson"


class Spoken(msgspec.Struct, frozen=True):
    """What the audio of an item says, and whose turn it is."""

    text: str
    #: `user` or `assistant`; empty in jobs from before turns could be chosen.
    role: str = ""
    #: Index of the spoken message in the dialogue; None: the audio answers the whole of it.
    message_index: int | None = None


def spoken_by(job: Job, line: ShardLine) -> Spoken:
    """What the audio of a line of a shard says."""
    text = spoken_text(line.messages)
    if line.role is None:
        return Spoken(text, "assistant" if job.spec.speak == "answer" else "")
    return Spoken(text, line.role, line.message_index)


class ManifestEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a manifest."""

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
    #: As in `Spoken`; left out where they have their defaults.
    role: str = ""
    message_index: int | None = None
    #: Key of the pack whose member the audio is, and where its bytes begin in it; left out where it is an object of its own.
    pack: str | None = None
    pack_offset: int | None = None


def entry(example_id: str, artifact: Artifact | ShardAudio, spec_sha: str, spoken: Spoken) -> ManifestEntry:
    """The manifest's line for an audio artifact."""
    return ManifestEntry(
        example_id,
        artifact.index,
        artifact.key,
        artifact.sha256,
        artifact.bytes,
        artifact.sample_rate,
        artifact.samples,
        round(artifact.samples / artifact.sample_rate, 6),
        artifact.seed,
        spec_sha,
        spoken.text,
        spoken.role,
        spoken.message_index,
        artifact.pack,
        artifact.pack_offset,
    )


def encode_entries(lines: Iterable[ManifestEntry]) -> Iterator[bytes]:
    """JSONL with newlines, one line at a time."""
    encode = msgspec.json.Encoder().encode
    for line in lines:
        yield encode(line) + b"\n"


def put_shard_manifest(
    store: ObjectStore, job: Job, shard_no: int, items: Iterable[ShardAudio], lines: Iterable[ShardLine]
) -> tuple[str, str]:
    """Writes the manifest of a shard, of whose lines `items` are made. Returns its key and SHA-256, which the ledger may name now."""
    spoken = {line.index: spoken_by(job, line) for line in lines}
    data = b"".join(encode_entries(entry(audio.example_id, audio, job.spec_sha, spoken[audio.index]) for audio in items))
    info = put_numbered(store, shard_manifest_key(job.id, shard_no), data, CONTENT_TYPE).info
    store.sync()
    return info.key, info.sha256


def put_job_manifest(store: ObjectStore, job: Job, lines: Iterable[ManifestEntry]) -> ObjectInfo:
    """Writes the manifest of a whole job in bounded memory: `manifest.jsonl`, or the next number if the content has changed."""
    digest = hashlib.sha256()
    # A file without a name: a process that is killed leaves none behind.
    with tempfile.TemporaryFile(prefix="nightjar-manifest-") as file:
        for line in encode_entries(lines):
            digest.update(line)
            file.write(line)
        file.seek(0)
        number = 1
        while True:
            key = numbered_key(job_manifest_key(job.id), number)
            result = store.put_file(key, Path(f"/dev/fd/{file.fileno()}"), content_type=CONTENT_TYPE)
            if result.created or result.info.sha256 == digest.hexdigest():
                store.sync()
                return result.info
            number += 1


def newest_job_manifest(store: ObjectStore, job_id: str) -> str | None:
    """Key of the manifest that was written last, or None."""
    number = 0
    while store.head(numbered_key(job_manifest_key(job_id), number + 1)) is not None:
        number += 1
    return numbered_key(job_manifest_key(job_id), number) if number else None


def read_manifest(store: ObjectStore, key: str) -> Iterator[ManifestEntry]:
    """The lines of a manifest, streamed."""
    decode = msgspec.json.Decoder(ManifestEntry).decode
    with store.open(key) as stream:
        tail = b""
        while chunk := stream.read(1 << 20):
            *lines, tail = (tail + chunk).split(b"\n")
            yield from (decode(line) for line in lines)
