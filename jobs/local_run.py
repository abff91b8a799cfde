"""A job on this machine, from its input to its report, with ledger, broker, store and workers in one folder.
All processes of the job end with this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jobs.console import Interrupted, Stop
from jobs.embedded import DRAIN_SECONDS, EmbeddedHome
from jobs.formatting import counted, redact
from jobs.gpus import Device
from jobs.job_options import SubmitOptions
from jobs.layout import job_prefix
from jobs.ledger.records import INPUT_FORMAT, LASTING_OUTAGES, Job, JobState, ShardState
from jobs.ledger.status import JobStatus
from jobs.own_files import full_disk_explained
from jobs.progress import Progress
from jobs.recent_jobs import remember
from jobs.settings import Settings
from jobs.source import FORMAT_NAMES
from jobs.spec import ResolvedSpec
from jobs.store import open_store
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, NightjarError, ServiceError, StoreError

if TYPE_CHECKING:
    from jobs.ingest import IngestProgress
    from jobs.ledger import Ledger

#: Interval at which the ledger and the processes are checked.
POLL_SECONDS = 0.5
#: Time without an ended item, after which the user is pointed to the log.
STALL_SECONDS = 60.0
#: Time without an ended item, after which a check finds out whether the ledger can be written.
WRITE_SECONDS = 10.0


def run_locally(
    settings: Settings,
    source: str,
    spec: ResolvedSpec,
    options: SubmitOptions,
    devices: Sequence[Device] | None,
    progress: Progress,
    stop: Stop,
    submitted: Callable[[Job], None] = lambda job: None,
) -> tuple[JobStatus, dict[str, str | None]]:
    """Submits an input, or finds its job, and runs the job to its end. Returns the final status, and the places of
    `audio`, `codes`, `text`, `manifest` and `report` (None: there is none). After an interruption, the same call
    continues the job.

    One worker runs for each of `devices`; None: one worker on any device. `submitted` is called with the job once it
    is in the ledger. Raises `InputError` for an input without
    items, `Interrupted` once `stop` is requested, and the errors of a submit and of the job's services.
    """
    with full_disk_explained(settings.home), EmbeddedHome(settings, devices) as embedded:
        stop.kill = embedded.kill
        # The workers start first, since that and opening a model take longer than reading most inputs.
        embedded.prepare(spec.spec, spec.card.family if settings.chosen_engine(spec.card) == "native" else "")
        from jobs.ingest import submit
        from jobs.notification import say_ends

        ledger = embedded.ledger
        store = open_store(settings.effective_store_url, settings.s3)
        if settings.store_url is not None:
            progress.say(
                f"The store is {redact(store.url)}, set by store_url ({settings.origin('store_url')})."
            )
        if settings.broker_url is not None:
            progress.say(
                f"broker_url ({settings.origin('broker_url')}) is not used: `nightjar run` has its own broker."
            )

        def reading(ingest: IngestProgress) -> None:
            progress.reading(ingest)
            stop.check()

        def lost_inputs(job: Job) -> list[str]:
            from jobs.verify import ObjectCheck

            if job.state in (JobState.CANCELLED, JobState.PAUSED):
                return []  # `_explain` refuses the job
            # Inputs are few and small, so their content is compared.
            lost = [expected.key for expected, _ in ObjectCheck(ledger, store, job, kinds=("input",))]
            if lost:
                progress.say(
                    f"Lost or damaged: {counted(len(lost), 'shard input')} of this job. Rewriting them."
                )
            return lost

        ledger.migrate()
        result = submit(
            settings, ledger, store, source, spec, options=options, progress=reading, lost_inputs=lost_inputs
        )
        job = result.job
        remember(job.id, settings.home)
        if job.state is JobState.FAILED:
            say_ends(ledger, settings, progress.say)
        _explain(ledger, job, progress, created=result.created)
        submitted(job)
        try:
            was_started = ledger.status(job.id).items.done > 0
            status = _follow(ledger, job, embedded, progress, stop)
            if was_started:
                # The worker ends first, because a GPU may lack memory for a second model.
                embedded.stop(DRAIN_SECONDS)
                _repair(ledger, store, job.id, progress)
            places = _results(ledger, store, status, embedded, progress, stop)
            # The store may be outside the home, and the report would create a missing home again.
            embedded.check_place()
            places["report"] = _report(ledger, store, status, settings, progress)
            say_ends(ledger, settings, progress.say)
        except (NightjarError, OSError):
            # If the home is missing, that caused the other error.
            embedded.check_place()
            raise
        except Interrupted:
            embedded.drain(progress.say)
            items = ledger.status(job.id).items
            progress.say(
                f"Stopped after {items.done} of {items.total} items. Run the same command to continue."
            )
            raise
        finally:
            stop.cleaning = True
            embedded.stop(DRAIN_SECONDS)
    return status, places


def _explain(ledger: Ledger, job: Job, progress: Progress, *, created: bool) -> None:
    """Reports the job, and for a new one also unfinished jobs of the same input and options in other stores,
    which the user may have meant to continue."""
    from jobs.ingest import check_has_work

    check_has_work(job)
    if job.state is JobState.PAUSED:
        raise _paused(job)
    repeated = "" if created else ", already done" if job.state.final else ", already started"
    if INPUT_FORMAT in job.labels:
        progress.say(f"The input is read as {FORMAT_NAMES[job.labels[INPUT_FORMAT]]}.")
    progress.say(
        f"Job {job.id}: {counted(job.total_items, 'item')}, {counted(job.rejected_lines, 'line')} refused{repeated}."
    )
    for other in ledger.jobs_of_input(job.input_sha256, job.spec_sha) if created else ():
        if other.store_url != job.store_url and not other.state.final:
            store = redact(other.store_url)
            progress.say(
                f"Job {other.id} of the same input and options was started in the store {store}. SPEECH_STORE_URL={store} continues it."
            )


def _paused(job: Job) -> NightjarError:
    reason = f" ({job.state_reason})" if job.state_reason else ""
    return ServiceError(
        ErrorCode.LEDGER_STATE,
        f"Job {job.id} is paused{reason}.",
        f"See why with `nightjar errors {job.id}`. Continue with `nightjar resume {job.id}` and the same `nightjar run`.",
    )


def _follow(ledger: Ledger, job: Job, embedded: EmbeddedHome, progress: Progress, stop: Stop) -> JobStatus:
    """Runs the job to its end. Raises `worker.crash`, `ledger.state` for a paused job without leases, and errors
    that need the user, such as a full disk."""
    status = ledger.status(job.id)
    if status.job.state.final:
        return status
    started_at = ledger.now()
    embedded.start(progress.say, job)
    ended = status.items.ended
    written_at = progressed_at = time.monotonic()
    while not status.job.state.final:
        time.sleep(POLL_SECONDS)
        stop.check()
        embedded.poll()
        status = ledger.status(job.id)
        progress.update(status)
        now = time.monotonic()
        if status.items.ended > ended:
            ended = status.items.ended
            written_at = progressed_at = now
        elif now - progressed_at > STALL_SECONDS:
            progressed_at = now
            progress.say(
                f"No item ended for {STALL_SECONDS:.0f} s. The worker's log is {embedded.worker_log}."
            )
        if status.job.state is JobState.PAUSED and not status.shards.get(ShardState.LEASED):
            raise _paused(status.job)
        outage = status.outage
        if outage is not None and outage.code in LASTING_OUTAGES and outage.at >= started_at:
            raise StoreError(outage.code, outage.message, "")
        if now - written_at > WRITE_SECONDS:
            # A worker that cannot write the ledger cannot report that either.
            ledger.check_writable(job.id)
            written_at = now
    return status


def _results(
    ledger: Ledger,
    store: ObjectStore,
    status: JobStatus,
    embedded: EmbeddedHome,
    progress: Progress,
    stop: Stop,
) -> dict[str, str | None]:
    """The places of the job's audio, texts and manifest. Waits for the store, so that an ended job always has its
    manifest."""
    from jobs.export.manifest import put_manifest

    job_id = status.job.id
    reported = False
    while True:
        try:
            made: dict[str, str | None] = {}
            kinds = ("audio", "codes", "text") if status.job.spec.output else ("audio", "text")
            for kind in kinds:
                folder = f"{job_prefix(job_id)}{kind}"
                made[kind] = store.uri(folder) if any(True for _ in store.list(f"{folder}/")) else None
            manifest = put_manifest(ledger, store, job_id) if status.items.done else None
            return {**made, "manifest": manifest and store.uri(manifest.key)}
        except StoreError as error:
            if error.code is not ErrorCode.STORE_UNREACHABLE:
                raise
            embedded.check_place()
            if not reported:
                progress.say(f"The manifest waits for the store. {error}")
                reported = True
        time.sleep(POLL_SECONDS)
        stop.check()


def _repair(ledger: Ledger, store: ObjectStore, job_id: str, progress: Progress) -> None:
    """Checks that the results of earlier runs exist, and repairs missing ones. Raises `store.missing` if some
    cannot be repaired."""
    from jobs.provenance import reopened_model
    from jobs.repair import repair_objects
    from jobs.verify import expected_objects, listed_faults

    lost = [expected for expected, _ in listed_faults(store, expected_objects(ledger, job_id))]
    if not lost:
        return
    progress.say(f"Missing or damaged: {counted(len(lost), 'file')} of this job. Repairing them.")
    job = ledger.job(job_id)
    with reopened_model(store, job, progress.say) as pipeline:
        counts = repair_objects(ledger, store, job, pipeline, lost)
    progress.say(f"Repaired: {counts['same']} with the same bytes, {counts['other']} with other bytes.")
    if counts["failed"]:
        raise StoreError(
            ErrorCode.STORE_MISSING,
            f"{counted(counts['failed'], 'file')} of job {job_id} could not be repaired.",
            f"For the reasons run: nightjar verify {job_id} --repair",
        )


def _report(
    ledger: Ledger, store: ObjectStore, status: JobStatus, settings: Settings, progress: Progress
) -> str | None:
    """Writes the report; returns its place. None: it could not be written, which does not fail the run."""
    from jobs.report import default_place, write_report

    place = default_place(settings, status.job.id)
    try:
        return write_report(
            ledger, store, status.job.id, place, price_per_gpu_hour=settings.price_per_gpu_hour
        ).path
    except NightjarError as error:
        progress.say(f"The report was not written: {error}")
        return None
