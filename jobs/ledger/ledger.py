"""`Ledger`: the state of all jobs. Every SQL statement of the product is in this package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.exc import IntegrityError

from jobs.ledger import control, decisions, leases, lifecycle, queries, workers
from jobs.ledger import reconcile as reconciler
from jobs.ledger import status as job_status
from jobs.ledger.control import DuplicateExamples
from jobs.ledger.database import Database
from jobs.ledger.records import (
    BROKEN_ITEMS,
    CommitResult,
    ItemRow,
    ItemState,
    NewShard,
    Outcome,
    RejectedLine,
    Ticket,
)
from jobs.ledger.transaction import Transaction
from jobs.settings import Settings
from jobs.where import Where
from pipelines.errors import ErrorCode, ServiceError

P = ParamSpec("P")
T = TypeVar("T")
Row = TypeVar("Row")


def _writes(
    work: Callable[Concatenate[Transaction, P], T], run: Callable[..., T] = Database.write
) -> Callable[Concatenate[Ledger, P], T]:
    """Turns `work` into a method that runs it in its own transaction."""

    @wraps(work)
    def method(ledger: Ledger, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(ledger, work, *args, **kwargs)

    return method


def _reads(work: Callable[Concatenate[Transaction, P], T]) -> Callable[Concatenate[Ledger, P], T]:
    """Like `_writes`, with a read-only transaction."""
    return _writes(work, Database.read)


def _pages(
    read_page: Callable[Concatenate[Transaction, str, int, int, P], list[Row]], key: str
) -> Callable[Concatenate[Ledger, str, P], Iterator[Row]]:
    """Makes a method that iterates over rows of a job. `read_page` returns the next rows after a value of
    `key`."""

    @wraps(read_page)
    def method(ledger: Ledger, job_id: str, *args: P.args, **kwargs: P.kwargs) -> Iterator[Row]:
        after = -1
        while page := ledger.read(read_page, job_id, after, queries.PAGE_ROWS, *args, **kwargs):
            yield from page
            after = getattr(page[-1], key)

    return method


class Ledger(Database):
    """A ledger on SQLite or PostgreSQL. Methods are thread-safe; each is one transaction unless stated
    otherwise.

    Times are those of the database's clock. Every method raises `ServiceError` with `ledger.unreachable` if
    the database cannot be reached (the transaction is rolled back and can be repeated), and with
    `ledger.schema` if its tables are of another version, and `StoreError` with `store.full` for a file on a
    full disk. Methods with a job id raise `NotFoundError` for an unknown one, and `ServiceError` with
    `ledger.state` if the job's state does not permit the action.
    """

    @classmethod
    def of(cls, settings: Settings) -> Ledger:
        """The ledger of the settings."""
        return cls(settings.ledger_url, settings.times.backoff_seconds)

    now = _reads(lambda sql: sql.now)

    # Ingest
    begin_job = _writes(control.begin_job)
    seal_job = _writes(control.seal_job)
    abandon_job = _writes(control.abandon_job)
    staged_shards = _reads(control.staged_shards)

    def stage(
        self, job_id: str, shards: Sequence[NewShard], rejected: Sequence[RejectedLine], lines_read: int
    ) -> bool:
        """Adds shards with their items, and rejected lines, in one transaction.

        `lines_read` counts from the start of the input. Returns False, with nothing written, if these lines
        were staged before by this or another process. Raises `DuplicateExamples` with nothing written, and
        `ServiceError` with `ledger.state` if the job is not ingesting.
        """
        try:
            return self.write(control.stage, job_id, shards, rejected, lines_read)
        except IntegrityError as error:
            example_ids = self.read(control.duplicates, job_id, shards)
            # Checked after the query, so that items staged by another process do not count as duplicates.
            if self.staged_shards(job_id)[2] >= lines_read:
                return False
            if example_ids:
                raise DuplicateExamples(example_ids) from error
            raise ServiceError(
                ErrorCode.LEDGER_STATE,
                f"Job {job_id} has other items with the same indexes.",
                "Submit an input from one process at a time.",
            ) from error

    # Dispatch and workers
    free_window = _reads(workers.free_window)
    take_ready = _writes(workers.take_ready)
    give_back = _writes(workers.give_back)
    register_worker = _writes(workers.register_worker)
    worker_heartbeat = _writes(workers.worker_heartbeat)
    retire_worker = _writes(workers.retire_worker)
    end_dead_workers = _writes(workers.end_dead_workers)
    others_may_run = _reads(workers.others_may_run)
    report_quarantines = _writes(workers.report_quarantines)
    worker_statuses = _reads(job_status.worker_statuses)

    # Leases
    should_run_alone = _reads(leases.should_run_alone)
    claim = _writes(leases.claim)
    heartbeat = _writes(leases.heartbeat)
    finish_shard = _writes(leases.finish_shard)
    release = _writes(leases.release)
    refuse = _writes(leases.refuse)
    fail_shard = _writes(leases.fail_shard)

    def commit(self, ticket: Ticket, ended: Sequence[Outcome]) -> CommitResult:
        """Writes outcomes of items, fenced by the lease's epoch. Idempotent.

        If items failed and the job has an error budget, a second transaction pauses the job if the budget is
        exceeded.
        """
        result = self.write(leases.commit, ticket, ended)
        if result.failed:
            self.write(lifecycle.complete_or_pause, ticket.job_id)
        return result

    take_for_check = _writes(decisions.take_for_check)
    commit_checks = _writes(decisions.commit_checks)

    reconcile = reconciler.reconcile
    needs_manifest = _reads(reconciler.needs_manifest)
    begin_manifest = _writes(reconciler.begin_manifest)
    note_manifest = _writes(reconciler.note_manifest)

    # Control
    pause = _writes(control.pause)
    resume = _writes(control.resume)
    wake = _writes(control.wake)
    set_priority = _writes(control.set_priority)
    decide = _writes(decisions.decide)
    schedule_ran = _writes(control.schedule_ran)
    schedule_forget = _writes(control.schedule_forget)
    schedule_history = _reads(control.schedule_history)

    def check_writable(self, job_id: str) -> None:
        """Raises `store.full` for a ledger on a full disk, and `ServiceError` if it cannot be written;
        changes nothing."""
        self.check_room()
        self.write(lifecycle.update_job, job_id, "priority = priority")

    def cancel(self, job_id: str) -> None:
        """Cancels a job and skips its pending items; several transactions."""
        self.write(control.begin_cancel, job_id)
        while self.write(control.cancel_some, job_id):
            pass

    def retry(self, job_id: str, codes: Collection[ErrorCode] | None, *, force: bool = False) -> int:
        """Reopens failed and dead items with these codes (None: all) in several transactions; returns their
        number. Items that cannot succeed unchanged (`ErrorCode.permanent`) need `force`.

        Raises `ServiceError` with `ledger.state` for a job that is ingesting, cancelled or failed.
        """
        opened = 0
        after = -1
        while after is not None:
            more, after = self.write(control.retry_some, job_id, codes, force, after)
            opened += more
        return opened

    # Reports of job ends
    unreported_ends = _reads(control.unreported_ends)
    claim_end = _writes(control.claim_end)
    note_report = _writes(control.note_report)

    # Deletion
    begin_delete = _writes(control.begin_delete)
    deleted_jobs = _reads(control.deleted_jobs)
    forget_deleted = _writes(control.forget_deleted)

    def delete_rows(self, job_id: str) -> None:
        """Deletes all rows of a job after `begin_delete`, its own row last; several transactions."""
        while self.write(control.delete_some, job_id):
            pass

    # Jobs and their status
    job = _reads(job_status.read_job)
    job_state = _reads(queries.job_state)
    measured_rtf = _reads(queries.measured_rtf)
    jobs_of_keys = _reads(queries.jobs_of_keys)
    jobs_of_input = _reads(queries.jobs_of_input)
    find_job = _reads(job_status.find_job)
    jobs = _reads(job_status.newest_jobs)
    error_counts = _reads(job_status.error_counts)
    failed_counts = _reads(job_status.failed_counts)
    status = _reads(job_status.status_of)
    busy_spans = _reads(job_status.busy_spans)
    store_identity = _reads(queries.store_identity)

    # Items and artifacts. Methods that return an iterator hold one page in memory and read each page in its own
    # transaction.
    shard_inputs = _reads(queries.shard_inputs)
    shard_audio = _reads(queries.shard_audio)
    shard_ends = _reads(queries.shard_ends)
    draws_of = _reads(queries.draws_of)
    kept_draws = _reads(queries.kept_draws)
    drawn_before = _reads(queries.drawn_before)
    artifacts_of = _reads(queries.artifacts_of)
    packs = _reads(queries.packs)
    measured_scores = _reads(queries.measured_scores)
    filtered_out = _reads(queries.filtered_out)
    replace_artifact = _writes(leases.replace_artifact)
    set_shard_manifest = _writes(leases.set_shard_manifest)
    is_orphan = _reads(reconciler.is_orphan)
    delete_orphan = _writes(reconciler.delete_orphan)

    def items(
        self,
        job_id: str,
        state: ItemState | None = None,
        codes: Collection[ErrorCode] | None = None,
        after: int = -1,
        limit: int | None = None,
        *,
        where: Where | None = None,
        dialogues: bool = False,
    ) -> Iterator[ItemRow]:
        """Items with an index above `after`, in index order. `dialogues`: `where` selects whole dialogues,
        those with a matching item.

        Raises `ConfigError` with `config.invalid` for a filter on a score that the job's checks do not
        measure.
        """
        job = self.job(job_id)
        if where is not None:
            queries.check_names(job, where, self.measured_scores(job_id))

        def pages(after: int | None, left: int) -> Iterator[list[ItemRow]]:
            while after is not None and left > 0:
                rows = min(left, queries.PAGE_ROWS)
                page, after = self.read(queries.items_page, job, state, codes, where, dialogues, after, rows)
                yield page
                left -= len(page)

        return chain.from_iterable(pages(after, sys.maxsize if limit is None else limit))

    def broken_items(self, job_id: str, codes: Collection[ErrorCode] | None = None) -> Iterator[ItemRow]:
        """The failed items, then the dead ones, each in index order."""
        return chain.from_iterable(self.items(job_id, state, codes) for state in BROKEN_ITEMS)

    #: Rejected lines, up to `KEPT_REJECTED_LINES`, in input order.
    rejected_lines = _pages(queries.rejected_page, "line")
    #: Artifacts of one kind, without `meta`, in index order.
    artifacts = _pages(queries.artifacts_page, "index")
    #: All draws with their checks, in order of index and draw.
    draws = _pages(queries.draws_page, "index")
    #: All leases of the job's shards, in the order of the shards.
    attempts = _pages(queries.attempts_page, "shard_no")
