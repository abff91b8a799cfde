"""Is a job's result still what was made? Every object against the hash in the ledger."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

from jobs.ledger.records import QUARANTINE, ItemState, Job
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, StoreError

if TYPE_CHECKING:
    from jobs.ledger import Ledger

_THREADS = 8
_AHEAD = 64
_CHUNK_BYTES = 1 << 20


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


KINDS = ("input", "audio", "text", QUARANTINE)


def expected_objects(ledger: Ledger, job_id: str, kinds: Collection[str] = KINDS) -> Iterator[Expected]:
    """What the ledger says is in the store, in the order of the keys for each kind; a page in memory at a time."""
    if "input" in kinds:
        for key, sha256 in sorted(set(ledger.shard_inputs(job_id).values())):
            yield Expected(key, sha256)
    if "audio" in kinds:
        for row in ledger.items(job_id, state=ItemState.DONE):
            if (audio := row.artifact) is not None:
                yield Expected(audio.key, audio.sha256, "audio", row.index, row.example_id, audio.bytes)
    for kind in ("text", QUARANTINE):
        if kind in kinds:
            for index, key, sha256, size in ledger.artifact_facts(job_id, kind):
                yield Expected(key, sha256, kind, index, None, size)


def listed_faults(store: ObjectStore, objects: Iterable[Expected]) -> Iterator[tuple[Expected, Fault]]:
    """What is missing or has another size, from listings of the store: quick, but damage that keeps the size is not found.

    Raises `StoreError` when the store cannot be asked.
    """
    for folder, inside in groupby(objects, lambda expected: expected.key.rpartition("/")[0]):
        sizes = {info.key: info.bytes for info in store.list(f"{folder}/")}
        for expected in inside:
            size = sizes.get(expected.key)
            if size is None:
                yield expected, Fault.MISSING
            elif size != expected.bytes and (expected.bytes is not None or size == 0):
                yield expected, Fault.CHANGED


class ObjectCheck:
    """Goes once over the input of a job's shards, the audio and texts of its items and what is in quarantine, and yields what is
    wrong, in bounded memory.

    A folder's files are read. A bucket's objects are read with `deep`, else their checksum is asked of the server.
    """

    def __init__(self, ledger: Ledger, store: ObjectStore, job: Job, *, deep: bool = False, kinds: Collection[str] = KINDS) -> None:
        self._ledger = ledger
        self._store = store
        self._job = job
        self._deep = deep
        self._kinds = kinds
        #: Objects looked at so far.
        self.objects = 0

    def __iter__(self) -> Iterator[tuple[Expected, Fault]]:
        """Raises `StoreError` when the store cannot be asked."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:
            waiting: deque[tuple[Expected, Future[Fault | None]]] = deque()
            for expected in expected_objects(self._ledger, self._job.id, self._kinds):
                waiting.append((expected, threads.submit(self._look, expected)))
                if len(waiting) > _AHEAD:
                    yield from self._result(*waiting.popleft())
            while waiting:
                yield from self._result(*waiting.popleft())

    def _result(self, expected: Expected, future: Future[Fault | None]) -> Iterator[tuple[Expected, Fault]]:
        self.objects += 1
        fault = future.result()
        if fault is not None:
            yield expected, fault

    def _look(self, expected: Expected) -> Fault | None:
        try:
            found = self._read(expected.key) if self._deep else self._asked(expected.key)
        except StoreError as error:
            if error.code is ErrorCode.STORE_MISSING:
                return Fault.MISSING
            if error.code is ErrorCode.STORE_BAD_KEY:
                # A folder or a symbolic link is in its place.
                return Fault.CHANGED
            raise
        if found is None:
            return Fault.MISSING
        return None if found == expected.sha256 else Fault.CHANGED

    def _asked(self, key: str) -> str | None:
        info = self._store.head(key)
        return info.sha256 if info is not None else None

    def _read(self, key: str) -> str:
        digest = hashlib.sha256()
        with self._store.open(key) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()
