"""A job on this machine, from its input to its report: ledger, broker, store and workers live in one
folder and die with the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from jobs.console import Interrupted
from jobs.embedded import DRAIN_SECONDS, EmbeddedHome
from jobs.formatting import counted, redact
from jobs.gpus import Device
from jobs.ingest import IngestProgress, SubmitOptions, check_wanted, submit
from jobs.input_format import WORDS
from jobs.layout import job_prefix
from jobs.ledger import Ledger
from jobs.ledger.records import INPUT_FORMAT, Job, JobState, ShardState
from jobs.ledger.states import LASTING_OUTAGES
from jobs.ledger.status import JobStatus
from jobs.own_files import full_disk_explained
from jobs.recent_jobs import out_words, remember
from jobs.settings import Settings
from jobs.spec import ResolvedSpec
from jobs.store import open_store
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, NightjarError, ServiceError, StoreError

if TYPE_CHECKING:
    from jobs.input_format import InputFormat
    from pipelines.registry import ModelCard

#: How often a run looks at its ledger and its processes.
POLL_SECONDS = 0.5
#: After so long without an item that ended, a run says where to look.
STALL_SECONDS = 60.0
#: After so long without an item that ended, a run makes sure that its ledger can still be written.
WRITE_SECONDS = 10.0
#: How often a run tries to report its end, and the pause in between.
REPORT_TRIES, REPORT_PAUSE_SECONDS = 3, 1.0


class RunEvents(Protocol):
    """What a run tells whoever started it, and asks of it."""

    def began(self, embedded: EmbeddedHome) -> None:
        """The home is held; its processes can be killed from here on."""

    def say(self, text: str, /) -> None:
        """A note for a person."""

    def reading(self, ingest: IngestProgress, /) -> None:
        """How far into its input the run is."""

    def submitted(self, job: Job, *, created: bool) -> None:
        """The job is in the ledger."""

    def update(self, status: JobStatus, /) -> None:
        """How far the job is."""

    def check(self) -> None:
        """Raises `Interrupted` where the run has to stop."""

    def ending(self) -> None:
        """From here on the run cleans up, and is not to be interrupted."""


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What is run, and where. Made by `local_run`."""

    #: As they were chosen, and as they are for a job in one folder.
    chosen: Settings
    settings: Settings
    source: str
    spec: ResolvedSpec
    options: SubmitOptions
    #: One worker runs for each; None: one as it is.
    devices: Sequence[Device] | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, and where what it made lies."""

    status: JobStatus
    #: Of `audio`, `text`, `manifest` and `report`; None for what there is not.
    made: Mapping[str, str | None]
    #: What advice about the job adds to its id.
    where: str


def run_locally(run: LocalRun, events: RunEvents) -> RunResult:
    """Makes a job of an input, or finds it, and runs it to its end. Interrupted, the same run goes on later.

    Raises `InputError` for an input without items, `Interrupted` as `events.check` does, and what a submit
    and the job's services raise.
    """
    settings, spec = run.settings, run.spec
    engine = settings.chosen_engine(spec.card)
    if spec.card.check_engine is not None:
        spec.card.check_engine(engine)
    with full_disk_explained(settings.home), EmbeddedHome(settings, run.devices) as embedded:
        events.began(embedded)
        store = open_store(settings.effective_store_url, settings.s3)
        _say_settings(run.chosen, spec.card, store, events)
        if engine == "native":
            # Such a model takes longer to open than most inputs take to read.
            embedded.prepare(spec.spec.model)
        with closing(Ledger.of(settings)) as ledger:
            ledger.migrate()
            result = submit(
                settings, ledger, store, run.source, spec, options=run.options, progress=events.reading
            )
            remember(result.job.id, settings.home)
            where = out_words(result.job.id, ledger.database.path)
            if result.job.state is JobState.FAILED:
                _report_ends(ledger, settings, events)
            _explain(result.job, where, created=result.created, events=events)
            if result.created:
                _say_begun_elsewhere(ledger, result.job, events)
            events.submitted(result.job, created=result.created)
            try:
                _restore(settings, ledger, store, result.job, run.source, events)
                begun = ledger.status(result.job.id).items.done > 0
                status = _follow(ledger, result.job, where, embedded, events)
                if begun:
                    # A GPU has no room for the worker's model and another one.
                    embedded.stop(DRAIN_SECONDS)
                    _mend(ledger, store, result.job.id, where, events)
                made = _when_there(lambda: _made(ledger, store, status), embedded, events)
                # The store may be elsewhere, and a report makes its folder.
                embedded.check_place()
                made["report"] = _report(ledger, store, status, settings, events)
                _report_ends(ledger, settings, events)
                events.ending()
            except (NightjarError, OSError):
                # Whatever fails first in a folder that is gone.
                embedded.check_place()
                raise
            except Interrupted:
                drain_seconds = settings.worker.drain_seconds
                events.say(
                    f"Stopping. Items in the engine have {drain_seconds:.0f} s to finish. Press Ctrl-C again to stop now."
                )
                embedded.stop(drain_seconds + 2)
                _say_resume(ledger, result.job.id, events)
                raise
            finally:
                events.ending()
                embedded.stop(DRAIN_SECONDS)
    return RunResult(status, made, where)


def _say_settings(settings: Settings, card: ModelCard, store: ObjectStore, events: RunEvents) -> None:
    """Says which settings of an installation apply here, and which do not."""
    if settings.store_url is not None:
        events.say(f"The store is {redact(store.url)}, set by store_url ({settings.origin('store_url')}).")
    if settings.broker_url is not None:
        events.say(
            f"broker_url ({settings.origin('broker_url')}) is not used: `nightjar run` has a broker of its own."
        )
    if unused := settings.unused(card):
        events.say(unused)


def _explain(job: Job, where: str, *, created: bool, events: RunEvents) -> None:
    check_wanted(job)
    if job.state is JobState.PAUSED:
        raise _paused(job, where)
    before = "" if created else ", done before" if job.state.final else ", begun before"
    if INPUT_FORMAT in job.labels:
        events.say(f"The input is read as {WORDS[cast('InputFormat', job.labels[INPUT_FORMAT])]}.")
    events.say(
        f"Job {job.id}: {counted(job.total_items, 'item')}, {counted(job.rejected_lines, 'line')} refused{before}."
    )


def _say_begun_elsewhere(ledger: Ledger, job: Job, events: RunEvents) -> None:
    """Names a job of the same input and options with another store that has not ended: it may be what was
    to go on."""
    for other in ledger.jobs_of_input(job.input_sha256, job.spec_sha):
        if other.store_url != job.store_url and not other.state.final:
            store = redact(other.store_url)
            begun = f"Job {other.id} of the same input and options was begun in the store {store}."
            events.say(f"{begun} SPEECH_STORE_URL={store} continues it.")


def _paused(job: Job, where: str) -> NightjarError:
    """`where`: what advice about the job adds to its id, as below."""
    reason = f" ({job.state_reason})" if job.state_reason else ""
    advice = f"See why with `nightjar errors {job.id}{where}`. Continue with `nightjar resume {job.id}{where}` and the same `nightjar run`."
    return ServiceError(ErrorCode.LEDGER_STATE, f"Job {job.id} is paused{reason}.", advice)


def _follow(ledger: Ledger, job: Job, where: str, embedded: EmbeddedHome, events: RunEvents) -> JobStatus:
    """Runs the job to its end. Raises `worker.crash`, `ledger.state` when it stands still because it is
    paused, and the error that a person has to mend, such as a full disk."""
    status = ledger.status(job.id)
    if status.job.state.final:
        return status
    for lost in embedded.lost_workers:
        ledger.lose_worker(*lost)
    requeue(ledger)
    ledger.wake(job.id)
    started_at = ledger.now()
    embedded.start(job.spec.model)
    ended = status.items.done + status.items.failed
    written_at = time.monotonic()
    doubt_at = time.monotonic() + STALL_SECONDS
    while not status.job.state.final:
        time.sleep(POLL_SECONDS)
        events.check()
        embedded.check_place()
        embedded.tend(lambda: requeue(ledger), lambda host, pid: forsake(ledger, host, pid), events.say)
        status = ledger.status(job.id)
        events.update(status)
        if status.items.done + status.items.failed > ended:
            ended = status.items.done + status.items.failed
            written_at = time.monotonic()
            doubt_at = time.monotonic() + STALL_SECONDS
        elif time.monotonic() > doubt_at:
            doubt_at = time.monotonic() + STALL_SECONDS
            events.say(
                f"No item ended for {STALL_SECONDS:.0f} s. The worker's log is {embedded.worker_log}. {embedded.last_words()}"
            )
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


def requeue(ledger: Ledger) -> None:
    """The broker is empty: whatever was queued in another one's time is handed out again."""
    ledger.reconcile(queued_timeout_seconds=0)


