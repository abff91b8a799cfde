"""From an input file to a job that can be dispatched: streamed, checked, written to the store, staged in the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from jobs.artifacts import input_key, job_prefix, put_numbered
from jobs.cutting import ShardSize, cut
from jobs.estimate import Estimate, dry_run
from jobs.ledger import DuplicateExamples
from jobs.ledger.records import Job, JobSpec, JobState, NewJob, NewShard, RejectedLine
from jobs.line_check import GoodLine, LineChecker, duplicate
from jobs.openai_batch import InputFormat, line_form
from jobs.payload import CONTENT_TYPE, compress, encode_line
from jobs.references import ReferenceReader, ReferenceShelf
from jobs.source import Source, open_source
from jobs.spec import frozen_spec, spec_sha
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, InputError, ServiceError
from pipelines.registry import describe

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings

__all__ = ["Estimate", "IngestProgress", "SubmitOptions", "SubmitResult", "dry_run", "submit"]

BATCH_LINES = 10_000
BATCH_BYTES = 16 << 20
#: Label of a job whose input is not written as dialogues.
INPUT_FORMAT = "input_format"
#: Objects written at once to a store that a network lies before.
_S3_WRITERS = 16


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What a person may say about a job beside its input and its spec."""

    name: str = ""
    owner: str = ""
    priority: int = 0
    weight: int = 1
    max_attempts: int = 3
    max_in_flight: int | None = None
    error_budget: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    #: What a bad line does: it is left out and listed by `jobs errors`, or the whole submit is undone.
    on_error: Literal["skip", "abort"] = "skip"
    #: How the input writes its lines.
    input_format: InputFormat = "dialogues"
    #: The same key is the same job; None: made from input, spec and store.
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """How far an ingest has come."""

    lines: int
    items: int
    rejected: int
    #: Of the input as it is stored.
    bytes_read: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """The job of a submit."""

    job: Job
    #: False: the job was there before.
    created: bool
    #: An ingest that had stopped half-way was taken up again.
    resumed: bool
    items: int
    rejected: int


def submit(
    settings: Settings,
    ledger: Ledger,
    store: ObjectStore,
    source: str,
    spec: JobSpec,
    *,
    options: SubmitOptions | None = None,
    progress: Callable[[IngestProgress], None] | None = None,
) -> SubmitResult:
    """Makes a job of an input, or finds the job that was made of it with the same spec and store.

    An ingest that died goes on after its last committed line. Raises `InputError` for an input that cannot be read, for
    settings that the model refuses and, with `on_error="abort"`, for the first bad line; then nothing of the job is left.
    Raises `ServiceError` with `ledger.state` where the idempotency key belongs to a job of another input or spec.
    Raises `ModelError`, `StoreError` or `ServiceError` when model, store or ledger fail; the same submit then goes on later.
    """
    options = options or SubmitOptions()
    card = describe(spec.model)
    spec = frozen_spec(spec, card)
    sha = spec_sha(spec)
    LineChecker(card, spec.generation, str)
    with open_source(source, settings.s3) as opened:
        key = options.idempotency_key or _idempotency_key(opened.sha256, sha, store.url, options.input_format)
        store.check()
        job = ledger.begin_job(_new_job(opened, spec, sha, key, store.url, options))
        _refuse_another(job, opened.sha256, sha, key, options.input_format)
        if job.state is not JobState.INGESTING:
            return SubmitResult(job, created=False, resumed=False, items=job.total_items, rejected=job.rejected_lines)
        reader = ReferenceReader(opened.folder, settings.audio_roots, store)
        form = line_form(options.input_format, card, spec.format)
        checker = LineChecker(card, spec.generation, ReferenceShelf(reader, store, job.id).key, form)
        size = ShardSize.of(card, settings.shard.target_seconds, settings.shard.max_items)
        try:
            _Ingest(ledger, store, job, opened, checker, size, options.on_error == "abort", progress).run()
        except InputError:
            _undo(ledger, store, job)
            raise
        except ServiceError as error:
            # Another process ingests the same job, and has just sealed it.
            if error.code is not ErrorCode.LEDGER_STATE or ledger.job(job.id).state is JobState.INGESTING:
                raise
    sealed = ledger.seal_job(job.id)
    resumed = job.lines_read > 0
    return SubmitResult(sealed, created=not resumed, resumed=resumed, items=sealed.total_items, rejected=sealed.rejected_lines)


