"""Finds and deletes orphans: objects of ended jobs without an artifact, and objects of deleted jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import NamedTuple

import structlog

from jobs.delete import delete_objects, objects_of
from jobs.layout import index_of, job_prefix, packs_prefix
from jobs.ledger import Ledger
from jobs.ledger.control import DeletedJob
from jobs.ledger.reconcile import Inputs
from jobs.ledger.records import FINAL, QUARANTINE, WORDS, Artifact, Job
from jobs.settings import Settings
from jobs.shard_file import read_raw_shard
from jobs.store import open_store
from jobs.store.base import ObjectInfo, ObjectStore
from jobs.voices import recording_keys
from pipelines.errors import ErrorCode, NightjarError, StoreError

log = structlog.get_logger(__name__)

#: Time after which the ledger forgets a deleted job. By then no worker writes under an old lease.
REMEMBERED_SECONDS = 30 * 24 * 3600.0
_MAX_JOBS = 1_000_000


class SweepReport(NamedTuple):
    """The result of a sweep."""

    orphans: int = 0
    bytes: int = 0
    #: Jobs whose sweep was aborted by an error of the store or ledger.
    failed_jobs: int = 0


#: An orphan and the inputs that were searched for references to it, without finding any. Only reference audio needs such
#: a search; for other objects the set is empty.
Orphan = tuple[ObjectInfo, Inputs]


def sweep(
    ledger: Ledger,
    store_for: Callable[[str], ObjectStore],
    grace_seconds: float = 24 * 3600.0,
    *,
    delete: bool,
) -> SweepReport:
    """Finds, and with `delete` deletes, orphans of all jobs that ended more than `grace_seconds` ago.

    Orphans are stored results that were never committed, because the job was cancelled or the worker killed. Objects
    are kept if their job may still run, if `nightjar retry` may adopt them, if they are younger than the grace time,
    or if their key is not one that the job in this ledger writes. Before an object is deleted, its job is locked and
    its key is checked again. Raises `ServiceError` if the ledger cannot be reached.
    """
    objects = size = failed = 0
    before = ledger.now() - grace_seconds
    ended = [
        job
        for job in ledger.jobs(_MAX_JOBS, FINAL)
        if job.finished_at is not None and job.finished_at <= before
    ]
    for job in (*ended, *ledger.deleted_jobs()):
        found = 0
        try:
            store = store_for(job.store_url)
            store.confirm(job.store_identity)
            for more, their_size in _swept(ledger, store, job, before, delete):
                found += more
                size += their_size
        except NightjarError as error:
            if error.code is ErrorCode.LEDGER_UNREACHABLE:
                raise
            log.warning("job not swept", job=job.id, code=error.code.value, error=str(error))
            failed += 1
        if found:
            log.info("orphans", job=job.id, orphans=found)
        objects += found
    return SweepReport(objects, size, failed)


def sweep_all(settings: Settings, grace_seconds: float, *, delete: bool) -> SweepReport:
    """Sweeps all jobs of the ledger in the settings."""
    with closing(Ledger.of(settings)) as ledger:
        ledger.check_schema()
        return sweep(ledger, lambda url: open_store(url, settings.s3), grace_seconds, delete=delete)


def orphans(ledger: Ledger, store: ObjectStore, job: Job, before: float) -> Iterator[Orphan]:
    """Streams the objects of a job that are older than `before` and that nothing refers to: audio, texts and
    quarantined audio without an artifact, packs without members, inputs without a shard, reference audio without a
    line.

    Raises `StoreError` with `store.conflict` if the store does not list in key order.
    """
    for info, read in _unreferenced(ledger, store, job):
        old = info.modified_at is not None and info.modified_at <= before
        if old and ledger.is_orphan(job.id, info.key, before, read):
            yield info, read


def _swept(
    ledger: Ledger, store: ObjectStore, job: Job | DeletedJob, before: float, delete: bool
) -> Iterator[tuple[int, int]]:
    """Numbers of orphans and their total sizes in bytes. Those of a deleted job were stored by a worker without a lease
    after the deletion."""
    if isinstance(job, Job):
        for info, read in orphans(ledger, store, job, before):
            remove = partial(store.delete, info.key)
            if not delete or ledger.delete_orphan(job.id, info.key, before, remove, read):
                yield 1, info.bytes
    elif not delete:
        yield from ((1, info.bytes) for info in objects_of(store, job.id))
    else:
        yield delete_objects(store, job.id)
        if ledger.now() - job.deleted_at > REMEMBERED_SECONDS:
            ledger.forget_deleted(job.id)


def _unreferenced(ledger: Ledger, store: ObjectStore, job: Job) -> Iterator[Orphan]:
    def listed(prefix: str) -> Iterator[ObjectInfo]:
        """The objects under a prefix. Raises `store.conflict` if they are not in key order."""
        last = ""
        for info in store.list(prefix):
            if info.key <= last:
                raise StoreError(
                    ErrorCode.STORE_CONFLICT,
                    f"The store {store.url} does not list its objects in the order of their keys.",
                    "Use a store that lists like S3. Nothing more was deleted.",
                )
            last = info.key
            yield info

    prefix = job_prefix(job.id)
    nothing = Inputs()
    for kind in ("audio", "codes", "text", WORDS, QUARANTINE):
        for info in _without(listed(f"{prefix}{kind}/"), ledger.artifacts(job.id, kind)):
            yield info, nothing
    packs = ledger.packs(job.id)
    inputs = frozenset(ledger.shard_inputs(job.id).values())
    named = packs | {key for key, _ in inputs}
    for place in (packs_prefix(job.id), f"{prefix}input/"):
        yield from ((info, nothing) for info in listed(place) if info.key not in named)
    references = list(listed(f"{prefix}references/"))
    if references:
        lines = (line for where in inputs for line in read_raw_shard(store, *where))
        named = recording_keys(job.spec, job.id).union(*(line.references.values() for line in lines))
        yield from ((info, inputs) for info in references if info.key not in named)


def _without(objects: Iterable[ObjectInfo], artifacts: Iterable[Artifact]) -> Iterator[ObjectInfo]:
    """The objects whose key no artifact has. Objects and artifacts are both in index order."""
    rows = iter(artifacts)
    row = next(rows, None)
    for info in objects:
        index = index_of(info.key)
        if index is None:
            continue
        while row is not None and row.index < index:
            row = next(rows, None)
        if row is None or row.key != info.key:
            yield info
