"""The rows of the ledger as frozen records: what goes in and what comes out of `jobs.ledger.Ledger`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import comb

import msgspec

from jobs.checks import Quality
from jobs.turns import Speak, row_id
from pipelines.errors import ErrorCode, NotFoundError
from pipelines.request import Generation

#: Label of a job whose input is not written as dialogues.
INPUT_FORMAT = "input_format"
#: Lines of a job that became no item, of which the ledger knows more than their number.
KEPT_REJECTED_LINES = 10_000
#: The newest migration; a database at another revision is refused.
SCHEMA_REVISION = "0001"
MAX_MESSAGE_CHARACTERS = 2000


def clean(text: str) -> str:
    """Text that every database takes: no NUL, no lone surrogates, a maximum of 2,000 characters."""
    return text[:MAX_MESSAGE_CHARACTERS].replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


class JobState(StrEnum):
    INGESTING = "ingesting"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    COMPLETED_WITH_ERRORS = "completed_with_errors"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in FINAL


class ShardState(StrEnum):
    READY = "ready"
    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"


class ItemState(StrEnum):
    #: Waits for a worker, or for another attempt.
    PENDING = "pending"
    DONE = "done"
    #: Ended with an error: not retryable, or its attempts are spent. `nightjar retry` opens it again.
    FAILED = "failed"
    #: Killed its workers each time it ran alone (`poison.worker_crash`).
    DEAD = "dead"
    #: Never ran: its job was cancelled.
    SKIPPED = "skipped"


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What of an input becomes a job, and where its columns are."""

    #: Only the first records: lines that are not blank, rows of a table.
    limit: int | None = None
    #: So many records, chosen by the job's seed; the same ones each time, in the order of the input.
    sample: int | None = None
    #: Field of a record -> the column of a table that holds it, where it has another name.
    columns: dict[str, str] | None = None
    #: Speaker -> voice; `*` is the voice of the others.
    voices: dict[str, str] | None = None
    #: Of Kaldi's `utt2spk` beside the input, where `voices` asks for it.
    speakers_sha256: str | None = None


class FrozenVoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored voice as it was at submit."""

    #: The last part of its recording's key among the references of the job: `<sha256>.<extension>`.
    recording: str
    #: What is said in it; empty where nobody wrote it down.
    text: str = ""


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job is made with; frozen at submit and hashed to `spec_sha`."""

    model: str
    #: Revision of the checkpoint: a hub commit, a hash of the folder's files, or a package version.
    model_revision: str = ""
    generation: Generation = Generation()
    seed: int = 0
    #: `wav`, `flac`, `mp3` or `opus`.
    format: str = "wav"
    #: Checks of the speech; None: only that it is audio.
    quality: Quality | None = None
    #: Whose turns are spoken. Of a model that answers dialogues it becomes `answer` at submit.
    speak: Speak = "auto"
    #: Whether audio and texts of many items share an object, a pack. Unset is no: a spec without packs has
    #: the hash it always had.
    pack: bool | msgspec.UnsetType = msgspec.UNSET
    #: What of the input is read. Unset is all of it: such a spec has the hash it always had.
    reading: Reading | msgspec.UnsetType = msgspec.UNSET
    #: Name -> the stored voice that lines mean by it. Unset is none: such a spec has the hash it always had.
    stored_voices: dict[str, FrozenVoice] | msgspec.UnsetType = msgspec.UNSET
    #: Hz of the audio in the store. Unset is the model's own: such a spec has the hash it always had.
    sample_rate: int | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job as it is submitted. The same `idempotency_key` is the same job."""

    spec: JobSpec
    spec_sha: str
    input_uri: str
    input_sha256: str
    idempotency_key: str
    store_url: str
    #: Of the store, see `ObjectStore.establish`.
    store_identity: str | None = None
    name: str = ""
    owner: str = ""
    #: Higher runs first.
    priority: int = 0
    #: Share of the window against jobs of the same priority.
    weight: int = 1
    max_attempts: int = 3
    #: Maximum number of shards of this job that are queued or leased at once; None: no limit.
    max_in_flight: int | None = None
    #: Share of failed items that pauses the job, see `over_budget`; None: never.
    error_budget: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(NewJob):
    """A row of `jobs`. Times are UTC epoch seconds of the ledger's clock."""

    id: str
    state: JobState
    state_reason: str
    total_items: int
    total_shards: int
    #: All of them; the ledger keeps the first `KEPT_REJECTED_LINES`.
    rejected_lines: int
    #: Input lines that are committed; a resumed ingest goes on after this one.
    lines_read: int
    created_at: float
    started_at: float | None
    finished_at: float | None

    @property
    def speaks_turns(self) -> bool:
        """Whether a dialogue of the job may have several spoken turns. Not in jobs of before turns could
        be chosen, nor where a model answers whole dialogues, nor in batches, whose lines have one text
        each."""
        return self.spec.speak != "answer" and self.labels.get(INPUT_FORMAT) != "openai-batch"


