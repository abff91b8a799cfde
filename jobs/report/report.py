"""From a job to its report: what is measured, what is shown, and the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from jobs.checks import CHECKS
from jobs.dialogue import clean
from jobs.export.files import output
from jobs.formatting import bytes_text, redact, seconds_text
from jobs.ledger.location import STATE_FOLDER
from jobs.ledger.records import ItemState, Job, RejectedLine
from jobs.ledger.status import GAP_SECONDS, JobStatus
from jobs.own_files import own_path
from jobs.report.charts import Histogram, Lines, histogram, lines, number
from jobs.report.clips import Clip, Clips
from jobs.report.page import ErrorRow, Fact, Page, Row, render
from jobs.report.sample import MAX_MEASURED, PACE, Sample, SampleItem, take_sample
from jobs.report.timeline import (
    BINS,
    MIN_BINS,
    MIN_FOR_ETA,
    MIN_SPANS,
    EtaCheck,
    Timeline,
    WorkClock,
    checkpoints,
    eta_checks,
    spans_of_attempts,
    spans_of_commits,
    timeline,
)
from jobs.status import (
    busy_seconds,
    cost,
    cost_at_end,
    elapsed_seconds,
    eta_error_seconds,
    eta_seconds,
    items_per_second,
    rtfx,
    utc,
)
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, NightjarError
from pipelines.registry import describe

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings

SHOWN_ITEMS = 60
MAX_SHOWN_ITEMS = 500
MAX_VOICES = 5
_TEXT_CHARACTERS = 240
_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The choices of a person for a report."""

    #: Rows of the table of items.
    items: int = SHOWN_ITEMS
    #: Puts short clips into the page instead of links to the store's folder. Audio of a bucket or in packs is always embedded.
    embed: bool = False
    price_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True)
class ReportResult:
    """What was written."""

    #: Absolute path.
    path: str
    bytes: int
    #: Items in the table, and items whose lengths and scores are in the histograms.
    shown: int
    measured: int


def default_place(settings: Settings, job_id: str) -> Path:
    """Where the report of a job stands if nobody says otherwise. Raises `store.forbidden` for a link."""
    return own_path(settings.home.absolute() / "reports" / f"{job_id}.html")


def write_report(
    ledger: Ledger,
    store: ObjectStore,
    job_id: str,
    to: Path,
    options: ReportOptions | None = None,
    opened: Callable[[str], AbstractContextManager[IO[bytes]]] = output,
) -> ReportResult:
    """Writes the report of a job to the file `to`, complete or not at all; `opened` opens it. The report of a job that has ended
    has the same bytes each time.

    It reads a bounded number of items, so that time and memory do not grow with the job; leases are all read.
    Raises `config.invalid` for a file that cannot be written, `NotFoundError`, `StoreError`, `ServiceError`.
    """
    options = options or ReportOptions()
    status = ledger.status(job_id)
    errors = ledger.error_counts(job_id)
    sample = take_sample(ledger, store, status.job, min(options.items, MAX_SHOWN_ITEMS), errors)
    # A player opens files, and what is in a pack is none.
    clips = Clips(store, to, embed=options.embed or status.job.spec.pack is True)
    line = _timeline(ledger, status)
    checks = eta_checks(line) if line and status.job.state.final and line.spans >= MIN_FOR_ETA else []
    page = Page(
        job=status.job,
        name=clean(status.job.name or _input_name(status.job) or f"Job {status.job.id}", 200),
        input=clean(_input_name(status.job) or ("standard input" if status.job.input_uri == "-" else "records of a program"), 200),
        model=clean(status.job.spec.model, 300),
        voice=clean(_voice(status.job, sample), 200),
        reason=clean(redact(status.job.state_reason), _MESSAGE_CHARACTERS),
        state=status.job.state.value,
        at=utc(status.job.finished_at if status.job.state.final else status.now) or "",
        facts=_facts(status, options.price_per_gpu_hour),
        spans=line.spans if line else 0,
        charts=_charts(line, checks) if line and line.spans >= MIN_SPANS else [],
        eta_rows=_eta_rows(line, checks) if line else [],
        histograms=_histograms(sample),
        constant=[(clean(name, 60), number(values[0])) for name, values in sorted(sample.scores.items()) if _constant(values)],
        errors=[_error_row(ledger, status, code, count) for code, count in errors.items()],
        scores=sorted(name for name in sample.scores if name != PACE),
        rows=[_row(rank, item, clips) for rank, item in enumerate(sample.items, 1)],
        measured=sample.measured,
        whole=sample.whole,
        linked=clips.linked,
        source=clean(redact(status.job.input_uri), 300),
    )
    size = 0
    with opened(str(to)) as file:
        for part in render(page):
            data = part.encode()
            size += len(data)
            file.write(data)
    return ReportResult(os.path.abspath(to), size, len(sample.items), sample.measured)


