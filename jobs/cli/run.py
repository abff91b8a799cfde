"""`nightjar run`: the whole path here and now. Ledger, broker, store and worker live in one folder and die with the command."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import click

from jobs.cli.context import JOB, GroupedCommand, common_options, option
from jobs.cli.follow import POLL_SECONDS, Progress, exit_code_of
from jobs.cli.show import status_lines
from jobs.cli.spec import check_source, dry_run_option, job_options, lacking_meters, submit_options, take_spec
from jobs.cli.submit import dry_run_of, no_items
from jobs.console import Interrupted, Output, check_interrupts, undisturbed
from jobs.embedded import DRAIN_SECONDS, EmbeddedHome, embedded_overrides
from jobs.formatting import counted, redact
from jobs.gpus import VISIBLE, choose_gpus
from jobs.input_format import WORDS
from jobs.layout import job_prefix
from jobs.ledger.records import INPUT_FORMAT, Job, JobState, ShardState
from jobs.ledger.states import LASTING_OUTAGES
from jobs.ledger.status import JobStatus
from jobs.recent_jobs import out_words, remember
from jobs.settings import Settings, load_settings
from jobs.status import status_view
from pipelines.errors import ErrorCode, NightjarError, ServiceError, StoreError

if TYPE_CHECKING:
    from jobs.input_format import InputFormat
    from jobs.ledger import Ledger
    from jobs.store.base import ObjectStore

#: After so long without an item that ended, a run says where to look.
STALL_SECONDS = 60.0
#: After so long without an item that ended, a run makes sure that its ledger can still be written.
WRITE_SECONDS = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While the run works a signal interrupts it; while it cleans up, a second one makes the worker end at once."""

    def __init__(self) -> None:
        self.embedded: EmbeddedHome | None = None
        self.cleaning = False
        self._number: int | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if not self.cleaning:
            self.cleaning = True
            self._number = number
            raise Interrupted(number)
        if self.embedded is not None:
            self.embedded.kill()

    def check(self) -> None:
        """Raises `Interrupted` where C code, or a `__del__`, has swallowed the one of a signal."""
        if self._number is not None:
            raise Interrupted(self._number)

    @contextmanager
    def installed(self) -> Iterator[Signals]:
        before = {number: signal.signal(number, self) for number in _SIGNALS}
        try:
            check_interrupts()
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@click.command(cls=GroupedCommand)
@click.argument("source", metavar="INPUT")
@option(
    "--gpu",
    "gpus",
    metavar="N,N...|all",
    heading=JOB,
    help="GPUs as `nvidia-smi` numbers them, for example 0,1, or `all`. Runs one worker per GPU. [default: one worker, on the first GPU "
    "that CUDA_VISIBLE_DEVICES allows]",
)
@job_options
@dry_run_option
@common_options
def run(source: str, gpus: str | None, dry_run: bool, home: str | None, output: Output, **given: Any) -> int:
    """Synthesize INPUT into DIR and wait until it is done.

    INPUT is a path, `-` for standard input, or s3://BUCKET/KEY, also .gz or .zst: dialogues (JSONL), chat messages, an OpenAI batch,
    text, CSV, TSV, Kaldi or Parquet. Needs no other service: the command starts
    its own broker and worker and ends them. If it is interrupted, give the same command again: it continues where it stopped, and
    finished items are kept.

    \b
    Examples:
      nightjar run dialogues.jsonl --out out
      nightjar run dialogues.jsonl --out out --speak all --format flac
      nightjar run sentences.csv --column text=sentence --sample 100
      nightjar run dialogues.jsonl --model qwen3-tts-0.6b-base --qa strict
      nightjar run dialogues.jsonl --model qwen3-tts-0.6b-base --gpu all
    """
    chosen = load_settings(home=home)
    settings = load_settings(home=str(chosen.home), **embedded_overrides(chosen))
    devices = None if gpus is None else choose_gpus(gpus, os.environ.get(VISIBLE))
    wanted = take_spec(given)
    with undisturbed():
        from jobs.spec import resolve

    spec = resolve(wanted, given["input_format"])
    if (lack := lacking_meters(wanted, output.note)) is not None:
        raise lack
    check_source(source)
    if dry_run:
        return dry_run_of(settings, source, spec, output, abort=given["on_error"] == "abort")
    options = submit_options(given)

    with undisturbed():
        from jobs.ingest import submit
        from jobs.ledger import Ledger
        from jobs.store import open_store

    with Signals().installed() as signals, EmbeddedHome(settings, devices) as embedded, Progress(quiet=output.quiet) as progress:
        signals.embedded = embedded
        store = open_store(settings.effective_store_url, settings.s3)
        _say_settings(chosen, store, progress)
        if spec.card.engine == "native":
            # Such a model takes longer to open than most inputs take to read.
            embedded.prepare(spec.spec.model)
        with closing(Ledger.of(settings)) as ledger:
            ledger.migrate()
            result = submit(settings, ledger, store, source, spec, options=options, progress=progress.reading)
            remember(result.job.id, settings.home)
            where = out_words(result.job.id, ledger.database.path)
            _explain(result.job, where, created=result.created, progress=progress)
            try:
                _restore(settings, ledger, store, result.job, source, progress)
                begun = ledger.status(result.job.id).items.done > 0
                status = _follow(ledger, result.job, where, embedded, progress, signals)
                if begun:
                    # A GPU has no room for the worker's model and another one.
                    embedded.stop(DRAIN_SECONDS)
                    _mend(ledger, store, result.job.id, where, progress)
                made = {kind: _folder(store, status.job, kind) for kind in ("audio", "text")}
                made["manifest"] = _manifest(ledger, store, status)
                made["report"] = _report(ledger, store, status, settings, progress)
                signals.cleaning = True
            except Interrupted:
                drain_seconds = settings.worker.drain_seconds
                progress.say(f"Stopping. Items in the engine have {drain_seconds:.0f} s to finish. Press Ctrl-C again to stop now.")
                embedded.stop(drain_seconds + 2)
                _say_resume(ledger, result.job.id, progress)
                raise
            finally:
                signals.cleaning = True
                embedded.stop(DRAIN_SECONDS)
    _summarize(status, settings, made, where, output)
    return exit_code_of(status.job.state)


