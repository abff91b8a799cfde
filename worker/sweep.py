"""The sweep: objects that a job left in the store and that nothing names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from jobs.artifacts import job_prefix
from jobs.ledger.records import QUARANTINE, Job, JobState
from jobs.payload import read_references
from jobs.store.base import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings

log = structlog.get_logger(__name__)

GRACE_SECONDS = 24 * 3600.0
FINAL_STATES = tuple(state for state in JobState if state.final)
_MOST_JOBS = 1_000_000
_INDEX = re.compile(r"/(\d{9})-[^/]*$")


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a sweep found."""

    orphans: int = 0
    bytes: int = 0

    def __add__(self, other: SweepReport) -> SweepReport:
        return SweepReport(self.orphans + other.orphans, self.bytes + other.bytes)


def sweep(ledger: Ledger, store_for: Callable[[str], ObjectStore], grace_seconds: float = GRACE_SECONDS, *, delete: bool) -> SweepReport:
    """Looks through the objects of every job that ended more than `grace_seconds` ago; deletes orphans if told to.

    Orphans come from items that were stored and never committed: of a cancelled job, or of a worker that was killed. A job
    that may still run is left alone, because its objects may be committed at any moment. What `jobs retry` needs stays.
    Raises `ServiceError` and `StoreError`.
    """
    report = SweepReport()
    ended_before = ledger.now() - grace_seconds
    for job in ledger.jobs(_MOST_JOBS, FINAL_STATES):
        if job.finished_at is None or job.finished_at > ended_before:
            continue
        store = store_for(job.store_url)
        found = SweepReport()
        for info in orphans(ledger, store, job):
            found += SweepReport(1, info.bytes)
            if delete:
                store.delete(info.key)
        if found.orphans:
            log.info("orphans", job=job.id, orphans=found.orphans, bytes=found.bytes, deleted=delete)
        report += found
    return report


def sweep_all(settings: Settings, grace_seconds: float, *, delete: bool) -> SweepReport:
    """A sweep of this installation."""
    from jobs.ledger import Ledger
    from jobs.store import open_store

    ledger = Ledger.open(settings.ledger_url)
    try:
        ledger.check_schema()
        return sweep(ledger, lambda url: open_store(url, settings.s3), grace_seconds, delete=delete)
    finally:
        ledger.close()


def orphans(ledger: Ledger, store: ObjectStore, job: Job) -> Iterator[ObjectInfo]:
    """Objects of a job that nothing names: audio, texts and quarantine of no item, inputs of no shard, references of no line. Streams."""
    prefix = job_prefix(job.id)
    for kind in ("audio", "text", QUARANTINE):
        yield from _unnamed(store.list(f"{prefix}{kind}/"), ledger.artifact_keys(job.id, kind))
    inputs = set(ledger.shard_inputs(job.id).values())
    keys = {key for key, _ in inputs}
    yield from (info for info in store.list(f"{prefix}input/") if info.key not in keys)
    references = list(store.list(f"{prefix}references/"))
    if references:
        named = {key for where in inputs for key in read_references(store, *where)}
        yield from (info for info in references if info.key not in named)


def _unnamed(objects: Iterable[ObjectInfo], artifacts: Iterable[tuple[int, str]]) -> Iterator[ObjectInfo]:
    """Objects whose key is no artifact's; keys and artifacts, (index, key), both come in the order of the index."""
    rows = iter(artifacts)
    row = next(rows, None)
    for info in objects:
        match = _INDEX.search(info.key)
        if match is None:
            continue
        index = int(match[1])
        while row is not None and row[0] < index:
            row = next(rows, None)
        if row != (index, info.key):
            yield info
