"""Meters that measure the stored audio of a completed job, on any machine (`nightjar check`). Scores and verdicts land
in the ledger as if the meters had run during the job, except that no draw follows a failed one."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from msgspec import UNSET
from msgspec.structs import astuple, replace

from jobs.checks import CHECKS, METERS, Option, Quality, checks_of_codes, missing_meters
from jobs.export.audio import AudioReader
from jobs.export.items import TEXT, exported, item_metadata
from jobs.export.manifest import renew_manifest
from jobs.formatting import counted, printable
from jobs.job_options import asked_quality, checked_options
from jobs.ledger.decisions import Verdict
from jobs.ledger.queries import ShardEnds
from jobs.ledger.records import Artifact, Draw, ItemRow, Job
from jobs.ledger.status import MeasuredItems, measured_items
from jobs.packs import map_ahead
from jobs.provenance import put_checks
from jobs.recent_jobs import FoundJob
from jobs.references import load_reference
from jobs.shard_file import ShardLines
from jobs.spec import frozen_spec, is_sampled
from jobs.status import measured_text
from pipelines.audio import decode
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, InputError, NightjarError, StoreError, invalid
from pipelines.registry import describe
from pipelines.request import Speech
from worker.maintenance import PeriodicTask
from worker.quality.meters import Utterance
from worker.quality.process import MeterError, MeterPool, MeterTask
from worker.quality.verdict import judged

#: Items between two commits, for each process of meters.
ITEMS_AT_ONCE = 16
MAX_SECONDS = 24 * 3600.0
#: Pause before shards that another check measures are looked at again.
POLL_SECONDS = 0.5
#: Errors of the store that are not those of one item.
_OF_ALL_ITEMS = (ErrorCode.STORE_UNREACHABLE, ErrorCode.STORE_FULL)


@dataclass
class Checked:
    """The result of a check."""

    #: Items of the sample with audio, and those of them that were measured before.
    items: int = 0
    known: int = 0
    #: Code -> number of items that could not be measured.
    left: Counter[ErrorCode] = field(default_factory=Counter[ErrorCode])
    #: The items of the job that the meters have measured, now or before.
    measured: MeasuredItems = field(default_factory=MeasuredItems)

    @property
    def passed(self) -> bool:
        """Whether all items of the sample are measured, and no measured item is failed."""
        return not self.left and not self.measured.still_failed

    def __str__(self) -> str:
        if self.measured.items:
            return f"{measured_text(self.measured)}; {self.measured.still_failed} still fail"
        why = (
            "the meters have no score of any, or none with a bound"
            if self.items
            else "no item of the sample (--qa-sample) has audio"
        )
        return f"No item is measured: {'none could be' if self.left else why}."


def run_check(found: FoundJob, options: Mapping[str, Any], say: Callable[[str], None]) -> Checked:
    """Measures a job with meters in processes of their own. `options`: those of `CheckOptions`; none: the checks of the
    job. `say` is called with notes. Raises the errors of `checks_of`, `missing_meters` and `check_job`."""
    asked = checked_options(options)
    quality = checks_of(found.job, asked_quality(asked) if asked else None)
    if (missing := missing_meters(quality, say)) is not None:
        raise missing
    with closing(MeterPool(found.settings.worker.meter_processes)) as pool:
        return check_job(found, quality, pool, say)


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


def check_job(found: FoundJob, quality: Quality, pool: MeterPool, say: Callable[[str], object]) -> Checked:
    """Measures the done items of a job that these meters have not measured, shard by shard. Several processes may do so
    at once: each shard is measured by one of them. `say` is told which items are left and why.

    It can be killed at any time and called again. Raises `ServiceError` with `ledger.state` unless the job has
    completed, `ModelError` for a meter that cannot be opened, and the errors of the ledger and of an unreachable store.
    """
    ledger, job = found.ledger, found.job
    check, shards, waits = _Check(found, quality, pool, say), ledger.shard_ends(job.id), False
    # Refuses a job that runs.
    while ledger.commit_checks(job, ()) or (shards := [one for one in shards if not check.measured(one)]):
        if not waits:
            say(f"Another check of the job measures {counted(len(shards), 'shard')}. Waiting for it.")
        waits = True
        time.sleep(POLL_SECONDS)
    renew_manifest(ledger, found.store, job.id)
    result = check.result
    if result.known:
        say(
            f"Already measured, accepted, or kept after a failure, so the verdict stays: {counted(result.known, 'item')}."
        )
    if result.left:
        codes = ", ".join(f"{code.value}: {count}" for code, count in result.left.items())
        say(
            f"Not measured: {counted(result.left.total(), 'item')} ({codes}). Make lost audio again with `nightjar verify {job.id} --repair`, and repeat the check."
        )
    result.measured = ledger.read(measured_items, job, quality)
    return result


class _Check:
    """A check of a job by this process."""

    def __init__(
        self, found: FoundJob, quality: Quality, pool: MeterPool, say: Callable[[str], object]
    ) -> None:
        self._ledger, self._job, self._settings = found.ledger, found.job, found.settings
        self._quality, self._pool, self._say = quality, pool, say
        self._store, self._id, self.result = found.store, uuid.uuid4().hex, Checked()
        #: What is not in the ledger yet.
        self._verdicts = list[Verdict]()
        self._reader, self._lock = AudioReader(self._store), threading.Lock()
        self._lines = ShardLines(found.ledger, self._store, found.id)

    def measured(self, shard: ShardEnds) -> bool:
        """Measures the items of a shard. False: another check has it."""
        at_once = self._pool.processes * ITEMS_AT_ONCE
        threads = DaemonThreads(at_once, "check")
        try:
            with self._taken(shard.no) as taken, ExitStack() as ended:
                if rows := self._unmeasured(shard) if taken else []:
                    put_checks(self._store, self._job, self._quality)
                    # What was measured before an interruption is kept too.
                    ended.callback(self._commit)
                for _ in map_ahead(partial(threads.submit, self._measure), rows, at_once):
                    if len(self._verdicts) >= at_once:
                        self._commit()
        finally:
            # They wait for the pool, which is closed next.
            threads.shutdown(cancel_futures=True)
        return taken

    def _commit(self) -> None:
        made = self._verdicts.copy()
        self._ledger.commit_checks(self._job, made)
        del self._verdicts[: len(made)]

    @contextmanager
    def _taken(self, shard_no: int) -> Generator[bool]:
        """Takes a shard during the block. After the end of this process it is free again at the end of its lease."""
        times = self._settings.times
        take = partial(self._ledger.take_for_check, self._job.id, shard_no, self._id)
        lease = PeriodicTask("lease", times.heartbeat_seconds, partial(take, times.lease_seconds))
        if taken := take(times.lease_seconds):
            lease.start()
        try:
            yield taken
        finally:
            lease.stop()
            take(0.0)

    def _unmeasured(self, shard: ShardEnds) -> list[tuple[ItemRow, Draw | None]]:
        """The items of a shard that are in the sample and have a meter left, with the draws that made their audio."""
        job, count = self._job, shard.last_index - shard.first_index + 1
        rows = [
            row
            for row in exported(self._ledger.items(job.id, after=shard.first_index - 1, limit=count))
            if row.shard_no == shard.no and is_sampled(self._quality, job.spec.seed, row.example_id)
        ]
        kept = self._ledger.kept_draws(job.id, [row.index for row in rows])
        left = [(row, kept.get(row.index)) for row in rows if _left(self._quality, kept.get(row.index))]
        self.result.items += len(rows)
        self.result.known += len(rows) - len(left)
        return left

    def _measure(self, found: tuple[ItemRow, Draw | None]) -> None:
        """Adds the verdict on an item, unless it is left. Raises an error that is not that of one item."""
        (row, draw), job, quality = found, self._job, self._quality
        audio = cast("Artifact", row.artifact)
        number, seed, *_, before = astuple(draw) if draw else (0, audio.seed, {})
        try:
            with self._lock:
                line = self._lines.of(row)
            known = item_metadata(job, line)
            speech = Speech(*decode(self._reader.read(audio), max_seconds=MAX_SECONDS))
            written = self._ledger.artifacts_of(job.id, TEXT, [row.index]).get(row.index)
            text = self._reader.read(written).decode() if written else known.spoken_text
            recording = load_reference(self._store, job.id, known.recording) if known.recording else None
            utterance = Utterance(speech.samples, speech.sample_rate, text, known.language or "", recording)
            task = MeterTask(_left(quality, draw), utterance, item=row.id, bounds=quality.bounds)
            checked = judged(number, seed, speech, quality, self._pool.submit(task).result(), before)
        except (StoreError, InputError, MeterError) as error:
            if error.code in _OF_ALL_ITEMS:
                raise
            with self._lock:
                self.result.left[error.code] += 1
                self._say(f"Item {printable(row.id)} is left ({error.code.value}): {printable(str(error))}")
            return
        record = replace(checked.record, kept=checked.record.kept or quality.on_fail == "keep")
        self._verdicts.append((audio, draw, record, checked.message))


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