def _say_settings(settings: Settings, store: ObjectStore, progress: Progress) -> None:
    """Says which settings of an installation apply here, and which do not."""
    if settings.store_url is not None:
        progress.say(f"The store is {redact(store.url)}, set by store_url ({settings.origin('store_url')}).")
    if settings.broker_url is not None:
        progress.say(f"broker_url ({settings.origin('broker_url')}) is not used: `nightjar run` has a broker of its own.")


def _explain(job: Job, where: str, *, created: bool, progress: Progress) -> None:
    if job.state is JobState.FAILED:
        raise no_items(job)
    if job.state is JobState.PAUSED:
        raise _paused(job, where)
    before = "" if created else ", done before" if job.state.final else ", begun before"
    if INPUT_FORMAT in job.labels:
        progress.say(f"The input is read as {WORDS[cast('InputFormat', job.labels[INPUT_FORMAT])]}.")
    progress.say(f"Job {job.id}: {counted(job.total_items, 'item')}, {counted(job.rejected_lines, 'line')} refused{before}.")


def _paused(job: Job, where: str) -> NightjarError:
    """`where`: what advice about the job adds to its id, as below."""
    reason = f" ({job.state_reason})" if job.state_reason else ""
    advice = f"See why with `nightjar errors {job.id}{where}`. Continue with `nightjar resume {job.id}{where}` and the same `nightjar run`."
    return ServiceError(ErrorCode.LEDGER_STATE, f"Job {job.id} is paused{reason}.", advice)


def _follow(ledger: Ledger, job: Job, where: str, embedded: EmbeddedHome, progress: Progress, signals: Signals) -> JobStatus:
    """Runs the job to its end. Raises `worker.crash`, `ledger.state` when it stands still because it is paused, and the
    error that a person has to mend, such as a full disk."""
    status = ledger.status(job.id)
    if status.job.state.final:
        return status
    for lost in embedded.lost_workers:
        ledger.lose_worker(*lost)
    _requeue(ledger)
    ledger.wake(job.id)
    started_at = ledger.now()
    embedded.start(job.spec.model)
    ended = status.items.done + status.items.failed
    written_at = time.monotonic()
    doubt_at = time.monotonic() + STALL_SECONDS
    while not status.job.state.final:
        time.sleep(POLL_SECONDS)
        signals.check()
        embedded.tend(lambda: _requeue(ledger), lambda host, pid: _forsake(ledger, host, pid), progress.say)
        status = ledger.status(job.id)
        progress.update(status)
        if status.items.done + status.items.failed > ended:
            ended = status.items.done + status.items.failed
            written_at = time.monotonic()
            doubt_at = time.monotonic() + STALL_SECONDS
        elif time.monotonic() > doubt_at:
            doubt_at = time.monotonic() + STALL_SECONDS
            progress.say(f"No item ended for {STALL_SECONDS:.0f} s. The worker's log is {embedded.worker_log}. {embedded.last_words()}")
        if status.job.state is JobState.PAUSED and not status.shards.get(ShardState.LEASED):
            raise _paused(status.job, where)
        outage = status.outage
        if outage is not None and outage.code in LASTING_OUTAGES and outage.at >= started_at:
            raise StoreError(outage.code, outage.message, "")
        if time.monotonic() - written_at > WRITE_SECONDS:
            # A worker that cannot write the ledger cannot report anything there.
            ledger.check_writable(job.id)
            written_at = time.monotonic()
    return status


