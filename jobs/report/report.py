"""The report of a job: what is measured, what is shown, and the file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import jinja2

from jobs import status as figures
from jobs.checks import CHECKS
from jobs.dialogue import clean
from jobs.export.files import output
from jobs.formatting import bytes_text, redact, seconds_text
from jobs.ledger.records import ItemState, Job
from jobs.ledger.status import GAP_SECONDS, JobStatus
from jobs.own_files import STATE_FOLDER, own_path
from jobs.report import clips
from jobs.report.charts import (
    BINS,
    MIN_BINS,
    MIN_FOR_ETA,
    MIN_SPANS,
    Chart,
    Timeline,
    WorkClock,
    eta_checks,
    histogram,
    line,
    number,
    spans_of_attempts,
    spans_of_commits,
    timeline,
)
from jobs.report.clips import Clips
from jobs.report.sample import MAX_MEASURED, PACE, Sample, take_sample
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, NightjarError
from pipelines.registry import describe

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings

SHOWN_ITEMS = 60
MAX_SHOWN_ITEMS = 500
MAX_VOICES = 5
#: Refused lines that are looked through for an example of a code.
_EXAMPLE_LINES = 1000


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The choices of a person for a report."""

    #: Rows of the table of items.
    items: int = SHOWN_ITEMS
    #: Puts short clips into the page instead of links to the store's folder. Audio of a bucket or in packs is
    #: always embedded.
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
    """Writes the report of a job to the file `to`, complete or not at all; `opened` opens it. The report
    of a job that has ended has the same bytes each time.

    It reads a bounded number of items, so that time and memory do not grow with the job; leases are all read.
    Raises `config.invalid` for a file that cannot be written, `NotFoundError`, `StoreError`, `ServiceError`.
    """
    options = options or ReportOptions()
    status = ledger.status(job_id)
    job, errors = status.job, ledger.error_counts(job_id)
    sample = take_sample(ledger, store, job, min(options.items, MAX_SHOWN_ITEMS), errors)
    # A player opens files, and what is in a pack is none.
    sounds = Clips(store, to, embed=options.embed or job.spec.pack is True)
    work = _timeline(ledger, status)
    spans = work.spans if work else 0
    constant = {name: values[0] for name, values in sorted(sample.scores.items()) if _constant(values)}
    page = {
        "status": status,
        "job": job,
        "figures": figures,
        "GAP_SECONDS": GAP_SECONDS,
        "price": options.price_per_gpu_hour,
        "name": job.name or _input_name(job) or f"Job {job.id}",
        "input": _input_name(job) or ("standard input" if job.input_uri == "-" else "records of a program"),
        "voice": _voice(job, sample),
        "spans": spans,
        "timeline": [*_charts(work)] if work and spans >= MIN_SPANS else [],
        "checks": eta_checks(work) if work and job.state.final and spans >= MIN_FOR_ETA else [],
        "histograms": _histograms(sample, constant),
        "constant": constant,
        "errors": [(code, count, _example(ledger, job.id, code)) for code, count in errors.items()],
        "sample": sample,
        "rows": ((item, item.artifact and sounds.clip(item.artifact)) for item in sample.items),
        "linked": sounds.linked,
    }
    size = 0
    with opened(str(to)) as file:
        for part in render(page):
            data = part.encode()
            size += len(data)
            file.write(data)
    return ReportResult(os.path.abspath(to), size, len(sample.items), sample.measured)


def render(page: Mapping[str, Any]) -> Iterable[str]:
    """The page in pieces. Every text is escaped; styles and script are in the page, and its policy allows
    only these."""
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "media-src 'self' file: data:; base-uri 'none'; form-action 'none'"
    )
    return _template().generate(page, policy=policy, style=style, script=script, pictures=clips, PACE=PACE)


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named = {"number": number, "seconds": seconds_text, "bytes": bytes_text, "signed": _signed}
    environment.filters |= {**named, "clean": clean, "redact": redact}
    return environment.get_template("report.html")


def _asset(name: str) -> str:
    """A file of this package, without its last newline: the hash is of the text between the tags."""
    return files("jobs.report").joinpath(name).read_text(encoding="utf-8").rstrip("\n")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _input_name(job: Job) -> str:
    """The file's name without its folders; empty for standard input, and for the records of a program,
    whose file is named by its hash."""
    folder, _, name = redact(job.input_uri).rstrip("/").rpartition("/")
    return "" if folder.endswith(f"/{STATE_FOLDER}/inputs") else name.removeprefix("-")


def _voice(job: Job, sample: Sample) -> str:
    """The voices that the sampled items asked for. Where none did and the model has one voice: that one."""
    asked = sorted(sample.voices)
    if not asked:
        # The model need not be on this machine.
        with suppress(NightjarError):
            asked = list(describe(job.spec.model).capabilities.voices)
        return asked[0] if len(asked) == 1 else "the model's own"
    more = len(asked) - MAX_VOICES
    return ", ".join(asked[:MAX_VOICES]) + (f" and {more} more" if more > 0 else "")


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
            return timeline(clock.at_work(spans_of_commits(commits, start)), clock.seconds, bins)
    return timeline(clock.at_work(spans_of_attempts(ledger.attempts(status.job.id))), clock.seconds)


def _charts(work: Timeline) -> Iterator[Chart]:
    for key, title, unit, values, words in (
        ("throughput", "Throughput", "items a second", work.items, "items a second"),
        ("factor", "RTFx", "audio seconds per second", work.audio_seconds, "seconds of audio a second"),
    ):
        highest, average = max(values) / work.step_seconds, sum(values) / work.seconds
        summary = f"Highest {number(highest)}, on average {number(average)} {words}."
        yield line(key, title, unit, work.seconds, summary, work.rates(values))


def _signed(share: float, digits: int) -> str:
    """A share in percent with its sign; no sign where it rounds to zero."""
    rounded = round(100 * share, digits)
    return f"{rounded:+.{digits}f} %" if rounded else "0 %"


def _histograms(sample: Sample, constant: Collection[str]) -> list[Chart]:
    found = [histogram("duration", "Length of an item", "s", sample.durations)]
    for index, name in enumerate(
        sorted(sample.scores.keys() - constant, key=lambda name: (name != PACE, name))
    ):
        title = "Pace: letters a second" if name == PACE else f"Score: {clean(name, 60)}"
        unit = CHECKS[name].unit if name in CHECKS else ""
        found.append(histogram(f"score-{index}", title, unit, sample.scores[name]))
    return [chart for chart in found if chart is not None]


def _constant(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) == max(values)


def _example(ledger: Ledger, job_id: str, code: ErrorCode) -> str:
    """One message of a code."""
    for state in (ItemState.FAILED, ItemState.DEAD):
        for item in ledger.items(job_id, state=state, codes=[code], limit=1):
            if item.error_message:
                return item.error_message
    # Lines are read in order; the first ones show what is common.
    refused = islice(ledger.rejected_lines(job_id) if code.value.startswith("input.") else (), _EXAMPLE_LINES)
    return next((f"line {line.line}: {line.message}" for line in refused if line.code is code), "")
