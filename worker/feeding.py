"""The input of an engine: requests from the lines of shards, the order in which shards feed the engine, and each
request's share of the engine's time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from jobs.dialogue import NO_GENERATION
from jobs.references import load_reference
from jobs.shard_file import ShardLine
from jobs.spoken_text import pronunciations_of
from jobs.store.base import ObjectStore
from jobs.voices import item_request
from pipelines.pronunciation import WholeWords
from pipelines.recording import SizedCache
from pipelines.request import Generation, SpokenRole, SynthesisRequest
from worker.admission import CHECK_SECONDS
from worker.leases import MAX_REREADS, Clock, HeldLease

#: Maximum number of shards that feed the engine at the same time. More do so with S3, because loading reference audio
#: from there takes time.
FOLDER_SHARDS, S3_SHARDS = 2, 16


@dataclass
class RequestBuilder:
    """Builds the requests of one lease."""

    held: HeldLease
    store: ObjectStore
    #: The most recently used reference audio, because consecutive items often clone the same voice.
    references: SizedCache[bytes]
    #: Role -> settings for lines without their own settings.
    defaults: dict[SpokenRole | None, Generation] = field(default_factory=dict, init=False)

    @cached_property
    def pronunciations(self) -> WholeWords | None:
        """Those of the job's lexicon."""
        return pronunciations_of(self.held.lease.job.spec)

    def build(self, line: ShardLine, draw: int = 0) -> SynthesisRequest:
        """The request of a line for a draw (from 0), with its reference audio and seed.

        Raises `InputError` for missing reference audio, and `StoreError` for an error that is not retryable.
        """
        lease = self.held.lease
        job = lease.job
        spec = lease.job.spec
        if line.generation is not NO_GENERATION:
            generation = line.generation_over(spec.generation)
        else:
            if line.role not in self.defaults:
                self.defaults[line.role] = line.generation_over(spec.generation)
            generation = self.defaults[line.role]

        def load(key: str) -> bytes:
            read = partial(load_reference, self.store, job.id, key)
            return self.held.retrying(lambda: self.references.find((self.store.url, key), read), MAX_REREADS)

        request_id = f"{job.id}/{line.index}/{lease.epoch}" + (f"/{draw}" if draw else "")
        return item_request(
            line, generation, job, request_id, line.seed(spec.seed, draw), load, self.pronunciations
        )


#: Position of a shard in the order; the shard with the smallest position feeds first.
Rank = tuple[int, int]


class FeedingOrder:
    """Gives a few shards at a time their turn to feed the engine, by priority and then by age. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = itertools.count()
        self._shards = FOLDER_SHARDS
        self._feeding = set[Rank]()
        self._waiting = set[Rank]()

    def place(self, priority: int, *, remote: bool) -> Rank:
        """The position of a newly claimed shard. `remote`: its store is remote."""
        with self._changed:
            if remote:
                self._shards = S3_SHARDS
            return -priority, next(self._count)

    def take(self, rank: Rank, give_up: Callable[[], bool]) -> bool:
        """Waits for the turn of this shard; False: `give_up` returned True first.

        A shard that already has a turn keeps it, with one exception: while an earlier shard waits, the last in the
        order of those that have a turn gives it up.
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
                    self._changed.wait(CHECK_SECONDS)
                    if give_up():
                        return False
            finally:
                self._waiting.discard(rank)
                self._changed.notify_all()
            self._feeding.add(rank)
            return True

    def leave(self, rank: Rank) -> None:
        """Ends the turn of this shard, until the next `take`."""
        with self._changed:
            self._feeding.discard(rank)
            self._changed.notify_all()


class EngineTimer:
    """Divides the time of an engine among its requests: while it has n requests, each gets 1/n of the time.

    The sum of all shares is the time in which the engine had work. The shares are computed from the virtual time of
    fair queueing (Demers, Keshav and Shenker, 1989), which runs at the rate 1/n: a request's share is the increase of
    the virtual time while the request is in the engine.
    """

    #: Time in which the engine had work, until the last change.
    busy_seconds = 0.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests = 0
        self._virtual_seconds = 0.0
        self._read_at = clock.monotonic()

    def change(self, requests: int) -> float:
        """Adds this number of requests to the count (negative: removes them). Returns the virtual time in seconds."""
        with self._lock:
            now = self._clock.monotonic()
            if self._requests:
                self._virtual_seconds += (now - self._read_at) / self._requests
                self.busy_seconds += now - self._read_at
            self._read_at = now
            self._requests += requests
            return self._virtual_seconds