def _input_name(job: Job) -> str:
    """The file's name without its folders; empty for standard input, and for the records of a program, whose file is named by its hash."""
    folder, _, name = redact(job.input_uri).rstrip("/").rpartition("/")
    return "" if folder.endswith(f"/{STATE_FOLDER}/inputs") else name.removeprefix("-")


def _voice(job: Job, sample: Sample) -> str:
    """The voices that the sampled items asked for. Where none did and the model has one voice: that one."""
    asked = sorted(sample.voices)
    if not asked:
        try:
            voices = describe(job.spec.model).capabilities.voices
        except NightjarError:
            # The model need not be on this machine.
            voices = ()
        return voices[0] if len(voices) == 1 else "the model's own"
    shown = ", ".join(asked[:MAX_VOICES])
    return shown if len(asked) <= MAX_VOICES else f"{shown} and {len(asked) - MAX_VOICES} more"


def _timeline(ledger: Ledger, status: JobStatus) -> Timeline | None:
    """The time in which workers held shards; None for a job that no worker has touched."""
    clock = WorkClock(ledger.worked_on(status.job.id))
    start = status.job.started_at
    if start is None or not clock.seconds:
        return None
    if status.job.total_items <= MAX_MEASURED:
        commits = ledger.commits(status.job.id)
        if all(commit.at is not None for commit in commits):
            bins = min(BINS, max(MIN_BINS, len(commits)))
            return timeline(clock.at_work(spans_of_commits(commits, start)), 0.0, clock.seconds, bins)
    return timeline(clock.at_work(spans_of_attempts(ledger.attempts(status.job.id))), 0.0, clock.seconds)


def _facts(status: JobStatus, price: float | None) -> list[Fact]:
    items, job = status.items, status.job
    factor, seconds, busy = rtfx(status), elapsed_seconds(status), busy_seconds(status)
    whole = "" if seconds - busy <= GAP_SECONDS else f"{seconds_text(seconds)} "
    open_or_skipped = [f"{count:,} {what}" for count, what in ((items.pending, "pending"), (items.skipped, "skipped")) if count]
    facts = [
        Fact("Items done", f"{items.done:,}", f"of {items.total:,}" + "".join(f", {text}" for text in open_or_skipped)),
        Fact("Items failed", f"{items.failed:,}", f"{items.failed / items.total:.2%} of all" if items.total else "", bad=items.failed > 0),
        Fact("Lines refused", f"{job.rejected_lines:,}", "of the input", bad=job.rejected_lines > 0),
        Fact(
            "Audio", f"{number(status.audio_ms / 3_600_000)} h", f"{seconds_text(status.audio_ms / 1000)}, {bytes_text(status.bytes_out)}"
        ),
        Fact("RTFx", "unknown" if factor is None else number(factor), "audio seconds per second"),
        Fact("Throughput", f"{number(items_per_second(status))}", "items a second"),
        Fact(
            "Time",
            seconds_text(busy if whole else seconds) if job.started_at else "not begun",
            (f"at work, {whole}" if whole else "") + "from the first claim" + ("" if job.state.final else " to now"),
        ),
        Fact("Engine time", f"{number(status.engine_ms / 1000)} s", "in which an engine had work"),
    ]
    spent, ahead = cost(status, price), cost_at_end(status, price)
    if spent is None:
        facts.append(Fact("Cost", "unknown", "set price_per_gpu_hour, or give --price"))
    else:
        more = "" if job.state.final or ahead is None else f", about {ahead:,.2f} at the end"
        facts.append(Fact("Cost", f"{spent:,.2f}", f"at {price:g} an engine hour{more}"))
    eta, error = eta_seconds(status), eta_error_seconds(status)
    if not job.state.final and eta is not None:
        facts.append(Fact("Time to go", seconds_text(eta), "" if error is None else f"give or take {seconds_text(error)} (95 %)"))
    return facts


