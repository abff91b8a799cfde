"""The rows of the ledger as frozen records: arguments and results of `jobs.ledger.Ledger`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from jobs.checks import Quality
from jobs.dialogue import Speak
from pipelines.errors import ErrorCode, NotFoundError
from pipelines.request import Generation

#: Label with the input format of a job, if that is not `dialogues`.
INPUT_FORMAT = "input_format"
#: Maximum number of rejected lines that the ledger keeps for a job.
KEPT_REJECTED_LINES = 10_000
#: The newest migration; a database at another revision is refused.
SCHEMA_REVISION = "0003"
MAX_MESSAGE_CHARACTERS = 2000
_TURN_SUFFIX = re.compile(r":turn[0-9]+\Z")


def clean(text: str) -> str:
    """Text that every database accepts: no NUL, no lone surrogates, a maximum of 2,000 characters."""
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
    """In the order of the numbers in `items.state`."""

    #: Waits for a worker, or for another attempt.
    PENDING = "pending"
    DONE = "done"
    #: Ended with an error that is not retryable, or without attempts left. `nightjar retry` reopens it.
    FAILED = "failed"
    #: Crashed its worker each time it ran alone (`poison.worker_crash`).
    DEAD = "dead"
    #: Not run because its job was cancelled.
    SKIPPED = "skipped"


#: The states of items by their numbers, and the numbers.
ITEM_STATES = tuple(ItemState)
ITEM_STATE_NUMBERS = {state: number for number, state in enumerate(ITEM_STATES)}


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which records of an input become a job, and which columns hold their fields."""

    #: Maximum number of records (non-blank lines, or rows of a table), counted from the first one.
    limit: int | None = None
    #: Number of records to choose at random by the job's seed: the same ones each time, in input order.
    sample: int | None = None
    #: Field of a record -> the column of a table that holds it, if their names differ.
    columns: dict[str, str] | None = None
    #: Speaker -> voice; `*` is the voice of all other speakers.
    voices: dict[str, str] | None = None
    #: SHA-256 of Kaldi's `utt2spk` beside the input, if `voices` needs it.
    speakers_sha256: str | None = None
    #: Names of the columns or keys that become metadata; None: all but those of `drop`, where `*` is all.
    keep: list[str] | None = None
    drop: list[str] | None = None

    def keeps(self, name: str) -> bool:
        """Whether a column or key that has no other use becomes metadata."""
        return not {name, "*"} & {*(self.drop or ())} if self.keep is None else name in self.keep


class FrozenVoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored voice as it was at submit."""

    #: Name of its recording among the job's reference recordings in the store: `<sha256>.<extension>`.
    recording: str
    #: Transcript of the recording; empty if unknown.
    text: str = ""


class VoicePool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Voices from which each spoken role of a dialogue gets one, see `jobs.voices`."""

    #: Name of a voice -> its share, relative to those of the others.
    weights: dict[str, float]
    #: Whether every voice gets the same amount of text for its weight.
    balance: bool = False
    #: Whether a voice is drawn for each speaker of a table instead.
    by_speaker: bool = False


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a job, frozen at submit and hashed to `spec_sha`."""

    model: str
    #: Revision of the checkpoint: a hub commit, a hash of the folder's files, or a package version.
    model_revision: str = ""
    generation: Generation = Generation()
    seed: int = 0
    #: `wav`, `flac`, `mp3` or `opus`.
    format: str = "wav"
    #: Quality checks of the speech; None: only the existence of audio is checked.
    quality: Quality | None = None
    #: Whose turns are spoken. Submit sets it to `answer` for a model that answers dialogues.
    speak: Speak = "auto"
    #: Whether the audio and texts of many items share one object, a pack. Unset: no. Unset fields are not
    #: part of the spec's hash, so specs from before the field existed keep their hash.
    pack: bool | UnsetType = UNSET
    #: Which records of the input are read. Unset: all.
    reading: Reading | UnsetType = UNSET
    #: Name in a line -> stored voice. Unset: none.
    stored_voices: dict[str, FrozenVoice] | UnsetType = UNSET
    #: The pool from which voices are drawn. Unset: none.
    pool: VoicePool | UnsetType = UNSET
    #: Sample rate of the stored audio in Hz. Unset: that of the model.
    sample_rate: int | UnsetType = UNSET
    #: Whether the times of words are stored. Unset: no.
    timestamps: bool | UnsetType = UNSET
    #: What is stored. Unset: audio.
    output: Literal["codes", "both"] | UnsetType = UNSET
    #: Language whose numbers, dates, money and units are spoken in words, and the library that writes them, with
    #: its version. Unset: texts are spoken as they are written.
    normalize: Literal["en"] | UnsetType = UNSET
    normalizer: str | UnsetType = UNSET
    #: Word -> its spelling, or its phonemes as `/…/`. Unset: none.
    lexicon: dict[str, str] | UnsetType = UNSET

    @property
    def respells(self) -> bool:
        """Whether spoken texts may differ from the written ones."""
        return bool(self.normalize or self.lexicon)

    @property
    def main_kind(self) -> str:
        """Kind of the artifact that an item of the job is: `audio`, or `codes` in a job of codes alone."""
        return "codes" if self.output == "codes" else "audio"

    @property
    def audio_kinds(self) -> list[str]:
        """The kinds of the artifact that a person listens to; an item has at most one of them."""
        return [QUARANTINE, self.main_kind]

    def extension(self, kind: str) -> str:
        """The extension of the key of an artifact."""
        kind = self.main_kind if kind == QUARANTINE else kind
        return {"text": "txt", WORDS: "json", "codes": "safetensors"}.get(kind, self.format)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """How a job runs, which is no part of its spec."""

    name: str = ""
    owner: str = ""
    #: Higher runs first.
    priority: int = 0
    #: Relative share of the dispatch window among jobs of the same priority.
    weight: int = 1
    max_attempts: int = 3
    #: Maximum number of queued and leased shards; None: no limit.
    max_in_flight: int | None = None
    #: Share of failed items that pauses the job, see `over_budget`; None: never.
    error_budget: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class NewJob(JobTerms):
    """A submitted job. Equal idempotency keys mean the same job."""

    spec: JobSpec
    spec_sha: str
    input_uri: str
    input_sha256: str
    idempotency_key: str
    store_url: str
    #: Identity of the store, see `ObjectStore.establish`.
    store_identity: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(NewJob):
    """A row of `jobs`. Times are UTC epoch seconds of the ledger's clock."""

    id: str
    state: JobState
    state_reason: str
    total_items: int
    total_shards: int
    #: Number of rejected lines; the ledger keeps the first `KEPT_REJECTED_LINES`.
    rejected_lines: int
    #: Number of committed input lines; a resumed ingest continues after them.
    lines_read: int
    created_at: float
    started_at: float | None
    finished_at: float | None

    @property
    def speaks_turns(self) -> bool:
        """Whether a dialogue may have several spoken turns: not if the model answers whole dialogues, and
        not in OpenAI batches, whose lines have one text each."""
        return self.spec.speak != "answer" and self.labels.get(INPUT_FORMAT) != "openai-batch"


@dataclass(frozen=True, slots=True, order=True)
class RejectedLine:
    """An input line that was refused."""

    line: int
    code: ErrorCode
    message: str
    example_id: str | None = None


class NewShard(NamedTuple):
    """A shard to stage. Items are (index, example_id); indexes are consecutive over the whole job.

    The items of one dialogue have consecutive indexes; `turns` numbers all but the first.
    """

    no: int
    items: tuple[tuple[int, str], ...]
    input_key: str
    input_sha256: str
    #: Estimated duration of the audio of all items.
    estimated_ms: int
    #: Index -> number of the spoken turn within its dialogue, from 1. Items that are not in it are turn 0.
    turns: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """The content of a queue message: a shard at an epoch."""

    job_id: str
    shard_no: int
    epoch: int
    #: The job's priority at dispatch, which orders messages; not part of the ticket's identity.
    priority: int = field(default=0, compare=False)


class Lease(NamedTuple):
    """A worker's right to a shard. Writes under an older `epoch` are refused."""

    job: Job
    shard_no: int
    epoch: int
    worker_id: str
    input_key: str
    input_sha256: str
    #: Pending items: index -> (example_id, attempts so far).
    open_items: Mapping[int, tuple[str, int]]

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.job.id, self.shard_no, self.epoch)


#: Kind of an artifact for the best audio of an item of which no draw passed the checks; until a person accepts it.
QUARANTINE = "quarantine"
#: Kind of an artifact for the times of words: a line of JSON `[[text, start_s, end_s], ...]`, and one for the
#: phonemes if the model knows theirs.
WORDS = "words"


