"""Builds the requests for a pipeline from the lines of a shard."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from jobs.references import load_reference
from jobs.shard_file import NO_GENERATION, ShardLine
from jobs.spec import item_seed
from jobs.store.base import ObjectStore
from jobs.voices import item_request
from pipelines.request import Generation, SpokenRole, SynthesisRequest
from worker.leases import DOUBTS, HeldLease


class ReferenceCache:
    """The reference audio used last, up to `max_bytes`: neighbours in a file often clone the same voice."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._audio: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, store: ObjectStore, job_id: str, key: str) -> bytes:
        """The object of a job's reference. Raises as `load_reference` does."""
        name = (store.url, key)
        with self._lock:
            if name in self._audio:
                self._audio.move_to_end(name)
                return self._audio[name]
        data = load_reference(store, job_id, key)
        with self._lock:
            if name not in self._audio:
                self._audio[name] = data
                self._bytes += len(data)
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._audio.popitem(last=False)[1])
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
