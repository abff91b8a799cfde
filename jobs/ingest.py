"""Makes a job from an input file: streams and checks it, writes it to the store, stages it in the ledger. A dry run
checks every line as a submit does, writes nothing, and estimates the cost."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, count
from typing import NamedTuple

import msgspec

from jobs.delete import delete_objects
from jobs.dialogue import parse_line
from jobs.input_records import Records, left_out_note
from jobs.job_options import SubmitOptions
from jobs.layout import input_key, put_numbered
from jobs.ledger import Ledger
from jobs.ledger.control import DuplicateExamples
from jobs.ledger.records import INPUT_FORMAT, Job, JobSpec, JobState, JobTerms, NewJob, NewShard, RejectedLine
from jobs.own_files import recorded
from jobs.packs import map_ahead
from jobs.references import ReferenceReader, put_reference
from jobs.settings import Settings
from jobs.shard_file import ShardSize, compress, cut, encode_lines
from jobs.source import BATCH_BYTES, BATCH_LINES, InputFormat, Record, batches_of, empty_input, open_source
from jobs.spec import (
    GoodLine,
    LineChecker,
    ReferenceKey,
    ResolvedSpec,
    aborted_by,
    duplicate_lines,
    resolve_for,
    spec_sha,
)
from jobs.store.base import ObjectStore, sha256_of
from pipelines.errors import ErrorCode, InputError, ServiceError, StoreError
from pipelines.registry import ModelCard

#: The options of a submit without options.
NO_OPTIONS = SubmitOptions()
#: Number of objects that are written to a remote store at the same time.
_S3_WRITERS = 16
#: Maximum number of rejected lines that are kept as examples.
MAX_EXAMPLES = 100
_PCM_BITS = 16
#: Size of FLAC as a share of 16-bit PCM, for speech.
_FLAC_SHARE = 0.55
#: Size of a file's headers in bytes, by format.
_HEADER_BYTES = {"opus": 900, "mp3": 400}
_WAV_HEADER_BYTES = 44


class IngestProgress(NamedTuple):
    """The progress of an ingest."""

    lines: int
    #: Bytes of the input file that were read, and its size, before decompression.
    bytes_read: int
    bytes_total: int
    #: What the user should know about the input.
    note: str = ""


class SubmitResult(NamedTuple):
    """The job of a submit."""

    job: Job
    #: Whether the job is new; False: it already existed.
    created: bool
    #: Whether an interrupted ingest was continued.
    resumed: bool


def submit(
    settings: Settings,
    ledger: Ledger,
    store: ObjectStore,
    source: str,
    spec: JobSpec | ResolvedSpec,
    *,
    options: SubmitOptions = NO_OPTIONS,
    progress: Callable[[IngestProgress], None] | None = None,
    lost_inputs: Callable[[Job], Collection[str]] = lambda job: (),
) -> SubmitResult:
    """Makes a job from an input, or finds the existing job of the same input, spec and store.

    `lost_inputs` returns the keys of those shard inputs of an existing job that are lost; they are written
    again.

    An interrupted ingest continues after its last committed line. Raises `InputError` for an input that
    cannot be read, for settings that the model refuses and, with `on_error="abort"`, for the first bad line;
    the job is then removed. Raises `ServiceError` with `ledger.state` if the idempotency key belongs to a job
    of another input or spec. Raises `ModelError`, `StoreError` or `ServiceError` if model, store or ledger
    fail; the same submit can continue later.
    """
    resolved = resolve_for(settings, spec, options)
    with open_source(source, settings.s3) as opened:
        resolved = resolved.of_input(opened)
        sha = spec_sha(resolved.spec)
        labels = dict(options.labels)
        made_from = [opened.sha256, sha, recorded(store.url, ledger.place)]
        if resolved.input_format != "dialogues":
            labels[INPUT_FORMAT] = resolved.input_format
            made_from.append(resolved.input_format)
        key = options.idempotency_key or sha256_of(msgspec.json.encode(made_from))
        identity = _identity_of(ledger, store)
        store.check()
        terms = {field.name: getattr(options, field.name) for field in fields(JobTerms)}
        terms["labels"] = labels
        origin = opened.uri, opened.sha256, key, store.url, identity
        job = ledger.begin_job(NewJob(resolved.spec, sha, *origin, **terms))
        if (job.input_sha256, job.spec_sha, job.labels.get(INPUT_FORMAT)) != (
            opened.sha256,
            sha,
            labels.get(INPUT_FORMAT),
        ):
            raise ServiceError(
                ErrorCode.LEDGER_STATE,
                f"The idempotency key {key!r} belongs to job {job.id}, which was made from another input or spec.",
                "Use another key, or submit the input and spec of that job.",
            )
        abort = options.on_error == "abort"
        # A bad line that an earlier submit of the same job left out. An unfinished ingest is undone.
        if abort and (skipped := next(ledger.rejected_lines(job.id), None)) is not None:
            outcome = f"Job {job.id} was already made from the other lines"
            if job.state is JobState.INGESTING:
                _undo(ledger, store, job)
                outcome = "Nothing was submitted"
            raise aborted_by(skipped, outcome)
        reader = ReferenceReader(opened.folder, settings.audio_roots, store, resolved.card.check_reference)
        times = settings.times
        size = ShardSize.of(
            resolved.card, times.shard_seconds, times.shard_items, ledger.measured_rtf(resolved.spec.model)
        )
        reference_key = reader.keys(partial(put_reference, store, job.id))
        records = resolved.records(opened)
        ingest = _Ingest(ledger, store, job, records, resolved.checker, reference_key, size, abort, progress)
        if job.state is not JobState.INGESTING:
            if lost := lost_inputs(job):
                ingest.restore(lost)
            return SubmitResult(job, created=False, resumed=False)
        try:
            resolved.voices.put(store, job.id)
            ingest.run()
        except InputError:
            _undo(ledger, store, job)
            raise
        except ServiceError as error:
            # It is not an error if another process, which ingests the same job, has just sealed it.
            if error.code is not ErrorCode.LEDGER_STATE or ledger.job(job.id).state is JobState.INGESTING:
                raise
    resumed = job.lines_read > 0
    return SubmitResult(ledger.seal_job(job.id), created=not resumed, resumed=resumed)


def check_has_work(job: Job) -> None:
    """Raises `input.no_items` for a submitted job without items, `ledger.cancelled` for a cancelled one."""
    if job.state is JobState.CANCELLED:
        raise ServiceError(
            ErrorCode.LEDGER_CANCELLED,
            f"Job {job.id} of this input with these options was cancelled.",
            "To run the input again as a new job, add `--idempotency-key KEY` to the command.",
        )
    if job.state is JobState.FAILED:
        if not job.rejected_lines:
            raise empty_input()
        raise InputError(
            ErrorCode.INPUT_NO_ITEMS, f"Job {job.id} has no items.", f"See why with: nightjar errors {job.id}"
        )


@dataclass
class _Ingest:
    """Ingests the lines of a job that are not committed yet."""

    ledger: Ledger
    store: ObjectStore
    job: Job
    records: Records
    checker: LineChecker
    reference_key: ReferenceKey
    size: ShardSize
    abort: bool
    progress: Callable[[IngestProgress], None] | None

    def __post_init__(self) -> None:
        self._read_place()

    def _read_place(self) -> None:
        """Reads the committed numbers, after which the ingest continues."""
        self.shards, self.items, self.lines = self.ledger.staged_shards(self.job.id)

    def run(self) -> None:
        """Checks each batch while another thread writes and stages the previous one. Batches are staged in
        order."""
        with (
            ThreadPoolExecutor(_S3_WRITERS, thread_name_prefix="ingest") as writers,
            ThreadPoolExecutor(1, thread_name_prefix="stage") as stager,
        ):
            write_all = writers.map if self.store.remote else map
            lines = self.checker.checked(self.records, self.reference_key, self.lines)
            for _ in map_ahead(partial(stager.submit, partial(self._stage, write_all)), lines, 1):
                if self.progress is not None:
                    done = self.records.source.bytes_read
                    whole = self.records.source.bytes
                    note = left_out_note(self.records.left_out)
                    self.progress(IngestProgress(self.lines, done, whole, note))
        self.records.source.check_unchanged()

    def _stage(
        self,
        write_all: Callable[..., Iterable[NewShard]],
        checked: tuple[int, list[GoodLine], list[RejectedLine]],
    ) -> None:
        """Writes and stages one batch. Lines whose example ids the ledger already has for the job are
        rejected.

        If two processes ingest the same job, each batch is staged by one of them, and the other continues
        after it.
        """
        lines_read, good, rejected = checked
        if lines_read <= self.lines:
            return
        while True:
            if self.abort and rejected:
                raise aborted_by(rejected[0], "Nothing was submitted")
            runs = list(cut(good, self.size, self.items))
            firsts = accumulate((sum(line.items for line in run) for run in runs), initial=self.items)
            shards = list(write_all(self._write, count(self.shards), firsts, runs))
            # Objects that the ledger names must survive a power cut.
            self.store.sync()
            try:
                self.ledger.stage(self.job.id, shards, rejected, lines_read)
                break
            except DuplicateExamples as error:
                known = set(error.example_ids)
                repeated = [line for line in good if line.example_id in known]
                if not repeated:
                    raise RuntimeError("The ledger reports duplicates that are not in the batch.") from error
                good = [line for line in good if line.example_id not in known]
                rejected = duplicate_lines(repeated, self.checker.id_key) + rejected
                rejected.sort()
        self._read_place()

    def _write(self, shard_no: int, first: int, lines: Sequence[GoodLine]) -> NewShard:
        encoded: list[bytes] = []
        items: list[tuple[int, str]] = []
        turns: dict[int, int] = {}
        for line in lines:
            index = first + len(items)
            encoded += encode_lines(index, line)
            items += [(index + turn, line.example_id) for turn in range(line.items)]
            turns |= {index + turn: turn for turn in range(1, line.items)}
        info = put_numbered(self.store, input_key(self.job.id, shard_no), compress(encoded))
        return NewShard(
            shard_no, tuple(items), info.key, info.sha256, sum(line.estimated_ms for line in lines), turns
        )

    def restore(self, lost: Collection[str]) -> None:
        """Rewrites the shard inputs with the keys `lost`, and the reference audio of their lines. Raises
        `store.missing` if the lines differ from the staged lines."""
        inputs = {
            no: place for no, place in self.ledger.shard_inputs(self.job.id).items() if place[0] in lost
        }
        # The items of a dialogue are in one input. Among lines with equal ids only the first one became
        # items.
        rows = (row for row in self.ledger.items(self.job.id) if row.shard_no in inputs and not row.turn)
        firsts = {row.example_id: row for row in rows}
        lines = {place: [] for place in inputs.values()}

        def wanted(record: Record) -> Record:
            """A blank line in place of a line of another input, so that its reference audio is not read."""
            try:
                dialogue, _ = parse_line(record.strip() if isinstance(record, bytes) else b"")
            except InputError:
                return b""
            return record if dialogue.example_id in firsts else b""

        for batch in batches_of(map(wanted, self.records.lines()), BATCH_LINES, BATCH_BYTES):
            good, _ = self.checker.check(batch, self.reference_key)
            for line in good:
                if (row := firsts.pop(line.example_id, None)) is not None:
                    lines[inputs[row.shard_no]] += encode_lines(row.index, line)
        for (key, sha256), encoded in lines.items():
            data = compress(encoded)
            if sha256_of(data) != sha256:
                raise StoreError(
                    ErrorCode.STORE_MISSING,
                    f"The input {key} of job {self.job.id} is lost and cannot be restored: its reference audio or the software has changed.",
                    "Submit the file again with another --idempotency-key.",
                )
            self.store.delete(key)
            self.store.put(key, data)
        self.store.sync()


def _undo(ledger: Ledger, store: ObjectStore, job: Job) -> None:
    """Removes a job whose input is unusable, with its objects."""
    ledger.abandon_job(job.id)
    delete_objects(store, job.id)


def _identity_of(ledger: Ledger, store: ObjectStore) -> str:
    """The identity of a store for a submit. A store that already has jobs of the ledger must exist and is not
    created."""
    known = ledger.store_identity(store.url)
    file = ledger.path
    # A ledger inside the store proves that it is the right store.
    within = store.root is not None and file is not None and file.absolute().is_relative_to(store.root)
    if known is None:
        return store.establish()
    if within:
        store.establish(known)
    # The identity may differ if another store was copied over this one.
    store.confirm(known)
    return known


def submit_for_workers(
    settings: Settings,
    source: str,
    spec: ResolvedSpec,
    options: SubmitOptions,
    progress: Callable[[IngestProgress], None] | None = None,
) -> SubmitResult:
    """Submits to the ledger and the store of the settings, and dispatches the first shards.

    Raises the errors of `submit`, and `broker.unreachable` before anything is written.
    """
    from jobs import dispatch
    from jobs.recent_jobs import remember_if_embedded
    from jobs.store import open_store

    store = open_store(settings.effective_store_url, settings.s3)
    with closing(Ledger.of(settings)) as ledger:
        if settings.database_url is None:
            ledger.migrate()
        ledger.check_schema()
        dispatch.check(settings)
        result = submit(settings, ledger, store, source, spec, options=options, progress=progress)
        remember_if_embedded(result.job.id, settings)
        if not result.job.state.final:
            # Otherwise idle workers would wait for the next dispatch.
            dispatch.dispatch(ledger, settings)
    return result


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a job. The length of speech is the number of characters times the model's average
    seconds per character."""

    items: int
    input_format: InputFormat
    #: Number of rejected lines by code.
    rejected: dict[ErrorCode, int]
    #: The first rejected lines.
    rejected_lines: tuple[RejectedLine, ...]
    audio_seconds: float
    #: Size of the audio in the store.
    bytes: int
    #: Time that one worker needs; None if the model's speed was not measured.
    engine_seconds: float | None