@dataclass(frozen=True, slots=True)
class RejectedLine:
    """A line of the input that became no item."""

    line: int
    code: ErrorCode
    message: str
    example_id: str | None = None


@dataclass(frozen=True, slots=True)
class NewShard:
    """A shard to stage: items are (index, example_id), indexes rise without a gap over the job.

    The items of one dialogue stand side by side; `turns` numbers those that are not its first.
    """

    no: int
    items: tuple[tuple[int, str], ...]
    input_key: str
    input_sha256: str
    #: Estimated audio of all its items.
    estimated_ms: int
    #: Index -> which of its dialogue's spoken turns an item is, from 1; items that are not in it are number
    #: 0.
    turns: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class Ticket:
    """The content of a queue message: which shard, at which epoch."""

    job_id: str
    shard_no: int
    epoch: int
    #: The job's priority when the shard was dispatched; orders messages, and is no part of what a ticket is.
    priority: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's right to a shard. `epoch` fences: every write under an older epoch is refused."""

    job: Job
    shard_no: int
    epoch: int
    worker_id: str
    input_key: str
    input_sha256: str
    #: Items still to run: index -> (example_id, attempts so far).
    open_items: Mapping[int, tuple[str, int]]

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.job.id, self.shard_no, self.epoch)


#: Kind of the artifact that holds the audio of an item whose checks no draw passed; no export knows it.
QUARANTINE = "quarantine"


class Artifact(msgspec.Struct, frozen=True):
    """What the store has of an item: an object under its key, or a part of a pack.
    `jobs.packs.read_artifact` reads both."""

    index: int
    #: `audio`, `text`, or `quarantine` for the audio of an item that no draw of passed its checks.
    kind: str
    #: In a pack: the name of the member.
    key: str
    sha256: str
    bytes: int
    duration_ms: int
    sample_rate: int
    samples: int
    seed: int
    meta: Mapping[str, object] = msgspec.field(default_factory=dict[str, object])
    #: Key of the pack that holds it; None: it is an object of its own.
    pack: str | None = None
    #: Where its bytes begin in the pack.
    pack_offset: int | None = None


class ArtifactFacts(msgspec.Struct, frozen=True, gc=False):
    """Where an artifact is, and what its bytes are."""

    index: int
    key: str
    sha256: str
    bytes: int
    #: As in `Artifact`.
    pack: str | None = None
    pack_offset: int | None = None


class Score(msgspec.Struct, frozen=True, array_like=True):
    """What one check or meter said of a draw. As JSON: `[value, passed, detail]`."""

    #: None: could not be measured.
    value: float | None
    #: None: nothing depends on it.
    passed: bool | None = None
    #: Who measured it, or what it found (what an ASR meter heard).
    detail: str = ""


class Draw(msgspec.Struct, frozen=True):
    """One synthesis of an item and what the checks said of it."""

    #: 0 is the first.
    draw: int
    seed: int
    #: Why it was refused; None: it passed.
    code: ErrorCode | None
    #: Whether its audio is the item's.
    kept: bool
    #: 0 where the engine made no audio.
    duration_ms: int
    #: By name: those of `jobs.checks.CHECKS`, and those of other packages' meters.
    scores: Mapping[str, Score]


class DrawRow(msgspec.Struct, frozen=True):
    """A draw with the index of its item."""

    index: int
    draw: Draw


class Done(msgspec.Struct, frozen=True):
    """An item that was made and stored."""

    index: int
    artifacts: tuple[Artifact, ...]
    #: Engine time, for cost; 0 where the engine cannot tell.
    engine_ms: int = 0
    #: All its draws, where they were checked.
    draws: tuple[Draw, ...] = ()


class Failed(msgspec.Struct, frozen=True):
    """An item that was not made. Retried while the code is retryable and attempts are left."""

    index: int
    code: ErrorCode
    message: str
    #: All its draws, where they were checked.
    draws: tuple[Draw, ...] = ()
    #: The audio of its best draw, in quarantine.
    artifacts: tuple[Artifact, ...] = ()
    #: Engine time of the attempt, for cost; 0 where the engine had no part in it.
    engine_ms: int = 0


