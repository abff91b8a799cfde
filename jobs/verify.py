"""Is a job's result still what was made? Every object against the hash in the ledger."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
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
    #: None for what no item owns.
    example_id: str | None = None


class ObjectCheck:
    """Goes once over the input of a job's shards, the audio and texts of its items and what is in quarantine, and yields what is
    wrong, in bounded memory.

    A folder's files are read. A bucket's objects are read with `deep`, else their checksum is asked of the server.
    """

    def __init__(self, ledger: Ledger, store: ObjectStore, job: Job, *, deep: bool = False) -> None:
        self._ledger = ledger
        self._store = store
        self._job = job
        self._deep = deep
        #: Objects looked at so far.
        self.objects = 0

    def __iter__(self) -> Iterator[tuple[Expected, Fault]]:
        """Raises `StoreError` when the store cannot be asked."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:
            waiting: deque[tuple[Expected, Future[Fault | None]]] = deque()
            for expected in self._expected():
                waiting.append((expected, threads.submit(self._look, expected)))
                if len(waiting) > _AHEAD:
                    yield from self._result(*waiting.popleft())
            while waiting:
                yield from self._result(*waiting.popleft())

    def _expected(self) -> Iterator[Expected]:
        for key, sha256 in sorted(set(self._ledger.shard_inputs(self._job.id).values())):
            yield Expected(key, sha256)
        for row in self._ledger.items(self._job.id, state=ItemState.DONE):
            if row.artifact is not None:
                yield Expected(row.artifact.key, row.artifact.sha256, row.example_id)
        for kind in ("text", QUARANTINE):
            for key, sha256 in self._ledger.artifact_hashes(self._job.id, kind):
                yield Expected(key, sha256)

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