def forsake(ledger: Ledger, host: str, pid: int) -> None:
    """The worker is dead: its shards need not wait for the end of its leases."""
    ledger.lose_worker(host, pid)
    requeue(ledger)


def _say_resume(ledger: Ledger, job_id: str, events: RunEvents) -> None:
    items = ledger.status(job_id).items
    events.say(f"Stopped after {items.done} of {items.total} items. Give the same command to continue.")


def _when_there(
    made: Callable[[], dict[str, str | None]], embedded: EmbeddedHome, events: RunEvents
) -> dict[str, str | None]:
    """What `made` gives, once the store is there: a job that has ended is not left without its manifest."""
    said = False
    while True:
        try:
            return made()
        except StoreError as error:
            if error.code is not ErrorCode.STORE_UNREACHABLE:
                raise
            embedded.check_place()
            if not said:
                events.say(f"The manifest waits for the store. {error}")
                said = True
        time.sleep(POLL_SECONDS)
        events.check()


def _made(ledger: Ledger, store: ObjectStore, status: JobStatus) -> dict[str, str | None]:
    """Where the audio and the texts of the job lie, and its manifest, which is written here."""
    return {
        "audio": _folder(store, status.job, "audio"),
        "text": _folder(store, status.job, "text"),
        "manifest": _manifest(ledger, store, status),
    }