Outcome = Done | Failed


@dataclass(frozen=True, slots=True)
class CommitResult:
    """`lost`: the lease was gone (or the job no longer runs) and nothing was written."""

    accepted: int
    lost: bool = False
    #: Items that failed for good, of a job with an error budget.
    failed: int = field(default=0, compare=False)


class ItemRow(msgspec.Struct, frozen=True):
    """An item with its audio artifact, if it has one."""

    index: int
    example_id: str
    state: ItemState
    shard_no: int
    attempts: int
    error_code: ErrorCode | None
    error_message: str | None
    artifact: Artifact | None
    #: Which of its dialogue's spoken turns it is, from 0, and whether there are several.
    turn: int = 0
    several: bool = False
    #: Whether a dialogue of its job may have several.
    speaks_turns: bool = False

    @property
    def id(self) -> str:
        """The example id; of a dialogue with several spoken turns it names the turn too."""
        return row_id(self.example_id, self.turn, several=self.several, speaks_turns=self.speaks_turns)


class ShardAudio(msgspec.Struct, frozen=True, gc=False):
    """What a manifest says of an item's audio."""

    index: int
    example_id: str
    key: str
    sha256: str
    bytes: int
    sample_rate: int
    samples: int
    seed: int
    #: As in `Artifact`.
    pack: str | None = None
    pack_offset: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker process as it registers itself."""

    id: str
    host: str
    pid: int
    gpu: str
    #: The only model that it serves; empty: whatever the jobs ask for.
    model: str
    version: str
    #: Shards that it can use, with those it has.
    slots: int


# What becomes of items, shards and jobs: pure decisions, apart from SQL.

#: Jobs whose leases are valid: outcomes are taken.
WORKING = (JobState.READY, JobState.RUNNING, JobState.PAUSED)
#: Jobs whose shards are handed out.
DISPATCHED = (JobState.READY, JobState.RUNNING)
#: Jobs that have ended.
FINAL = (JobState.CANCELLED, JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS, JobState.FAILED)
#: Jobs whose failed items can be opened again.
RETRYABLE_JOBS = (*WORKING, JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS)
#: Shards that still have to end.
OPEN_SHARDS = (ShardState.READY, ShardState.QUEUED, ShardState.LEASED)
#: Items that ended with an error.
BROKEN_ITEMS = (ItemState.FAILED, ItemState.DEAD)

#: From this number of ended items, their share of failures is compared with the error budget as it is.
BUDGET_MIN_ITEMS = 100
#: With fewer, the budget is spent when a job within its budget would have that many failures in one of a
#: thousand cases.
BUDGET_CHANCE = 0.001
MAX_BACKOFF_SECONDS = 300.0
#: How far a time of the ledger may lie ahead of its clock: one statement reads the clock a moment before
#: another writes.
CLOCK_SLACK_SECONDS = 10.0
#: How long the worker that ended a job may take to write its manifest.
MANIFEST_GRACE_SECONDS = 60.0

#: A service was down or refused: says nothing about the shard, so it spends no attempt.
OUTAGES = frozenset(
    {
        ErrorCode.STORE_UNREACHABLE,
        ErrorCode.STORE_FULL,
        ErrorCode.STORE_FORBIDDEN,
        ErrorCode.LEDGER_UNREACHABLE,
        ErrorCode.BROKER_UNREACHABLE,
        ErrorCode.MODEL_UNREACHABLE,
    }
)

#: What is wrong with one worker, its settings or its copy of a model: another worker may run the shard.
WORKER_FAULTS = frozenset(
    {
        ErrorCode.CONFIG_INVALID,
        ErrorCode.CONFIG_MISSING_LIBRARY,
        ErrorCode.MODEL_UNKNOWN,
        ErrorCode.MODEL_BAD_CHECKPOINT,
        ErrorCode.MODEL_MISSING_EXTRA,
    }
)

#: States of a worker process: it works; it gave back what it held and ended; its heartbeats stopped.
UP, RETIRED, LOST = "up", "retired", "lost"
#: What the id of a worker on the broker of a home begins with: it ends with that broker. No host has such a name.
OF_A_HOME = "home:"
#: State of the place of a worker that keeps failing, reported by the process that starts it.
QUARANTINED = "quarantined"
#: A worker whose last heartbeat is older is not counted as live.
LIVE_SECONDS = 60.0

#: Outages that end a lease at once: a person has to repair them, and other jobs may need the worker until
#: then.
LASTING_OUTAGES = frozenset({ErrorCode.STORE_FULL, ErrorCode.STORE_FORBIDDEN})


class AttemptOutcome(StrEnum):
    """How a lease ended."""

    #: Every item of the shard has ended.
    DONE = "done"
    #: Ended well with items that wait for another attempt.
    PARTIAL = "partial"
    #: Given back by a draining worker.
    RELEASED = "released"
    #: Given back by a worker that cannot run it, while another one may.
    REFUSED = "refused"
    #: The worker reported that the shard as a whole failed.
    FAILED = "failed"
    #: The lease ran out: the worker died, hung, or lost the ledger.
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Verdict(StrEnum):
    """What to do with a shard whose lease crashed."""

    RETRY = "retry"
    BISECT = "bisect"
    #: Its only open item killed its workers each time: the item dies.
    MARK_DEAD = "mark_dead"
    #: Nothing is open any more.
    CLOSE = "close"


def after_crash(open_items: int, attempts: int, max_attempts: int, progressed: bool) -> tuple[Verdict, int]:
    """Judges a crashed lease: with the attempts that are spent then. A lease that ended items before it
    crashed starts their count anew."""
    attempts = 1 if progressed else attempts + 1
    if attempts < max_attempts:
        return Verdict.RETRY, attempts
    verdicts = {0: Verdict.CLOSE, 1: Verdict.MARK_DEAD}
    return verdicts.get(open_items, Verdict.BISECT), attempts


def last_attempt(attempts: int, max_attempts: int) -> bool:
    """Whether a crash of the attempt after `attempts` others is judged, rather than tried again."""
    return attempts + 1 >= max_attempts


def attempts_after_bisection(open_items: int, max_attempts: int) -> int:
    """Attempts that a half starts with: a half of several items splits at its next crash; a single item
    gets all its attempts alone."""
    return 0 if open_items == 1 else max_attempts - 1


def after_failure(attempts: int, max_attempts: int, code: ErrorCode) -> ItemState:
    """The state of an item after its failure number `attempts`."""
    return ItemState.PENDING if code.retryable and attempts < max_attempts else ItemState.FAILED


def backoff_seconds(attempts: int, jitter: float, base_seconds: float = 1.0) -> float:
    """Seconds to wait before attempt `attempts` + 1: `base_seconds` * 2^attempts up to 300, times 0.5 to 1
    by `jitter` in [0, 1)."""
    return min(MAX_BACKOFF_SECONDS, base_seconds * 2.0 ** min(attempts, 16)) * (0.5 + jitter / 2)


def over_budget(error_budget: float | None, done: int, failed: int, pending: int) -> bool:
    """Whether a job has failed too often since its start or its last resume.

    It has when it cannot end within its budget any more, even if all pending items succeed. Before that,
    the ended items count: a hundred and more by their share of failures, fewer by the probability of that
    many failures at the budget's rate.
    """
    ended = done + failed
    if error_budget is None or not failed or failed / ended <= error_budget:
        return False
    if failed / (ended + pending) > error_budget or ended >= BUDGET_MIN_ITEMS:
        return True
    return _chance(failed, ended, error_budget) < BUDGET_CHANCE


def _chance(failed: int, ended: int, rate: float) -> float:
    """The probability of `failed` failures or more among `ended` items that fail at this rate, each for
    itself (binomial)."""
    return sum(
        comb(ended, count) * rate**count * (1 - rate) ** (ended - count) for count in range(failed, ended + 1)
    )


def final_state(failed: int, rejected_lines: int) -> JobState:
    """The state of a job none of whose shards is open."""
    return JobState.COMPLETED_WITH_ERRORS if failed or rejected_lines else JobState.COMPLETED


def no_such_job(job_id: str) -> NotFoundError:
    """The error for an id that no job has."""
    return NotFoundError(
        ErrorCode.LEDGER_NOT_FOUND,
        f"There is no job {clean(job_id)!r}.",
        "`nightjar list` shows the jobs of this ledger.",
    )


# msgspec inspects a class at its first use and crashes where two threads do so at once. Here the lock of the
# import keeps them apart.
for kind in (Job, ItemRow, Artifact, Draw, RejectedLine):
    msgspec.json.Decoder(kind)
