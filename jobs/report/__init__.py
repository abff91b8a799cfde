"""The report of a job: one HTML file that opens without a server and without a network."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, suppress
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import jinja2

from jobs import status as figures
from jobs.checks import CHECKS
from jobs.export.files import output
from jobs.export.items import minutes_by_voice
from jobs.formatting import bytes_text, printable, redact, seconds_text
from jobs.ledger import Ledger
from jobs.ledger.records import Job
from jobs.ledger.status import GAP_SECONDS, status_and_errors
from jobs.own_files import STATE_FOLDER, own_path
from jobs.report.charts import Chart, histogram, number, timeline
from jobs.report.sample import HEIGHT, PACE, WIDTH, Clips, Sample, take_sample
from jobs.settings import Settings
from jobs.store.base import ObjectStore
from pipelines.errors import NightjarError
from pipelines.registry import describe

SHOWN_ITEMS = 60
#: What the policy of a served page also allows.
_SERVED = "connect-src 'self'; "
MAX_VOICES = 5
#: With fewer leases, charts over time would mostly show items spread evenly over each lease.
MIN_LEASES = 4
#: Maximum number of refused lines that are searched for an example of each code.
_EXAMPLE_LINES = 1000


class ReportResult(NamedTuple):
    """A written report."""

    #: Absolute path.
    path: str
    bytes: int
    #: Items in the table, and items whose lengths and scores are in the histograms.
    shown: int
    measured: int


def default_place(settings: Settings, job_id: str) -> Path:
    """The default path of a job's report. Raises `store.forbidden` if it contains a symbolic link."""
    return own_path(settings.home.absolute() / "reports" / f"{job_id}.html")


def write_report(
    ledger: Ledger,
    store: ObjectStore,
    job_id: str,
    to: Path,
    *,
    items: int = SHOWN_ITEMS,
    embed: bool = False,
    served: bool = False,
    price_per_gpu_hour: float | None = None,
    open_file: Callable[[str], AbstractContextManager[IO[bytes]]] = output,
) -> ReportResult:
    """Writes the report of a job to the file `to`, complete or not at all. The report of a job that has
    ended has the same bytes each time.

    It reads all leases, but a bounded number of items, so that time and memory hardly grow with the job.
    `items`: rows of the table of items. `embed`: puts short clips into the page instead of links to the
    store's folder; audio in a bucket or in packs is always embedded. `served`: the page is that of a `ReportServer`,
    whose reader decides about items. Raises `config.invalid` for a file that
    cannot be written, `NotFoundError`, `StoreError`, `ServiceError`.
    """
    status, errors = ledger.read(status_and_errors, job_id)
    job = status.job
    busy = ledger.busy_spans([job_id])
    sample = take_sample(ledger, store, job, items, errors)
    chosen = sample.choose(items)
    scores = sample.scores()
    constant = {name: found[0] for name, found in scores.items() if len(found) > 1 and len({*found}) == 1}
    # The first refused lines are enough for an example of each common error.
    refused = [*islice(ledger.rejected_lines(job_id), _EXAMPLE_LINES)]
    examples = {line.code: f"line {line.line}: {line.message}" for line in reversed(refused)}
    examples |= {item.row.error_code: item.row.error_message for item in sample.failed}
    folder, _, name = redact(job.input_uri).rstrip("/").rpartition("/")
    page = _rendered(
        status=status,
        job=job,
        price=price_per_gpu_hour,
        # Empty for records from a Python program, whose file is named by its hash, and for standard input.
        input="" if folder.endswith(f"/{STATE_FOLDER}/inputs") else name.removeprefix("-"),
        voice=_voice(job, sample),
        work=timeline(ledger.attempts(job_id), busy[job_id]) if busy else None,
        histograms=_histograms(sample, constant),
        constant=constant,
        scores=scores,
        errors=[(code, count, examples.get(code) or "") for code, count in errors.items()],
        sample=sample,
        voices=minutes_by_voice(ledger, store, job) if job.spec.pool else {},
        items=chosen,
        # A player opens files, and audio in a pack has no file of its own.
        clips=Clips(store, to, embed=embed or job.spec.pack is True, served=served),
        served=served,
    )
    size = 0
    with open_file(str(to)) as file:
        for part in page:
            size += file.write(part.encode())
    return ReportResult(os.path.abspath(to), size, len(chosen), len(sample.done))


def _rendered(**page: Any) -> Iterable[str]:
    """The page in pieces. Every text is escaped. Styles and script are in the page, and its content security
    policy allows no others."""
    style = _asset("report.css")
    script = _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"{_SERVED * page['served']}media-src 'self' file: data:; base-uri 'none'; form-action 'none'"
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=number, seconds=seconds_text, bytes=bytes_text, clean=printable, redact=redact
    )
    environment.globals.update(
        figures=figures,
        PACE=PACE,
        GAP_SECONDS=GAP_SECONDS,
        MIN_LEASES=MIN_LEASES,
        WAVE_WIDTH=WIDTH,
        WAVE_HEIGHT=HEIGHT,
    )
    template = environment.from_string(_asset("report.html"))
    return template.generate(page, policy=policy, style=style, script=script)


def _asset(name: str) -> str:
    """A file of this package without its last newline, since the hash covers the text between the tags."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8").rstrip("\n")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _voice(job: Job, sample: Sample) -> str:
    """The voices that the sampled items request; if they request none, the only voice of the model."""
    asked = sorted({item.voice for item in (*sample.done, *sample.failed) if item.voice})
    if asked:
        more = len(asked) - MAX_VOICES
        return ", ".join(asked[:MAX_VOICES]) + (f" and {more} more" if more > 0 else "")
    # The model may be missing on this machine.
    with suppress(NightjarError):
        asked = describe(job.spec.model).capabilities.voices
    return asked[0] if len(asked) == 1 else "the model's own"


def _histograms(sample: Sample, constant: Collection[str]) -> list[Chart]:
    lengths = [item.seconds for item in sample.done if item.seconds is not None]
    found = [histogram("duration", "Length of an item", "s", lengths)]
    scores = sample.scores()
    for name in sorted(scores.keys() - constant, key=lambda name: (name != PACE, name)):
        title = "Pace: letters per second" if name == PACE else f"Score: {printable(name, 60)}"
        unit = CHECKS[name].unit if name in CHECKS else ""
        found.append(histogram(f"score-{len(found)}", title, unit, scores[name]))
    return [chart for chart in found if chart is not None]
