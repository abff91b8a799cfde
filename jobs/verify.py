"""Is what was made of a job still in the store: every object against its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from jobs.layout import (
    PACK_SHA_CHARACTERS,
    sha256_of_pack,
)
from jobs.ledger.records import QUARANTINE, Artifact, ItemState, Job
from jobs.packs import ArtifactReader, ahead
from jobs.store.base import ObjectStore, sha256_of
from jobs.where import Where
from pipelines.errors import ErrorCode, StoreError

if TYPE_CHECKING:
    from jobs.ledger import Ledger


_THREADS = 8
_AHEAD = 64
#: Objects come in the order of their folders, those of packs in several at a time.
_FOLDERS = 16


class Fault(StrEnum):
    """What is wrong with an object."""

    MISSING = "missing"
    #: Its content has another hash.
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Expected:
    """An object as the ledger knows it."""

    key: str
    sha256: str
    #: `input`, or the artifact's: `audio`, `text`, `quarantine`.
    kind: str = "input"
    #: Of the item that owns it; None for an input.
    index: int | None = None
    #: None where only the items of the job tell it.
    example_id: str | None = None
    #: None for an input.
    bytes: int | None = None
    #: As in `Artifact`.
    pack: str | None = None
    pack_offset: int | None = None

    @property
    def object_key(self) -> str:
        """The key of the object that holds it."""
        return self.pack or self.key

    @property
    def end(self) -> int:
        """How many bytes the pack that holds it has at least."""
        return (self.pack_offset or 0) + (self.bytes or 0)


KINDS = ("input", "audio", "text", QUARANTINE)


def expected_objects(
    ledger: Ledger,
    job_id: str,
    kinds: Collection[str] = KINDS,
    where: Where | None = None,
    *,
    dialogues: bool = False,
) -> Iterator[Expected]:
    """What the ledger says is in the store, in the order of the keys for each kind; a page in memory at a
    time.

    `where`: audio only of items that match, with `dialogues` also of the others of their dialogues.
    """
    if "input" in kinds:
        for key, sha256 in sorted(set(ledger.shard_inputs(job_id).values())):
            yield Expected(key, sha256)
    if "audio" in kinds:
        for row in ledger.items(job_id, state=ItemState.DONE, where=where, dialogues=dialogues):
            if row.artifact is not None:
                yield _expected(row.artifact, row.example_id)
    for kind in ("text", QUARANTINE):
        if kind in kinds:
            yield from map(_expected, ledger.artifacts(job_id, kind))


def _expected(found: Artifact, example_id: str | None = None) -> Expected:
    place = found.pack, found.pack_offset
    return Expected(found.key, found.sha256, found.kind, found.index, example_id, found.bytes, *place)


def listed_faults(store: ObjectStore, objects: Iterable[Expected]) -> Iterator[tuple[Expected, Fault]]:
    """What is missing or has another size, from listings of the store: quick, but damage that keeps the
    size is not found.

    Raises `StoreError` when the store cannot be asked.
    """

    @lru_cache(_FOLDERS)
    def sizes(folder: str) -> dict[str, int]:
        return {info.key: info.bytes for info in store.list(folder)}

    for expected in objects:
        key = expected.object_key
        size = sizes(f"{key.rpartition('/')[0]}/").get(key)
        if size is None:
            yield expected, Fault.MISSING
        elif expected.pack is not None:
            if size < expected.end:
                yield expected, Fault.CHANGED
        elif size != expected.bytes and (expected.bytes is not None or size == 0):
            yield expected, Fault.CHANGED


@dataclass
class ObjectCheck:
    """Goes once over the input of a job's shards, the audio and texts of its items and what is in
    quarantine, and yields what is wrong, in bounded memory.

    A folder's files are read. A bucket's objects are read with `deep`, else their checksum is asked of the
    server. Of a pack whose checksum is another one every member is read.
    """

    ledger: Ledger
    store: ObjectStore
    job: Job
    deep: bool = False
    kinds: Collection[str] = KINDS
    #: Looked at so far.
    objects: int = 0

    def __iter__(self) -> Iterator[tuple[Expected, Fault]]:
        """Raises `StoreError` when the store cannot be asked."""
        objects = expected_objects(self.ledger, self.job.id, self.kinds)
        artifacts, head = ArtifactReader(self.store), lru_cache(None)(self.store.head)
        by_server = self.store.remote and not self.deep

        def sha256(expected: Expected) -> str | None:
            """The hash of an object, None where it is missing. Where the server says that a whole pack is
            as its key says, and as long as the member needs, that of the member is the one that is known."""
            if expected.pack:
                info = head(expected.pack) if by_server else None
                whole = info is not None and info.sha256[:PACK_SHA_CHARACTERS] == sha256_of_pack(
                    expected.pack
                )
                if info is not None and whole and expected.end <= info.bytes:
                    return expected.sha256
                return hashlib.sha256(artifacts.read(expected)).hexdigest()
            if not self.deep:
                info = self.store.head(expected.key)
                return None if info is None else info.sha256
            with self.store.open(expected.key) as stream:
                return sha256_of(stream)

        def look(expected: Expected) -> Fault | None:
            try:
                found = sha256(expected)
            except StoreError as error:
                if error.code is ErrorCode.STORE_MISSING:
                    return Fault.MISSING
                if error.code in (ErrorCode.STORE_BAD_KEY, ErrorCode.STORE_CONFLICT):
                    # A folder or a symbolic link is in its place, or a pack ends before it.
                    return Fault.CHANGED
                raise
            if found is None:
                return Fault.MISSING
            return None if found == expected.sha256 else Fault.CHANGED

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:
            for expected, fault in ahead(threads, look, objects, _AHEAD):
                self.objects += 1
                if fault is not None:
                    yield expected, fault