def _folder(store: ObjectStore, job: Job, kind: str) -> str | None:
    """Where the job's objects of a kind lie, or None where there are none."""
    folder = f"{job_prefix(job.id)}{kind}"
    return None if next(iter(store.list(f"{folder}/")), None) is None else store.uri(folder)


def _restore(
    settings: Settings, ledger: Ledger, store: ObjectStore, job: Job, source: str, events: RunEvents
) -> None:
    """Writes inputs of shards again that are gone or damaged. Raises `store.missing` where the file no
    longer has their lines."""
    from jobs.repair import restore_inputs
    from jobs.verify import ObjectCheck

    # They are few and small, so their content is compared.
    lost = [expected.key for expected, _ in ObjectCheck(ledger, store, job, kinds=("input",))]
    if lost:
        events.say(
            f"Lost or damaged: {counted(len(lost), 'shard input')} of this job. They are written again."
        )
        restore_inputs(settings, ledger, store, job, source, lost)


def _mend(ledger: Ledger, store: ObjectStore, job_id: str, where: str, events: RunEvents) -> None:
    """Looks whether what earlier runs made is there, and makes again what is not. Raises `store.missing`
    for what cannot be."""
    from jobs.provenance import mixed_engines, options_again, recorded_engines
    from jobs.repair import mend
    from jobs.verify import expected_objects, listed_faults
    from pipelines.registry import describe, open_pipeline

    lost = [expected for expected, _ in listed_faults(store, expected_objects(ledger, job_id))]
    if not lost:
        return
    events.say(f"Missing or damaged: {counted(len(lost), 'file')} of this job. They are made again.")
    job = ledger.job(job_id)
    if mixed := mixed_engines(recorded_engines(store, job), describe(job.spec.model).engine):
        events.say(mixed)
    with closing(open_pipeline(job.spec.model, **options_again(store, job))) as pipeline:
        counts = mend(ledger, store, job, pipeline, lost)
    events.say(f"Made again: {counts['same']} with the same bytes, {counts['other']} with other bytes.")
    if counts["failed"]:
        message = f"{counted(counts['failed'], 'file')} of job {job_id} could not be made again."
        raise StoreError(
            ErrorCode.STORE_MISSING, message, f"See why with: nightjar verify {job_id} --repair{where}"
        )


def _manifest(ledger: Ledger, store: ObjectStore, status: JobStatus) -> str | None:
    """Writes the manifest of what the job has by now; where it is, or None for a job without audio."""
    from jobs.export.manifest import put_manifest

    return store.uri(put_manifest(ledger, store, status.job.id).key) if status.items.done else None


def _report(
    ledger: Ledger, store: ObjectStore, status: JobStatus, settings: Settings, events: RunEvents
) -> str | None:
    """Writes the report; where it is, or None for a page that could not be written: the job has ended all
    the same."""
    from jobs.report import ReportOptions, default_place, write_report

    options = ReportOptions(price_per_gpu_hour=settings.price_per_gpu_hour)
    try:
        return write_report(
            ledger, store, status.job.id, default_place(settings, status.job.id), options
        ).path
    except NightjarError as error:
        events.say(f"The report was not written: {error}")
        return None


def _report_ends(ledger: Ledger, settings: Settings, events: RunEvents) -> None:
    """Tells the operator's hook of this end, and of those of this home that it does not know; a hook that
    fails holds up nothing."""
    from jobs.notification import report_ends_with_retries

    for one in report_ends_with_retries(ledger, settings, REPORT_TRIES, REPORT_PAUSE_SECONDS):
        again = "" if one.again_seconds is None else " The next run in this folder tries again."
        events.say(f"The end of job {one.job_id} was not reported: {one.reason}.{again}")