def _charts(line: Timeline, checks: Sequence[EtaCheck]) -> list[Lines]:
    middles = [(index + 0.5) * line.step_seconds for index in range(len(line.items))]
    rates, factors = line.items_per_second, line.rtfx
    summary = f"Highest {number(max(rates))}, on average {number(sum(line.items) / line.seconds)} items a second."
    found = [lines("throughput", "Throughput", "items a second", list(zip(middles, rates)), line.seconds, summary)]
    summary = f"Highest {number(max(factors))}, on average {number(sum(line.audio_seconds) / line.seconds)} seconds of audio a second."
    found.append(lines("factor", "RTFx", "audio seconds per second", list(zip(middles, factors)), line.seconds, summary))
    if checks:
        said = [(check.at_seconds, check.said_seconds) for check in checks]
        was = [(check.at_seconds, check.was_seconds) for check in checks]
        # The first estimate, after one item, may be a hundred times too long and would flatten the rest of the chart.
        limit = 3 * line.seconds
        said = [(at, min(value, limit)) for at, value in said]
        errors = ", ".join(f"{_signed(check.error, 0)} at {share:.0%}" for share, check in checkpoints(checks, line.seconds))
        names = ("time to go as it was said", "time to go as it was")
        summary = f"Error of the ETA, as a share of the whole time: {errors} of it."
        found.append(lines("eta", "ETA against the truth", "s", said, line.seconds, summary, was, names))
    return [chart for chart in found if chart is not None]


def _eta_rows(line: Timeline, checks: Sequence[EtaCheck]) -> list[tuple[str, str, str, str]]:
    """(share of the time, said, was, error) at the checkpoints."""
    return [
        (f"{share:.0%}", seconds_text(check.said_seconds), seconds_text(check.was_seconds), _signed(check.error, 1))
        for share, check in checkpoints(checks, line.seconds)
    ]


def _signed(share: float, digits: int) -> str:
    """A share in percent with its sign; no sign where it rounds to zero."""
    rounded = round(100 * share, digits)
    return f"{rounded:+.{digits}f} %" if rounded else "0 %"


def _histograms(sample: Sample) -> list[Histogram]:
    found = [histogram("duration", "Length of an item", "s", sample.durations)]
    for index, (name, values) in enumerate(sorted(sample.scores.items(), key=lambda pair: (pair[0] != PACE, pair[0]))):
        if _constant(values):
            continue
        title = "Pace: letters a second" if name == PACE else f"Score: {clean(name, 60)}"
        found.append(histogram(f"score-{index}", title, CHECKS[name].unit if name in CHECKS else "", values))
    return [chart for chart in found if chart is not None]


def _constant(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) == max(values)


def _error_row(ledger: Ledger, status: JobStatus, code: ErrorCode, count: int) -> ErrorRow:
    """A code with one message as its example."""
    job_id = status.job.id
    example: RejectedLine | None = None
    message = ""
    for state in (ItemState.FAILED, ItemState.DEAD):
        for item in ledger.items(job_id, state=state, codes=[code], limit=1):
            message = message or item.error_message or ""
    if not message and code.value.startswith("input."):
        # Lines are read in order; the first ones show what is common.
        for index, line in enumerate(ledger.rejected_lines(job_id)):
            if line.code is code or index >= 1000:
                example = line if line.code is code else None
                break
        message = f"line {example.line}: {example.message}" if example else ""
    total = status.items.failed + status.job.rejected_lines
    return ErrorRow(code.value, count, count / total if total else 0.0, clean(redact(message), _MESSAGE_CHARACTERS), code.retryable)


def _row(rank: int, item: SampleItem, clips: Clips) -> Row:
    row = item.row
    clip = clips.clip(item.artifact) if item.artifact is not None else Clip(None, None)
    return Row(
        rank=rank,
        index=row.index,
        example_id=clean(row.id, 120),
        role=item.role,
        text=clean(item.text, _TEXT_CHARACTERS),
        state=row.state.value,
        why=clean(item.why, 200),
        code=row.error_code.value if row.error_code else "",
        message=clean(redact(row.error_message or ""), _MESSAGE_CHARACTERS),
        seconds=item.seconds,
        pace=item.values.get(PACE),
        scores={name: value for name, value in item.values.items() if name != PACE},
        refused=frozenset(item.refused),
        draws=_draw_texts(item),
        clip=clip,
    )


def _draw_texts(item: SampleItem) -> Sequence[str]:
    """One line for each draw if there was more than one."""
    if len(item.draws) < 2:
        return []
    return [
        f"draw {draw.draw}: {draw.code.value if draw.code else 'passed'}{', kept' if draw.kept else ''}, {draw.duration_ms / 1000:.2f} s"
        for draw in item.draws
    ]