class Artifact(msgspec.Struct, frozen=True):
    """Stored data of an item: an object of its own, or a member of a pack. `jobs.packs.read_artifact`
    reads both."""

    index: int
    #: `audio`, `codes`, `text`, `words` or `quarantine`. Codes beside audio have no duration and no samples.
    kind: str
    #: In a pack: the name of the member.
    key: str
    sha256: str
    bytes: int
    duration_ms: int
    sample_rate: int
    samples: int
    seed: int
    #: Key of the pack that holds it; None: it is an object of its own.
    pack: str | None = None
    #: Offset of its bytes in the pack.
    pack_offset: int | None = None
    meta: Mapping[str, object] = {}


class Score(msgspec.Struct, frozen=True, array_like=True):
    """The result of one check or meter for a draw. As JSON: `[value, passed, detail]`."""

    #: None: it could not be measured.
    value: float | None
    #: None: it is not compared with a bound.
    passed: bool | None = None
    #: Source of the value, or what was found, such as the transcript of an ASR meter.
    detail: str = ""


#: Scores with a column of their own in `scores`.
SCORE_COLUMNS = (
    *("ended", "duration", "clipped", "silence", "pause", "loudness"),
    *("wer", "cer", "distillmos", "dnsmos", "similarity"),
)


class Draw(msgspec.Struct, frozen=True):
    """One synthesis of an item with the results of its checks."""

    #: Number of the draw, from 0.
    draw: int
    seed: int
    #: Why it was rejected; None: it passed.
    code: ErrorCode | None
    #: Whether the item keeps its audio.
    kept: bool
    #: 0 if the engine made no audio.
    duration_ms: int
    #: Name -> score. The names are in `jobs.checks.CHECKS` or come from meters of other packages.
    scores: Mapping[str, Score]


class DrawRow(msgspec.Struct, frozen=True):
    """A draw with the index of its item."""

    index: int
    draw: Draw


class Done(msgspec.Struct, frozen=True):
    """An item that was synthesized and stored."""

    index: int
    artifacts: tuple[Artifact, ...]
    #: Engine time, from which the cost is computed; 0 if unknown.
    engine_ms: int = 0
    #: All draws, if they were checked.
    draws: tuple[Draw, ...] = ()
    #: Energy of the engine time in millijoules; 0 if unknown.
    energy_mj: int = 0


class Failed(msgspec.Struct, frozen=True):
    """An item that failed. It is retried while the code is retryable and attempts are left."""

    index: int
    code: ErrorCode
    message: str
    #: All draws, if they were checked.
    draws: tuple[Draw, ...] = ()
    #: The audio of the best draw, in quarantine.
    artifacts: tuple[Artifact, ...] = ()
    #: Engine time of the attempt, from which the cost is computed; 0 if the engine was not used.
    engine_ms: int = 0
    #: Energy of the engine time in millijoules; 0 if unknown.
    energy_mj: int = 0


Outcome = Done | Failed


