"""Verification of a job: compares the stored objects with the hashes in the ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from jobs.layout import PACK_SHA_CHARACTERS, sha256_of_pack
from jobs.ledger import Ledger
from jobs.ledger.records import QUARANTINE, WORDS, Artifact, ItemState, Job
from jobs.packs import ArtifactReader, map_ahead
from jobs.store.base import ObjectStore, sha256_of
from jobs.where import Where
from pipelines.errors import ErrorCode, StoreError

_THREADS = 8
_AHEAD = 64


#: A fault of an object: it is missing, or its hash differs.
Fault = Literal["missing", "changed"]


@dataclass(frozen=True, slots=True)
class Expected:
    """An object as recorded in the ledger."""

    key: str
    sha256: str
    #: `input`, or the kind of an artifact.
    kind: str = "input"
    #: Index of its item; None for an input.
    index: int | None = None
    #: Id of its item; None if the id was not read from the ledger.
    example_id: str | None = None
    #: None for an input.
    bytes: int | None = None
    #: The pack that contains it, and its offset there; None: it is a separate object.
    pack: str | None = None
    pack_offset: int | None = None

    @property
    def end(self) -> int:
        """The offset of its end in its pack, which is at least this large."""
        return (self.pack_offset or 0) + (self.bytes or 0)


KINDS = ("input", "audio", "codes", "text", WORDS, QUARANTINE)


def expected_objects(
    ledger: Ledger,
    job_id: str,
    kinds: Collection[str] = KINDS,
    where: Where | None = None,
    *,
    dialogues: bool = False,
) -> Iterator[Expected]:
    """Yields the objects that the ledger refers to, in key order for each kind. Only some are in memory at
    once.

    `where`: only the audio of matching items, with `dialogues` also of other items of their dialogues. In a job of
    codes alone the codes are its audio.
    """
    if "input" in kinds:
        for key, sha256 in sorted(set(ledger.shard_inputs(job_id).values())):
            yield Expected(key, sha256)
    if "audio" in kinds:
        for row in ledger.items(job_id, state=ItemState.DONE, where=where, dialogues=dialogues):
            if row.artifact is not None:
                yield _expected(row.artifact, row.example_id)
    beside = ("codes", "text", WORDS, QUARANTINE)
    for kind in beside if ledger.job(job_id).spec.main_kind == "audio" else beside[1:]:
        if kind in kinds:
            yield from map(_expected, ledger.artifacts(job_id, kind))


def _expected(found: Artifact, example_id: str | None = None) -> Expected:
    place = found.pack, found.pack_offset
    return Expected(found.key, found.sha256, found.kind, found.index, example_id, found.bytes, *place)


def listed_faults(store: ObjectStore, objects: Iterable[Expected]) -> Iterator[tuple[Expected, Fault]]:
    """Yields objects that are missing or have another size in listings of the store. This is fast, but does
    not find damage that keeps the size.

    Raises `StoreError` if the store fails.
    """

    # Objects of a kind are in the order of their folders, and all packs are in one.
    @lru_cache(1)
    def sizes(folder: str) -> dict[str, int]:
        return {info.key: info.bytes for info in store.list(folder)}

    for expected in objects:
        key = expected.pack or expected.key
        size = sizes(f"{key.rpartition('/')[0]}/").get(key)
        if size is None:
            yield expected, "missing"
        elif expected.pack is not None:
            if size < expected.end:
                yield expected, "changed"
        elif size != expected.bytes and (expected.bytes is not None or size == 0):
            yield expected, "changed"


@dataclass
class ObjectCheck:
    """Iterates once over the faults of a job's inputs, audio, texts and quarantined audio, in bounded memory.

    Files of a folder store are read. Objects of a bucket are read with `deep`, otherwise the server's
    checksum is compared. If the checksum of a pack differs, its members are read.
    """

    ledger: Ledger
    store: ObjectStore
    job: Job
    deep: bool = False
    kinds: Collection[str] = KINDS
    #: Number of objects checked so far.
    objects: int = 0

    def __iter__(self) -> Iterator[tuple[Expected, Fault]]:
        """Raises `StoreError` if the store fails."""
        objects = expected_objects(self.ledger, self.job.id, self.kinds)
        artifacts = ArtifactReader(self.store)
        head = lru_cache(None)(self.store.head)
        by_server = self.store.remote and not self.deep

        def sha256(expected: Expected) -> str | None:
            """The hash of an object; None: it is missing. A member of a pack is not read if the pack's
            checksum matches the pack's key and the pack is long enough; its hash is then the recorded one."""
            if expected.pack:
                info = head(expected.pack) if by_server else None
                known = None if info is None else info.sha256[:PACK_SHA_CHARACTERS]
                if info is not None and known == sha256_of_pack(expected.pack) and expected.end <= info.bytes:
                    return expected.sha256
                return sha256_of(artifacts.read(expected))
            if not self.deep:
                info = self.store.head(expected.key)
                return None if info is None else info.sha256
            with self.store.open(expected.key) as stream:
                return sha256_of(stream)

        def check(expected: Expected) -> Fault | None:
            try:
                found = sha256(expected)
            except StoreError as error:
                if error.code is ErrorCode.STORE_MISSING:
                    return "missing"
                if error.code in (ErrorCode.STORE_BAD_KEY, ErrorCode.STORE_CONFLICT):
                    # A folder or symbolic link is in its place, or its pack is too short.
                    return "changed"
                raise
            if found is None:
                return "missing"
            return None if found == expected.sha256 else "changed"

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:
            for expected, fault in map_ahead(partial(threads.submit, check), objects, _AHEAD):
                self.objects += 1
                if fault is not None:
                    yield expected, fault
