"""Deletion of a job: its objects in the store, its rows in the ledger, and its entry in the list of recent
jobs.

All objects of a job, including its copies of reference audio, have keys below `jobs/ID/`, so other jobs are not
affected. An interrupted deletion continues when the command is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from jobs.layout import job_prefix
from jobs.ledger import Ledger
from jobs.recent_jobs import forget
from jobs.store.base import ObjectInfo, ObjectStore, split_key
from pipelines.errors import ErrorCode, StoreError

#: Maximum number of objects deleted by one request, a limit of S3.
OBJECTS_AT_ONCE = 1000
#: Maximum number of listings. A worker that lost its lease may store more objects after a listing; the sweep
#: deletes those after the last one.
MAX_PASSES = 5


class Deleted(NamedTuple):
    """The data that was deleted, or would be deleted."""

    items: int
    objects: int
    #: Total size of the objects.
    bytes: int


def objects_of(store: ObjectStore, job_id: str) -> Iterator[ObjectInfo]:
    """Yields the objects of a job, except objects of other programs, whose keys are invalid. Raises
    `store.bad_key` for an invalid job id."""
    prefix = job_prefix(job_id)
    if split_key(prefix.removesuffix("/")) != ["jobs", job_id]:
        raise StoreError(
            ErrorCode.STORE_BAD_KEY,
            f"{job_id[:80]!a} is not the id of a job.",
            "`nightjar list` shows the jobs of this ledger.",
        )
    for info in store.list(prefix):
        if info.key.startswith(prefix):
            with suppress(StoreError):
                split_key(info.key)
                yield info


def delete_objects(store: ObjectStore, job_id: str) -> tuple[int, int]:
    """Deletes all objects of a job; returns their number and size. Raises `StoreError`."""
    objects = size = 0
    for _ in range(MAX_PASSES):
        before = objects
        found = objects_of(store, job_id)
        while page := list(islice(found, OBJECTS_AT_ONCE)):
            store.delete_many([info.key for info in page])
            objects += len(page)
            size += sum(info.bytes for info in page)
        if objects == before:
            break
    return objects, size


def measure_job(ledger: Ledger, store: ObjectStore, job_id: str) -> Deleted:
    """The data that `delete_job` would delete. Raises `NotFoundError` and `StoreError`."""
    sizes = [info.bytes for info in objects_of(store, job_id)]
    return Deleted(ledger.job(job_id).total_items, len(sizes), sum(sizes))


def delete_job(ledger: Ledger, store: ObjectStore, job_id: str) -> Deleted:
    """Deletes an ended job. Raises `NotFoundError`, `StoreError`, and `ServiceError` with `ledger.state` for a job that
    has not ended."""
    ledger.begin_delete(job_id)
    items = ledger.job(job_id).total_items
    objects, size = delete_objects(store, job_id)
    ledger.delete_rows(job_id)
    forget(job_id)
    return Deleted(items, objects, size)
