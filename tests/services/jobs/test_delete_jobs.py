"""Deleting a job on SQLite and on PostgreSQL: every row of it goes, no row of another one, and nothing
comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa

from jobs import delete as deleting
from jobs.delete import delete_job, measure_job
from jobs.ledger import Ledger, control
from jobs.ledger.records import CommitResult, Job, JobState, RejectedLine, Ticket
from pipelines.errors import ErrorCode, NotFoundError, ServiceError, StoreError
from tests.support.fakes import MemoryStore
from tests.support.ledger_kit import LEASE_SECONDS, done, failed, lease_next, new_job, rows, shards_of, submit

_VALUES: tuple[tuple[type[Any], object], ...] = (
    (sa.Boolean, True),
    (sa.Integer, 0),
    (sa.Float, 1.0),
    (sa.JSON, {}),
    (sa.Text, "x"),
)


def ended(ledger: Ledger, sizes: Sequence[int] = (2, 2), **changes: object) -> Job:
    """A job that is done, with one item that failed."""
    job = submit(ledger, sizes, **changes)
    for size, first in zip(sizes, (0, *sizes)):
        lease = lease_next(ledger)
        ledger.commit(
            lease.ticket, [failed(first), *(done(index) for index in range(first + 1, first + size))]
        )
        ledger.finish_shard(lease.ticket)
    return ledger.job(job.id)


def tables_of(ledger: Ledger, job: Job) -> dict[str, int]:
    """Rows of a job in every table of the database that names a job, as the database itself says."""
    number = rows(ledger, "SELECT no FROM jobs WHERE id = :job", job=job.id)
    inspector = sa.inspect(ledger.engine)
    found: dict[str, int] = {}
    for table in inspector.get_table_names():
        columns = {column["name"] for column in inspector.get_columns(table)}
        for key, value in (("job_no", number[0][0] if number else -1), ("job_id", job.id)):
            if key in columns:
                found[table] = rows(
                    ledger, f"SELECT count(*) FROM {table} WHERE {key} = :value", value=value
                )[0][0]
    return found


def fill(ledger: Ledger, job: Job) -> None:
    """A row of the job in each table that has none."""
    ((number,),) = rows(ledger, "SELECT no FROM jobs WHERE id = :job", job=job.id)
    for name, count in tables_of(ledger, job).items():
        if count:
            continue
        table = sa.Table(name, sa.MetaData(), autoload_with=ledger.engine)
        needed = [column for column in table.c if not column.nullable and column.server_default is None]
        values = {
            column.name: next(value for kind, value in _VALUES if isinstance(column.type, kind))
            for column in needed
        }
        values |= {key: value for key, value in (("job_no", number), ("job_id", job.id)) if key in table.c}
        with ledger.engine.begin() as connection:
            connection.execute(sa.insert(table).values(**values))


def test_every_table_that_names_a_job_loses_its_rows_and_no_others(ledger: Ledger) -> None:
    first, second = ended(ledger), ended(ledger)
    for job in (first, second):
        fill(ledger, job)
    assert 0 not in tables_of(ledger, first).values()
    kept = tables_of(ledger, second)
    delete_job(ledger, MemoryStore(), first.id)
    leftover = {name: count for name, count in tables_of(ledger, first).items() if count}
    # SQLite may give the number of a job that is gone to a new one, so no row may be left under it.
    numbers = [
        rows(ledger, f"SELECT DISTINCT job_no FROM {name}")
        for name in ("items", "artifacts", "draws", "item_errors")
    ]
    assert (leftover, [len(found) for found in numbers]) == ({}, [1, 1, 1, 1])
    assert tables_of(ledger, second) == kept
    with pytest.raises(NotFoundError):
        ledger.job(first.id)


@pytest.mark.parametrize(
    "prepare",
    [lambda *_: None, lambda ledger, job: lease_next(ledger), lambda ledger, job: ledger.pause(job.id)],
)
def test_a_job_that_has_not_ended_is_refused_and_stays(
    ledger: Ledger, prepare: Callable[[Ledger, Job], object]
) -> None:
    job, store = submit(ledger), MemoryStore()
    store.put(f"jobs/{job.id}/input/000000.jsonl.zst", b"lines")
    prepare(ledger, job)
    with pytest.raises(ServiceError, match=r"cannot be deleted.*nightjar cancel") as caught:
        delete_job(ledger, store, job.id)
    assert caught.value.code is ErrorCode.LEDGER_STATE
    assert ledger.status(job.id).items.total == 3
    assert len(store.objects) == 1


def test_a_stale_worker_brings_nothing_back(ledger: Ledger) -> None:
    job = submit(ledger, (2, 2))
    lease = lease_next(ledger)
    (message,) = ledger.take_ready(1)
    ledger.cancel(job.id)
    ledger.begin_delete(job.id)
    for _ in range(2):
        assert ledger.commit(lease.ticket, [done(0)]) == CommitResult(0, lost=True)
        assert ledger.heartbeat("w1", [lease.ticket], LEASE_SECONDS) == {lease.ticket}
        assert not ledger.finish_shard(lease.ticket)
        assert not ledger.fail_shard(lease.ticket, ErrorCode.SYNTH_OOM, "Too late.")
        assert ledger.claim(message, "w2", LEASE_SECONDS) is None
        with pytest.raises((ServiceError, NotFoundError)):
            ledger.stage(job.id, shards_of((1,), 4), [RejectedLine(9, ErrorCode.INPUT_BAD_LINE, "late")], 5)
        with pytest.raises((ServiceError, NotFoundError)):
            ledger.retry(job.id, None)
        ledger.note_manifest(job, ledger.begin_manifest(job.id))
        assert ledger.reconcile().without_manifest == ()
        ledger.delete_rows(job.id)
    assert set(tables_of(ledger, job).values()) == {0}


def test_the_key_of_a_deleted_job_makes_a_new_one(ledger: Ledger) -> None:
    first = ended(ledger, idempotency_key="mine")
    ledger.begin_delete(first.id)
    second = ledger.begin_job(new_job(idempotency_key="mine"))
    assert (second.id != first.id, second.state) == (True, JobState.INGESTING)
    delete_job(ledger, MemoryStore(), first.id)
    assert ledger.begin_job(new_job(idempotency_key="mine")).id == second.id


class Breaks(MemoryStore):
    """A store that goes away after some requests."""

    def __init__(self, requests: int) -> None:
        super().__init__()
        self.left = requests

    def delete_many(self, keys: Sequence[str]) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreError(ErrorCode.STORE_UNREACHABLE, "away")
        super().delete_many(keys)


class Killed(Ledger):
    """Whose process ends at its sixth change."""

    writes = 0

    def write(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        self.writes += 1
        if self.writes == 6:
            raise KeyboardInterrupt
        return super().write(work, *args, **kwargs)


def test_a_deletion_that_was_interrupted_goes_on(
    ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ROWS_AT_ONCE", 1)
    job, store = ended(ledger), Breaks(2)
    objects = 2 * deleting.OBJECTS_AT_ONCE + 3
    for number in range(objects):
        store.put(f"jobs/{job.id}/audio/00000/{number:09d}-e{number}.wav", b"12345")
    assert measure_job(ledger, store, job.id) == deleting.Deleted(4, objects, 5 * objects)
    with pytest.raises(StoreError):
        delete_job(ledger, store, job.id)
    assert (len(store.objects), ledger.job(job.id).state_reason) == (3, control.BEING_DELETED)
    store.left = 100
    with closing(Killed(ledger_url)) as killed, pytest.raises(KeyboardInterrupt):
        delete_job(killed, store, job.id)
    assert ledger.job(job.id).id == job.id
    delete_job(ledger, store, job.id)
    assert (store.objects, set(tables_of(ledger, job).values()), ledger.jobs()) == ({}, {0}, [])


def test_two_at_once_delete_nothing_of_the_job_that_takes_the_number(ledger: Ledger) -> None:
    first = ended(ledger)
    ledger.begin_delete(first.id)
    delete_job(ledger, MemoryStore(), first.id)
    second = ended(ledger)
    before = tables_of(ledger, second)
    # What a second process that had begun before does now.
    ledger.delete_rows(first.id)
    assert not ledger.write(control.delete_some, first.id)
    assert not ledger.write(control.delete_some, second.id)
    assert tables_of(ledger, second) == before


def test_an_id_that_is_a_path_is_refused(ledger: Ledger) -> None:
    store = MemoryStore()
    store.put("jobs/other/audio/x.wav", b"kept")
    for hostile in ("", "..", "../jobs", "a/../other", "other/audio", "/", "."):
        with pytest.raises(StoreError):
            deleting.delete_objects(store, hostile)
    assert deleting.delete_objects(store, "othe") == (0, 0)
    assert len(store.objects) == 1


def test_a_deleted_job_is_forgotten_only_when_its_row_is_gone(ledger: Ledger) -> None:
    job = ended(ledger)
    ledger.begin_delete(job.id)
    ledger.forget_deleted(job.id)
    assert [gone.id for gone in ledger.deleted_jobs()] == [job.id]
    ledger.delete_rows(job.id)
    ledger.forget_deleted(job.id)
    assert ledger.deleted_jobs() == []
    assert ledger.claim(Ticket(job.id, 0, 0), "w1", LEASE_SECONDS) is None