class Decision(msgspec.Struct, frozen=True):
    """What a person decided about the audio of an item."""

    #: Otherwise it was refused.
    accepted: bool
    person: str
    reason: str = ""
    #: UTC epoch seconds of the ledger's clock; 0: not recorded yet.
    decided_at: float = 0

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{'accepted' if self.accepted else 'refused'} by {self.person or 'unknown'}{reason}"


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of a commit."""

    #: Number of items whose outcome was written.
    accepted: int
    #: Nothing was written, because the lease had ended or the job no longer runs.
    lost: bool = False
    #: Items that failed permanently, if the job has an error budget.
    failed: int = field(default=0, compare=False)


class ItemRow(msgspec.Struct, frozen=True):
    """An item with its artifact of `JobSpec.main_kind`, if any."""

    index: int
    example_id: str
    state: ItemState
    shard_no: int
    attempts: int
    #: Of a failed item, and of one that failed and was accepted.
    error_code: ErrorCode | None
    error_message: str | None
    artifact: Artifact | None
    #: Number of the spoken turn within its dialogue, from 0, and whether the dialogue has several.
    turn: int = 0
    several: bool = False
    #: See `Job.speaks_turns`.
    speaks_turns: bool = False
    #: The last decision about its present audio.
    decision: Decision | None = None

    @property
    def refused(self) -> bool:
        """Whether a person refused its audio, so that exports leave it out."""
        return self.decision is not None and not self.decision.accepted

    @property
    def id(self) -> str:
        """`example_id:turn1` if the dialogue has several spoken turns, else the example id. It is unique in the job: if
        the job may have such dialogues, an example id that ends like a turn's id gets the turn appended too."""
        if self.several or (self.speaks_turns and _TURN_SUFFIX.search(self.example_id)):
            return f"{self.example_id}:turn{self.turn}"
        return self.example_id


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker process, as it registers itself."""

    id: str
    host: str
    pid: int
    gpu: str
    #: The only model that it serves; empty: any.
    model: str
    version: str
    #: Number of shards that it can use at once, including those it holds.
    slots: int


#: Jobs whose leases are valid, so that outcomes are accepted.
WORKING = (JobState.READY, JobState.RUNNING, JobState.PAUSED)
#: Jobs whose shards are dispatched.
DISPATCHED = (JobState.READY, JobState.RUNNING)
#: Jobs that have ended.
FINAL = (JobState.CANCELLED, JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS, JobState.FAILED)
#: Jobs whose failed items can be reopened.
RETRYABLE_JOBS = (*WORKING, JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS)
#: Shards that have not ended.
OPEN_SHARDS = (ShardState.READY, ShardState.QUEUED, ShardState.LEASED)
#: Items that ended with an error.
BROKEN_ITEMS = (ItemState.FAILED, ItemState.DEAD)

#: Tolerance for times ahead of the ledger's clock: after a statement has read the clock, another one may
#: write a slightly later time.
CLOCK_SLACK_SECONDS = 10.0
#: Time for the worker that ended a job to write its manifest.
MANIFEST_GRACE_SECONDS = 60.0

#: Codes for a service that is down or refuses. This is not the fault of the shard, so it costs no attempt.
OUTAGES = (
    ErrorCode.STORE_UNREACHABLE,
    ErrorCode.STORE_FULL,
    ErrorCode.STORE_FORBIDDEN,
    ErrorCode.LEDGER_UNREACHABLE,
    ErrorCode.BROKER_UNREACHABLE,
    ErrorCode.MODEL_UNREACHABLE,
)

#: Faults of one worker, its settings or its copy of a model: another worker may run the shard.
WORKER_FAULTS = (
    ErrorCode.CONFIG_INVALID,
    ErrorCode.CONFIG_MISSING_LIBRARY,
    ErrorCode.MODEL_UNKNOWN,
    ErrorCode.MODEL_BAD_CHECKPOINT,
    ErrorCode.MODEL_MISSING_EXTRA,
)

#: States of a worker process: working; ended normally; heartbeats stopped.
UP, RETIRED, LOST = "up", "retired", "lost"
#: Prefix of the ids of workers on the broker of a home, which end with that broker. No host name begins with
#: it.
HOME_WORKER_PREFIX = "home:"
#: State of the GPU or host of a worker that keeps failing, reported by its supervisor.
QUARANTINED = "quarantined"
#: A worker counts as live for this time after its last heartbeat.
LIVE_SECONDS = 60.0

#: Outages that end a lease at once, because they need a person and other jobs may need the worker meanwhile.
LASTING_OUTAGES = frozenset({ErrorCode.STORE_FULL, ErrorCode.STORE_FORBIDDEN})


#: How a lease ended: every item of the shard has ended; normally, with items that wait for another attempt; given back
#: by a draining worker; given back by a worker that cannot run it, while another one may; the worker reported that the
#: shard as a whole failed; the worker died, hung or lost the ledger; or the job was cancelled.
AttemptOutcome = Literal["done", "partial", "released", "refused", "failed", "expired", "cancelled"]


def no_such_job(job_id: str) -> NotFoundError:
    """The error for an unknown job id."""
    return NotFoundError(
        ErrorCode.LEDGER_NOT_FOUND,
        f"There is no job {clean(job_id)!r}.",
        "`nightjar list` shows the jobs of this ledger.",
    )


# msgspec inspects a class at its first use and crashes if two threads do so at once. The import lock
# prevents that here.
for kind in (Job, ItemRow, Artifact, Draw, RejectedLine):
    msgspec.json.Decoder(kind)
