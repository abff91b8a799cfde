"""Meters that measure the stored audio of a completed job, on any machine (`nightjar check`). Scores and verdicts land
in the ledger as if the meters had run during the job, except that no draw follows a failed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice

from msgspec import UNSET
from msgspec.structs import astuple, replace

from jobs.checks import CHECKS, METERS, Option, Quality, checks_of_codes
from jobs.export.audio import AudioReader
from jobs.export.items import AudioItem, audio_items, item_metadata
from jobs.export.manifest import put_manifest
from jobs.formatting import counted, printable
from jobs.ledger.decisions import Verdict
from jobs.ledger.records import Draw, Job
from jobs.recent_jobs import FoundJob
from jobs.references import load_reference
from jobs.spec import frozen_spec, is_sampled
from pipelines.audio import decode
from pipelines.errors import NightjarError, invalid
from pipelines.registry import describe
from pipelines.request import Speech
from worker.quality.meters import Readings, Utterance
from worker.quality.process import MeterError, MeterPool, MeterTask
from worker.quality.verdict import judged

#: Items between two commits, for each process of meters.
ITEMS_AT_ONCE = 8
MAX_SECONDS = 24 * 3600.0


def checks_of(job: Job, asked: Quality | None) -> Quality:
    """The checks that measure a job: those that are asked for, or its own without their sample. Raises `config.invalid`
    if they have no meter, for a job of codes alone, and for bounds that do not apply to its model."""
    own = job.spec.quality
    quality = asked or (own and replace(own, sample=UNSET))
    if not quality or not quality.costly:
        raise invalid("The checks have no meter, so they measure nothing.", "Give --qa strict.")
    if job.spec.output == "codes":
        quality = checks_of_codes(quality)
    # The model may not be installed here. Then the meters detect the language.
    card = None
    with suppress(NightjarError):
        card = describe(job.spec.model)
    if card:
        quality = frozen_spec(replace(job.spec, quality=quality), card).quality or quality
    # What happens to a failed item is the policy of the job.
    return replace(quality, on_fail=own.on_fail) if own else quality


def check_job(found: FoundJob, quality: Quality, pool: MeterPool, say: Callable[[str], object]) -> int:
    """Measures the done items of a job that these meters have not measured. Returns the number of items that are left
    because a meter failed, which `say` is told.

    It can be killed at any time and called again. Raises `ServiceError` with `ledger.state` unless the job has
    completed, `ModelError` for a meter that cannot be opened, and the errors of ledger and store.
    """
    ledger, job, store, left, known_before = found.ledger, found.job, found.store, 0, 0
    # Refuses a job that runs.
    ledger.commit_checks(job, ())

    def submitted(item: AudioItem, data: bytes) -> tuple[AudioItem, Speech, Future[Readings]]:
        known, speech = item_metadata(job, item), Speech(*decode(data, max_seconds=MAX_SECONDS))
        text, language, key = item.text_out or known.spoken_text, known.language or "", known.recording
        recording = load_reference(store, job.id, key) if key else None
        utterance = Utterance(speech.samples, speech.sample_rate, text, language, recording)
        task = MeterTask(_left(quality, item.draw), utterance, item=item.id, bounds=quality.bounds)
        return item, speech, pool.submit(task)

    def unmeasured() -> Iterator[AudioItem]:
        nonlocal known_before
        for item in audio_items(ledger, store, job.id):
            if is_sampled(quality, job.spec.seed, item.example_id):
                if _left(quality, item.draw):
                    yield item
                else:
                    known_before += 1

    loaded = AudioReader(store).loaded(unmeasured())
    count = ITEMS_AT_ONCE * found.settings.worker.meter_processes
    while some := [submitted(*one) for one in islice(loaded, count)]:
        verdicts: list[Verdict] = []
        for item, speech, measuring in some:
            number, seed, *_, before = astuple(item.draw) if item.draw else (0, item.artifact.seed, {})
            try:
                checked = judged(number, seed, speech, quality, measuring.result(), before)
            except MeterError as error:
                left += 1
                say(f"Item {printable(item.id)} is left: {printable(str(error))}")
                continue
            record = replace(checked.record, kept=checked.record.kept or quality.on_fail == "keep")
            verdicts.append((item.artifact, record, checked.message))
        ledger.commit_checks(job, verdicts)
    put_manifest(ledger, store, job.id)
    if known_before:
        say(f"Already measured, so the verdict stays: {counted(known_before, 'item')}.")
    return left


def _left(quality: Quality, draw: Draw | None) -> dict[str, dict[str, Option]]:
    """The meters that have not measured a draw; none if it failed and was kept."""
    if draw is None:
        return quality.costly
    ran = set[str]()
    for name, score in draw.scores.items():
        if (check := CHECKS.get(name)) is None:
            ran |= quality.meters.keys() - METERS.keys()
        elif check.meter is not None:
            # The detail of such a score names what measured it.
            ran.add(score.detail if check.replaced else check.meter.name)
    return {} if draw.code else {name: own for name, own in quality.costly.items() if name not in ran}