def dry_run(
    settings: Settings,
    store: ObjectStore,
    source: str,
    spec: JobSpec | ResolvedSpec,
    options: SubmitOptions = NO_OPTIONS,
) -> Estimate:
    """Checks an input as `submit` does and estimates its job, without writing to ledger or store.

    Raises `InputError` for an input that cannot be read, for settings that the model refuses and, with
    `on_error="abort"`, for the first bad line. Also raises `ModelError` and `StoreError`.
    """
    resolved = resolve_for(settings, spec, options)
    card = resolved.card
    rejected = Counter[ErrorCode]()
    examples: list[RejectedLine] = []
    items = milliseconds = 0
    # A database without a name is a temporary file: memory stays bounded for any number of lines.
    with open_source(source, settings.s3) as opened, closing(sqlite3.connect("")) as seen:
        seen.execute("CREATE TABLE seen (id TEXT PRIMARY KEY) WITHOUT ROWID")
        reader = ReferenceReader(opened.folder, settings.audio_roots, store, card.check_reference)
        reference_key = reader.keys(lambda audio: audio.sha256)
        resolved = resolved.of_input(opened)
        checker = resolved.checker
        records = resolved.records(opened)
        for _, good, bad in checker.checked(records, reference_key):
            new: list[GoodLine] = []
            for line in good:
                if seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (line.example_id,)).rowcount:
                    new.append(line)
                else:
                    bad += duplicate_lines([line], checker.id_key)
            bad.sort()
            if bad and options.on_error == "abort":
                raise aborted_by(bad[0], "Nothing would be submitted")
            items += sum(line.items for line in new)
            milliseconds += sum(line.estimated_ms for line in new)
            rejected.update(line.code for line in bad)
            examples += bad[: MAX_EXAMPLES - len(examples)]
    seconds = milliseconds / 1000
    engine_seconds = None if card.rtf is None else seconds * card.rtf
    size = _audio_bytes(items, seconds, card, resolved.spec)
    return Estimate(items, records.format, dict(rejected), tuple(examples), seconds, size, engine_seconds)


def _audio_bytes(items: int, seconds: float, card: ModelCard, spec: JobSpec) -> int:
    """The size of the audio files. That of lossy formats is fitted to measurements of libsndfile's encoders on the
    voice `hibari`."""
    rate = spec.sample_rate or card.sample_rate
    bits_per_second = {
        "opus": 12e3 + 0.9 * rate,
        "mp3": min(10e3 + 2 * rate, 46e3 + rate / 2),
        "flac": rate * _PCM_BITS * _FLAC_SHARE,
    }.get(spec.format, rate * _PCM_BITS)
    return round(seconds * bits_per_second / 8) + items * _HEADER_BYTES.get(spec.format, _WAV_HEADER_BYTES)
