"""Deletes a job: its objects in the store, its rows in the ledger, and what this user remembers of it.

Everything of a job has a key below `jobs/ID/`, also its copies of reference recordings, so nothing of
another job is touched. A deletion that was interrupted goes on when it is given again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from jobs.layout import job_prefix
from jobs.recent_jobs import forget
from jobs.store.base import ObjectInfo, ObjectStore, split_key
from pipelines.errors import ErrorCode, StoreError

if TYPE_CHECKING:
    from jobs.ledger import Ledger

#: Objects that one request deletes; S3 takes no more.
OBJECTS_AT_ONCE = 1000
#: A worker that lost its lease may store something behind the list. What comes later is left to the sweep.
MAX_PASSES = 5


@dataclass(frozen=True, slots=True)
class Deleted:
    """What was deleted, or would be."""

    job_id: str
    items: int
    objects: int
    #: Of the objects.
    bytes: int


def objects_of(store: ObjectStore, job_id: str) -> Iterator[ObjectInfo]:
    """The objects of a job, streamed. Raises `store.bad_key` for an id that would lead out of its folder."""
    prefix = job_prefix(job_id)
    if split_key(prefix.removesuffix("/")) != ["jobs", job_id]:
        raise StoreError(
            ErrorCode.STORE_BAD_KEY,
            f"The id {job_id[:80]!a} is not the id of a job.",
            "`nightjar list` shows the jobs of this ledger.",
        )
    return (
        info for info in store.list(prefix) if info.key.startswith(prefix) and _is_written_by_us(info.key)
    )


def delete_objects(store: ObjectStore, job_id: str) -> tuple[int, int]:
    """Deletes every object of a job; how many there were, and their bytes. Raises `StoreError`."""
    objects = size = 0
    for _ in range(MAX_PASSES):
        before, found = objects, objects_of(store, job_id)
        while page := list(islice(found, OBJECTS_AT_ONCE)):
            store.delete_many([info.key for info in page])
            objects, size = objects + len(page), size + sum(info.bytes for info in page)
        if objects == before:
            break
    return objects, size


def measure_job(ledger: Ledger, store: ObjectStore, job_id: str) -> Deleted:
    """What `delete_job` would delete. Writes nothing. Raises `NotFoundError` and `StoreError`."""
    objects = size = 0
    for info in objects_of(store, job_id):
        objects, size = objects + 1, size + info.bytes
    return Deleted(job_id, ledger.job(job_id).total_items, objects, size)


def delete_job(ledger: Ledger, store: ObjectStore, job_id: str) -> Deleted:
    """Deletes a job that has ended. Raises `NotFoundError`, `StoreError`, and `ServiceError` with
    `ledger.state` for one that has not."""
    ledger.begin_delete(job_id)
    items = ledger.job(job_id).total_items
    objects, size = delete_objects(store, job_id)
    ledger.delete_rows(job_id)
    forget(job_id)
    return Deleted(job_id, items, objects, size)


def _is_written_by_us(key: str) -> bool:
    """What somebody else put there under a key that no store of ours takes stays."""
    try:
        split_key(key)
    except StoreError:
        return False
    return True
