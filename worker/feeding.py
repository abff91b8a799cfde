"""What feeds an engine: requests of the lines of shards, the order of the shards, and shares of its time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from jobs.references import load_reference
from jobs.shard_file import NO_GENERATION, ShardLine
from jobs.spec import item_seed
from jobs.store.base import ObjectStore
from jobs.voices import item_request
from pipelines.engine_process.messages import RecentRecordings
from pipelines.request import Generation, SpokenRole, SynthesisRequest
from worker.admission import LOOK_SECONDS
from worker.leases import DOUBTS, Clock, HeldLease

#: Shards that are fed at the same time: reference audio of a store behind a network takes a while to come.
FOLDER_SHARDS, S3_SHARDS = 2, 16


class ReferenceCache:
    """The reference audio used last, up to `max_bytes`: neighbours in a file often clone the same voice."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._kept = RecentRecordings[tuple[str, str], bytes](max_bytes)
        self._lock = threading.Lock()

    def get(self, store: ObjectStore, job_id: str, key: str) -> bytes:
        """The object of a job's reference. Raises as `load_reference` does."""
        name = (store.url, key)
        with self._lock:
            data = self._kept.get(name)
        if data is None:
            data = load_reference(store, job_id, key)
            with self._lock:
                self._kept.keep(name, data, len(data))
                self._kept.forget()
        return data


@dataclass(eq=False)
class RequestBuilder:
    """Builds the requests of one lease."""

    held: HeldLease
    store: ObjectStore
    references: ReferenceCache
    #: The settings of lines that have none of their own, by role.
    defaults: dict[SpokenRole | None, Generation] = field(
        default_factory=dict[SpokenRole | None, Generation], init=False
    )

    def build(self, line: ShardLine, draw: int = 0) -> SynthesisRequest:
        """The request of a line, with its reference audio and the seed of its draw; the first draw is 0.

        Raises `InputError` when a reference is gone, and `StoreError` for an error that a retry does not
        solve.
        """
        lease = self.held.lease
        job, spec = lease.job, lease.job.spec
        if line.generation is not NO_GENERATION:
            generation = line.generation_over(spec.generation)
        else:
            if line.role not in self.defaults:
                self.defaults[line.role] = line.generation_over(spec.generation)
            generation = self.defaults[line.role]

        def load(key: str) -> bytes:
            return self.held.retrying(lambda: self.references.get(self.store, job.id, key), DOUBTS)

        request_id = f"{job.id}/{line.index}/{lease.epoch}" + (f"/{draw}" if draw else "")
        seed = item_seed(spec.seed, line.example_id, line.message_index, draw, line_seed=line.generation.seed)
        return item_request(line, generation, job, request_id, seed, load)


#: Place of a shard in the order; the smaller one goes first.
Rank = tuple[int, int]


class FeedingOrder:
    """A few shards at a time have their turn: those of a higher priority, then the older ones.
    Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = itertools.count()
        self._shards = FOLDER_SHARDS
        self._feeding: set[Rank] = set()
        self._waiting: set[Rank] = set()

    def place(self, priority: int, *, remote: bool) -> Rank:
        """The place of a shard that was claimed now. `remote`: a network lies before its store."""
        with self._changed:
            if remote:
                self._shards = S3_SHARDS
            return -priority, next(self._count)

    def take(self, rank: Rank, give_up: Callable[[], bool]) -> bool:
        """Waits until it is this shard's turn, or `give_up` returns True; returns whether it is.

        A shard that has its turn keeps it, unless it is the last one of them and a higher one waits.
        """
        with self._changed:
            if rank in self._feeding and not (
                self._waiting and min(self._waiting) < rank == max(self._feeding)
            ):
                return True
            self._feeding.discard(rank)
            self._waiting.add(rank)
            self._changed.notify_all()
            try:
                while len(self._feeding) >= self._shards or rank != min(self._waiting):
                    self._changed.wait(LOOK_SECONDS)
                    if give_up():
                        return False
            finally:
                self._waiting.discard(rank)
                self._changed.notify_all()
            self._feeding.add(rank)
            return True

    def leave(self, rank: Rank) -> None:
        """Lets another shard have its turn, until the next `take`."""
        with self._changed:
            self._feeding.discard(rank)
            self._changed.notify_all()


class EngineTimer:
    """Shares out the time of an engine: while n requests are in it, each of them pays a n-th of the time.

    The sum of all shares is the time in which the engine had work, whatever the batch was. This is the
    virtual time of fair queueing (Demers, Keshav and Shenker, 1989): it runs at the rate 1/n, and a
    request's share is how far it ran while the request was there.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests = 0
        self._virtual_seconds = 0.0
        self._read_at = clock.monotonic()

    def change(self, requests: int) -> float:
        """So many requests enter the engine, or leave it where the number is negative; the virtual seconds
        by now. A request's share is what passed of them while it was there."""
        with self._lock:
            now = self._clock.monotonic()
            if self._requests:
                self._virtual_seconds += (now - self._read_at) / self._requests
            self._read_at = now
            self._requests += requests
            return self._virtual_seconds