class _Ingest:
    """One pass over the lines that are not committed yet."""

    def __init__(
        self,
        ledger: Ledger,
        store: ObjectStore,
        job: Job,
        source: Source,
        checker: LineChecker,
        size: ShardSize,
        abort: bool,
        progress: Callable[[IngestProgress], None] | None,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._job = job
        self._source = source
        self._checker = checker
        self._size = size
        self._abort = abort
        self._progress = progress
        self._shards, self._items, self._lines = ledger.staged_shards(job.id)
        self._rejected = job.rejected_lines

    def run(self) -> None:
        """Checks a batch while the one before is written and staged, in order, in a thread of its own."""
        with (
            ThreadPoolExecutor(_S3_WRITERS, thread_name_prefix="ingest") as writers,
            ThreadPoolExecutor(1, thread_name_prefix="stage") as stager,
        ):
            write_all = writers.map if self._store.url.startswith("s3://") else map
            staging: Future[None] | None = None
            for batch in self._source.batches(BATCH_LINES, BATCH_BYTES, self._lines):
                good, rejected = self._checker.check(batch)
                self._staged(staging)
                staging = stager.submit(self._stage, write_all, good, rejected, batch.first + len(batch.lines) - 1)
            self._staged(staging)
        self._source.check_unchanged()

    def _staged(self, staging: Future[None] | None) -> None:
        """Waits for a batch; raises what kept it from being staged."""
        if staging is None:
            return
        staging.result()
        if self._progress is not None:
            self._progress(IngestProgress(self._lines, self._items, self._rejected, self._source.bytes_read, self._source.bytes))

    def _stage(
        self, write_all: Callable[..., Iterable[NewShard]], good: list[GoodLine], rejected: list[RejectedLine], lines_read: int
    ) -> None:
        """Writes and stages one batch; example ids that the job has already are found by the ledger and left out.

        Where another process ingests the same job, each batch is staged by one of them, and the other one goes on after it.
        """
        if lines_read <= self._lines:
            return
        while True:
            self._refuse(rejected)
            shards = list(write_all(self._write, *self._numbered(good)))
            try:
                staged = self._ledger.stage(self._job.id, shards, rejected, lines_read)
                break
            except DuplicateExamples as error:
                good, repeated = _without(good, set(error.example_ids), self._checker.id_key)
                rejected = sorted([*rejected, *repeated], key=lambda line: line.line)
        self._rejected += len(rejected)
        if not staged:
            self._shards, self._items, self._lines = self._ledger.staged_shards(self._job.id)
            return
        self._shards += len(shards)
        self._items += len(good)
        self._lines = lines_read

    def _refuse(self, rejected: Sequence[RejectedLine]) -> None:
        if self._abort and rejected:
            first = rejected[0]
            raise InputError(
                first.code, f"Line {first.line}: {first.message}", "Nothing was submitted; `--on-error skip` leaves such lines out."
            )

    def _numbered(self, good: list[GoodLine]) -> tuple[range, list[int], list[Sequence[GoodLine]]]:
        """Number, index of the first item and lines of each shard."""
        runs = list(cut(good, self._size))
        firsts: list[int] = []
        index = self._items
        for run in runs:
            firsts.append(index)
            index += len(run)
        return range(self._shards, self._shards + len(runs)), firsts, runs

    def _write(self, shard_no: int, first: int, lines: Sequence[GoodLine]) -> NewShard:
        data = compress([encode_line(index, line.line, line.raw, line.references) for index, line in enumerate(lines, first)])
        sha256 = hashlib.sha256(data).hexdigest()
        info = put_numbered(self._store, input_key(self._job.id, shard_no), data, sha256, CONTENT_TYPE).info
        items = tuple([(index, line.example_id) for index, line in enumerate(lines, first)])
        return NewShard(shard_no, items, info.key, sha256, sum([line.estimated_ms for line in lines]))


def _refuse_another(job: Job, input_sha256: str, sha: str, key: str, input_format: str) -> None:
    """A key that a person chose names one input and one spec; two files must never mix in one job."""
    if (job.input_sha256, job.spec_sha, job.labels.get(INPUT_FORMAT, "dialogues")) != (input_sha256, sha, input_format):
        raise ServiceError(
            ErrorCode.LEDGER_STATE,
            f"The idempotency key {key!r} belongs to job {job.id}, which was made from another input or spec.",
            "Give this submit a key of its own, or submit what the job was made from.",
        )


def _without(good: list[GoodLine], example_ids: set[str], key: str) -> tuple[list[GoodLine], list[RejectedLine]]:
    kept = [line for line in good if line.example_id not in example_ids]
    repeated = [line for line in good if line.example_id in example_ids]
    if len(kept) == len(good):
        raise RuntimeError("The ledger reports duplicates that are not in the batch.")
    errors = [(line, duplicate(line.example_id, key)) for line in repeated]
    return kept, [RejectedLine(line.line, error.code, str(error), line.example_id) for line, error in errors]


def _undo(ledger: Ledger, store: ObjectStore, job: Job) -> None:
    """Leaves nothing of a job whose input turned out to be unusable."""
    ledger.abandon_job(job.id)
    for info in list(store.list(job_prefix(job.id))):
        store.delete(info.key)


def _idempotency_key(input_sha256: str, sha: str, store_url: str, input_format: str) -> str:
    parts = [input_sha256, sha, store_url]
    if input_format != "dialogues":
        parts.append(input_format)
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _new_job(source: Source, spec: JobSpec, sha: str, key: str, store_url: str, options: SubmitOptions) -> NewJob:
    return NewJob(
        spec=spec,
        spec_sha=sha,
        input_uri=source.uri,
        input_sha256=source.sha256,
        idempotency_key=key,
        store_url=store_url,
        name=options.name,
        owner=options.owner,
        priority=options.priority,
        weight=options.weight,
        max_attempts=options.max_attempts,
        max_in_flight=options.max_in_flight,
        error_budget=options.error_budget,
        labels=options.labels if options.input_format == "dialogues" else {**options.labels, INPUT_FORMAT: options.input_format},
    )