def _requeue(ledger: Ledger) -> None:
    """The broker is empty: whatever was queued in another one's time is handed out again."""
    ledger.reconcile(queued_timeout_seconds=0)


def _forsake(ledger: Ledger, host: str, pid: int) -> None:
    """The worker is dead: its shards need not wait for the end of its leases."""
    ledger.lose_worker(host, pid)
    _requeue(ledger)


def _say_resume(ledger: Ledger, job_id: str, progress: Progress) -> None:
    items = ledger.status(job_id).items
    progress.say(f"Stopped after {items.done} of {items.total} items. Give the same command to continue.")


def _folder(store: ObjectStore, job: Job, kind: str) -> str | None:
    """Where the job's objects of a kind lie, or None where there are none."""
    folder = f"{job_prefix(job.id)}{kind}"
    return None if next(iter(store.list(f"{folder}/")), None) is None else store.uri(folder)


def _restore(settings: Settings, ledger: Ledger, store: ObjectStore, job: Job, source: str, progress: Progress) -> None:
    """Writes inputs of shards again that are gone or damaged. Raises `store.missing` where the file no longer has their lines."""
    from jobs.repair import lost_inputs, restore_inputs

    lost = lost_inputs(ledger, store, job)
    if lost:
        progress.say(f"Lost or damaged: {counted(len(lost), 'shard input')} of this job. They are written again.")
        restore_inputs(settings, ledger, store, job, source, lost)


def _mend(ledger: Ledger, store: ObjectStore, job_id: str, where: str, progress: Progress) -> None:
    """Looks whether what earlier runs made is there, and makes again what is not. Raises `store.missing` for what cannot be."""
    from jobs.repair import mend
    from jobs.verify import expected_objects, listed_faults
    from pipelines.registry import open_pipeline

    lost = [expected for expected, _ in listed_faults(store, expected_objects(ledger, job_id))]
    if not lost:
        return
    progress.say(f"Missing or damaged: {counted(len(lost), 'file')} of this job. They are made again.")
    job = ledger.job(job_id)
    with closing(open_pipeline(job.spec.model)) as pipeline:
        counts = mend(ledger, store, job, pipeline, lost)
    progress.say(f"Made again: {counts['same']} with the same bytes, {counts['other']} with other bytes.")
    if counts["failed"]:
        message = f"{counted(counts['failed'], 'file')} of job {job_id} could not be made again."
        raise StoreError(ErrorCode.STORE_MISSING, message, f"See why with: nightjar verify {job_id} --repair{where}")


def _manifest(ledger: Ledger, store: ObjectStore, status: JobStatus) -> str | None:
    """Writes the manifest of what the job has by now; where it is, or None for a job without audio."""
    from jobs.export.manifest import put_manifest

    return store.uri(put_manifest(ledger, store, status.job.id).key) if status.items.done else None


def _report(ledger: Ledger, store: ObjectStore, status: JobStatus, settings: Settings, progress: Progress) -> str | None:
    """Writes the report; where it is, or None for a page that could not be written: the job has ended all the same."""
    from jobs.cli.export import default_place
    from jobs.report import ReportOptions, write_report

    options = ReportOptions(price_per_gpu_hour=settings.price_per_gpu_hour)
    try:
        return write_report(ledger, store, status.job.id, default_place(settings, status.job.id), options).path
    except NightjarError as error:
        progress.say(f"The report was not written: {error}")
        return None


def _summarize(status: JobStatus, settings: Settings, made: Mapping[str, str | None], where: str, output: Output) -> None:
    """The status, and where what was made lies: only what is there."""
    job = status.job
    if output.as_json:
        output.data({**status_view(status, settings.price_per_gpu_hour), "schema": "nightjar.run/1", **made})
        return
    if output.quiet:
        output.line(job.id)
        return
    for line in status_lines(status, settings.price_per_gpu_hour):
        output.line(line)
    for word, place in (("files", made["audio"]), ("texts", made["text"]), ("list", made["manifest"]), ("report", made["report"])):
        if place is not None:
            output.line(f"{word:<8}{_near(place)}")
    if status.items.failed or job.rejected_lines:
        output.line(f"errors  nightjar errors {job.id}{where}")


def _near(place: str) -> str:
    """A path as seen from the working directory, where it is below it; an address as it is."""
    path = Path(place)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else place
