"""`Ledger`: the truth about jobs. Every SQL statement of the product is in this package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jobs.ledger import control, dispatch, ingest, leases, migrate, outcomes, queries, reconcile, workers
from jobs.ledger.database import Database, LedgerLimits, recorded
from jobs.ledger.ingest import DuplicateExamples, DuplicateRowsError
from jobs.ledger.lifecycle import judge_budget
from jobs.ledger.mapping import read_job
from jobs.ledger.outcomes import commit as commit_outcomes
from jobs.ledger.outcomes import replace_artifact, set_shard_manifest
from jobs.ledger.queries import Attempt, Commit
from jobs.ledger.records import (
    Artifact,
    CommitResult,
    DrawRow,
    ItemRow,
    ItemState,
    Job,
    JobState,
    JobStatus,
    Lease,
    MadeAudio,
    NewJob,
    NewShard,
    Outage,
    Outcome,
    ReconcileReport,
    RejectedLine,
    Ticket,
    WorkerInfo,
    WorkerRow,
)
from pipelines.errors import ErrorCode, ServiceError

if TYPE_CHECKING:
    from jobs.settings import Settings


class Ledger:
    """A ledger on SQLite or PostgreSQL; its methods may be called from any thread.

    Times are the database's clock. Every method raises `ServiceError` with `ledger.unreachable` where the database cannot be
    reached (nothing is half-written: call again), and with `ledger.schema` where its tables are of another version; methods
    that take a job id raise `NotFoundError` for one that does not exist.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str, backoff_seconds: float = 1.0, limits: LedgerLimits | None = None) -> Ledger:
        """A ledger at `sqlite:///PATH` or `postgresql://...`; connects at its first use. Raises `ConfigError` for other URLs.

        `backoff_seconds`: pause of a shard that failed; it doubles with each attempt. `limits`: of waiting, on PostgreSQL.
        """
        return cls(Database(url, backoff_seconds, limits))

    @classmethod
    def of(cls, settings: Settings) -> Ledger:
        """The ledger of an installation, as `open` does."""
        limits = LedgerLimits(**{name: getattr(settings.ledger, name) for name in LedgerLimits.__dataclass_fields__})
        return cls.open(settings.ledger_url, settings.dispatch.backoff_seconds, limits)

    @property
    def url(self) -> str:
        """Where the ledger is, without its password."""
        return self._database.display_url

    @property
    def database(self) -> Database:
        return self._database

    def migrate(self) -> None:
        """Makes or upgrades the tables, and the folder of a SQLite file; several processes may do so at once."""
        migrate.upgrade(self._database)

    def check_schema(self) -> None:
        """Raises `ServiceError` with `ledger.schema` unless the tables are of this version."""
        migrate.check(self._database)

    def close(self) -> None:
        self._database.close()

    def now(self) -> float:
        """The database's clock, UTC epoch seconds."""
        return self._database.read(queries.now)

    def begin_job(self, new: NewJob) -> Job:
        """The job with this idempotency key: an old one in any state, or a new one in state ingesting."""
        return self._database.write(ingest.begin_job, new)

    def stage(self, job_id: str, shards: Sequence[NewShard], rejected: Sequence[RejectedLine], lines_read: int) -> bool:
        """Adds shards with their items, and lines that became none, in one transaction.

        `lines_read` counts from the start of the input. Returns False with nothing written where these lines are there
        already, also where another process staged them. Raises `DuplicateExamples` with nothing written, and `ServiceError`
        with `ledger.state` where the job is not ingesting.
        """
        try:
            return self._database.write(ingest.stage, job_id, shards, rejected, lines_read)
        except DuplicateRowsError as error:
            example_ids = self._database.read(ingest.duplicates, job_id, shards)
            # Asked after the examples: what another process stages meanwhile are not this batch's duplicates.
            if self.staged_shards(job_id)[2] >= lines_read:
                return False
            if example_ids:
                raise DuplicateExamples(example_ids) from error
            raise ServiceError(
                ErrorCode.LEDGER_STATE, f"Job {job_id} has other items under the same indexes.", "Ingest a job from one process at a time."
            ) from error

    def seal_job(self, job_id: str) -> Job:
        """Sets the totals and makes an ingesting job ready, or failed (`input.no_items`) when it has no item."""
        return self._database.write(ingest.seal_job, job_id)

    def abandon_job(self, job_id: str) -> None:
        """Removes every row of a job that is still ingesting."""
        self._database.write(ingest.abandon_job, job_id)

    def staged_shards(self, job_id: str) -> tuple[int, int, int]:
        """(shards, items, lines_read) that are committed: where a broken ingest goes on."""
        return self._database.read(ingest.staged_shards, job_id)

    def free_window(self, window_factor: int = 2) -> int:
        """How many more shards to queue: `window_factor` a slot of live workers, less those queued or leased."""
        return self._database.read(dispatch.free_window, window_factor)

    def take_ready(self, limit: int, window_factor: int = 2) -> list[Ticket]:
        """Moves up to `limit` shards from ready to queued and returns the tickets to publish.

        Order: priority, then the least share of in-flight shards by weight, then the older job. Where every live worker is
        pinned to a model, only jobs of these models get some, and each model no more than its own workers' window.
        """
        return self._database.write(dispatch.take_ready, limit, window_factor) if limit > 0 else []

    def give_back(self, tickets: Sequence[Ticket]) -> int:
        """Makes taken shards whose messages could not be published ready again; returns how many."""
        return self._database.write(dispatch.give_back, tickets)

    def register_worker(self, info: WorkerInfo) -> None:
        """Raises `ServiceError` with `ledger.shared_sqlite` where a worker of another host uses the same SQLite file."""
        self._database.write(workers.register_worker, info)

    def worker_heartbeat(self, worker_id: str, state: str = workers.UP) -> None:
        """Raises `NotFoundError` for a worker that never registered. Only workers in state `up` widen the window."""
        self._database.write(workers.worker_heartbeat, worker_id, state)

    def retire_worker(self, worker_id: str) -> None:
        self._database.write(workers.retire_worker, worker_id)

    def lose_worker(self, host: str, pid: int) -> int:
        """Ends the leases of a worker whose process is known to be dead, for the next `reconcile`; returns how many."""
        return self._database.write(workers.lose_worker, host, pid)

    def on_trial(self, ticket: Ticket) -> bool:
        """Whether a shard should be run with no other beside it: its next crash decides over its items."""
        return self._database.read(leases.on_trial, ticket)

    def claim(self, ticket: Ticket, worker_id: str, lease_seconds: float) -> Lease | None:
        """The lease on a queued shard; None: the message is old, a duplicate, or its job does not run, so drop it."""
        return self._database.write(leases.claim, ticket, worker_id, lease_seconds)

    def heartbeat(self, worker_id: str, tickets: Sequence[Ticket], lease_seconds: float) -> set[Ticket]:
        """Extends leases and returns those that are lost (taken over, or the job was cancelled): stop their work."""
        return self._database.write(leases.heartbeat, worker_id, tickets, lease_seconds) if tickets else set()

    def commit(self, ticket: Ticket, outcomes: Sequence[Outcome]) -> CommitResult:
        """Writes outcomes of items, fenced by the lease's epoch. Committing the same outcomes again changes nothing.

        Pauses the job where its error budget is spent by them.
        """
        result = self._database.write(commit_outcomes, ticket, outcomes)
        if result.failed:
            self._database.write(judge_budget, ticket.job_id)
        return result

    def finish_shard(self, ticket: Ticket, manifest_key: str | None = None, manifest_sha256: str | None = None) -> bool:
        """Ends a lease: the shard is done, or ready later for its open items. False: the lease was lost."""
        return self._database.write(leases.finish_shard, ticket, manifest_key, manifest_sha256)

    def release(self, ticket: Ticket, reason: str) -> bool:
        """Gives a shard back at once; counts as no attempt. False: the lease was lost."""
        return self._database.write(leases.release, ticket, reason)

    def fail_shard(self, ticket: Ticket, code: ErrorCode, message: str) -> bool:
        """The shard as a whole could not run. False: the lease was lost.

        A service that is down costs only time; another retryable code counts like a crash; any other ends the open items.
        """
        return self._database.write(leases.fail_shard, ticket, code, message)

    def reconcile(self, queued_timeout_seconds: float = 600, worker_timeout_seconds: float = 60) -> ReconcileReport:
        """One pass over expired leases, lost messages, stale workers, wrong times, error budgets and unfinished cancels."""
        return reconcile.reconcile(self._database, queued_timeout_seconds, worker_timeout_seconds)

    def note_manifest(self, job: Job) -> None:
        """Notes that the manifest of this end of a job is written, or that there is none to write."""
        self._database.write(reconcile.note_manifest, job.id, job.finished_at)

    def pause(self, job_id: str) -> None:
        """Stops claims at once; workers give back what of their leases is not in the engine. Raises `ServiceError` with `ledger.state`."""
        self._database.write(control.pause, job_id)

    def resume(self, job_id: str) -> None:
        """Lets a paused job go on. Raises `ServiceError` with `ledger.state`."""
        self._database.write(control.resume, job_id)

    def cancel(self, job_id: str) -> None:
        """Refuses all further work of a job and skips its open items. Raises `ServiceError` with `ledger.state`."""
        self._database.write(control.begin_cancel, job_id)
        while self._database.write(control.cancel_some, job_id):
            pass

    def retry(self, job_id: str, codes: Collection[ErrorCode] | None, *, force: bool = False) -> int:
        """Opens failed and dead items with these codes (None: all) again; returns how many. What can never succeed as it is
        (`ErrorCode.hopeless`) stays as it is, unless `force`.

        Raises `ServiceError` with `ledger.state` for a job that is ingesting, cancelled or failed.
        """
        opened, after = 0, -1
        while True:
            more, last = self._database.write(control.retry_some, job_id, codes, force, after)
            opened += more
            if last is None:
                return opened
            after = last

    def wake(self, job_id: str) -> int:
        """Lets shards that wait for another attempt run at once; returns how many."""
        return self._database.write(control.wake, job_id)

    def check_writable(self, job_id: str) -> None:
        """Changes nothing; raises `ServiceError` where the ledger can be read but not written, as on a full disk."""
        self._database.write(control.check_writable, job_id)

    def set_priority(self, job_id: str, priority: int) -> None:
        self._database.write(control.set_priority, job_id, priority)

    def job(self, job_id: str) -> Job:
        return self._database.read(read_job, job_id)

    def job_state(self, job_id: str) -> JobState:
        """The state of a job alone: what a worker asks often."""
        return self._database.read(queries.job_state, job_id)

    def find_job(self, prefix: str) -> Job:
        """The job with this id, or the only one whose id begins so. Raises `NotFoundError`."""
        return self._database.read(queries.find_job, prefix)

    def job_of_key(self, idempotency_key: str) -> Job | None:
        """The job that was submitted under a key."""
        return self._database.read(queries.job_of_key, idempotency_key)

    def keys_of_input(self, input_sha256: str, spec_sha: str) -> list[tuple[Job, str, str]]:
        """(job, its idempotency key, the address of its store as it is recorded) of the jobs of one input and spec."""
        return self._database.read(queries.keys_of_input, input_sha256, spec_sha)

    def store_address(self, store_url: str) -> str:
        """The address of a store as this ledger records it: the same one wherever its home is moved."""
        return recorded(store_url, self._database.place)

    def jobs(self, limit: int = 50, states: Collection[JobState] | None = None) -> list[Job]:
        """The newest jobs first."""
        return self._database.read(queries.jobs, limit, states)

    def status(self, job_id: str) -> JobStatus:
        """A job with its sums, from shard counters only."""
        return self._database.read(queries.status, job_id)

    def last_outage(self, job_id: str) -> Outage | None:
        """Why shards of a job wait, where their last leases met a service that was down, full or forbidden."""
        return self._database.read(queries.last_outage, job_id)

    def statuses(
        self, limit: int = 50, states: Collection[JobState] | None = None, labels: Mapping[str, str] | None = None
    ) -> list[JobStatus]:
        """Status of the newest jobs first, of those in these states (None: any) with all of these labels."""
        return self._database.read(queries.statuses, limit, states, labels)

    def worked_on(self, job_id: str) -> list[tuple[float, float]]:
        """(start, end) of every time in which workers held shards of a job, in order, by the ledger's clock."""
        return self._database.read(queries.worked_on, [job_id]).get(job_id, [])

    def items(
        self,
        job_id: str,
        state: ItemState | None = None,
        codes: Collection[ErrorCode] | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> Iterator[ItemRow]:
        """Items with an index above `after`, in index order; a page in memory at a time."""
        return self._items(self.job(job_id), state, codes, after, limit)

    def _items(
        self, job: Job, state: ItemState | None, codes: Collection[ErrorCode] | None, after: int, limit: int | None
    ) -> Iterator[ItemRow]:
        while limit is None or limit > 0:
            wanted = queries.PAGE_ROWS if limit is None else min(limit, queries.PAGE_ROWS)
            page = self._database.read(queries.items_page, job, state, codes, after, wanted)
            yield from page
            if len(page) < wanted:
                return
            after = page[-1].index
            limit = None if limit is None else limit - len(page)

    def error_counts(self, job_id: str) -> dict[ErrorCode, int]:
        """Failed and dead items and rejected lines by code, the most frequent first."""
        self.job(job_id)
        return self._database.read(queries.error_counts, job_id)

    def failed_counts(self, job_id: str) -> dict[ErrorCode, int]:
        """Failed and dead items alone by code."""
        self.job(job_id)
        return self._database.read(queries.failed_counts, job_id)

    def rejected_lines(self, job_id: str) -> Iterator[RejectedLine]:
        """Lines that became no item, in the order of the input."""
        self.job(job_id)
        return self._rejected_lines(job_id)

    def _rejected_lines(self, job_id: str) -> Iterator[RejectedLine]:
        page, after = [], -1
        while page := self._database.read(queries.rejected_page, job_id, after, queries.PAGE_ROWS):
            yield from page
            after = page[-1].line

    def shard_audio(self, job_id: str, shard_no: int) -> list[MadeAudio]:
        """The audio of one shard's items in index order, for its manifest."""
        return self._database.read(queries.shard_audio, job_id, shard_no)

    def artifact_keys(self, job_id: str, kind: str) -> Iterator[tuple[int, str]]:
        """(index, key) of the artifacts of one kind in index order; a page in memory at a time."""
        return ((index, key) for index, key, _, _ in self.artifact_facts(job_id, kind))

    def artifact_facts(self, job_id: str, kind: str) -> Iterator[tuple[int, str, str, int]]:
        """(index, key, SHA-256, bytes) of the artifacts of one kind in index order; a page in memory at a time."""
        page, after = [], -1
        while page := self._database.read(queries.artifacts_page, job_id, kind, after, queries.PAGE_ROWS):
            yield from page
            after = page[-1][0]

    def draws(self, job_id: str) -> Iterator[DrawRow]:
        """What the quality checks said of every draw, in order of index and draw; a page in memory at a time."""
        page, after = [], -1
        while page := self._database.read(outcomes.draws_page, job_id, after, queries.PAGE_ROWS):
            yield from page
            after = page[-1].index

    def drawn_before(self, job_id: str, first: int, last: int) -> dict[int, int]:
        """Index -> number of draws of the items from `first` to `last` that have some: after `nightjar retry` they go on from there."""
        return self._database.read(outcomes.drawn_before, job_id, first, last)

    def attempts(self, job_id: str) -> Iterator[Attempt]:
        """Every lease of the job's shards, in the order of the shards; a page in memory at a time."""
        page: list[Attempt] = []
        after = (-1, -1)
        while page := self._database.read(queries.attempts_page, job_id, after, queries.PAGE_ROWS):
            yield from page
            after = (page[-1].shard_no, page[-1].epoch)

    def commits(self, job_id: str) -> list[Commit]:
        """Everything that was made, by the time it was committed. For small jobs: it reads every item's audio."""
        return self._database.read(queries.commits, job_id)

    def draws_of(self, job_id: str, indexes: Collection[int]) -> list[DrawRow]:
        """The draws of a few items, in order of index and draw."""
        return self._database.read(queries.draws_of, job_id, indexes)

    def artifacts_of(self, job_id: str, kind: str, indexes: Collection[int]) -> dict[int, Artifact]:
        """Index -> artifact of one kind, of those of a few items that have one."""
        return self._database.read(queries.artifacts_of, job_id, kind, indexes)

    def replace_artifact(self, job_id: str, artifact: Artifact, sha256: str) -> bool:
        """Records an artifact whose object was made again with other bytes than those of `sha256`. False: it is another one by now."""
        return self._database.write(replace_artifact, job_id, artifact, sha256)

    def set_shard_manifest(self, job_id: str, shard_no: int, key: str, sha256: str) -> None:
        """Names the manifest of a shard that has ended."""
        self._database.write(set_shard_manifest, job_id, shard_no, key, sha256)

    def shard_inputs(self, job_id: str) -> dict[int, tuple[str, str]]:
        """Key and SHA-256 of the input object of each shard; the two halves of a bisected shard share one."""
        return self._database.read(queries.shard_inputs, job_id)

    def is_orphan(self, job_id: str, key: str, ended_before: float, read: reconcile.Inputs = frozenset()) -> bool:
        """Whether an object was written by a job that ended before that time, and nothing names it or may come to name it.

        Only keys that this ledger writes, to the letter, are orphans. `read`: the inputs in which no line names the key,
        where it is one of reference audio.
        """
        return self._database.read(reconcile.is_orphan, job_id, key, ended_before, read)

    def delete_orphan(
        self, job_id: str, key: str, ended_before: float, delete: Callable[[], None], read: reconcile.Inputs = frozenset()
    ) -> bool:
        """Calls `delete` if the object is an orphan; no retry of the job begins meanwhile. False: it is none, or no more."""
        return self._database.write(reconcile.delete_orphan, job_id, key, ended_before, read, delete)

    def workers(self) -> list[WorkerRow]:
        """All workers that ever registered, the newest first."""
        return self._database.read(workers.workers)

    def schedule_ran(self, name: str, night: str) -> bool:
        """Records that a night ran; False if it was recorded before."""
        return self._database.write(control.schedule_ran, name, night)

    def schedule_forget(self, name: str, night: str) -> None:
        """Lets a night run again."""
        self._database.write(control.schedule_forget, name, night)

    def schedule_history(self, name: str) -> list[str]:
        """The nights that ran, in order."""
        return self._database.read(control.schedule_history, name)
