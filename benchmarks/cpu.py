"""The figures that need no GPU.

    python -m benchmarks.cpu jobs [--postgres URL]  # the job system: ingest, status
    python -m benchmarks.cpu filters [--items N]    # filters of items beside no filter
    python -m benchmarks.cpu paces JOB              # speaking rates of a finished job's voices, as a quality configuration

The first two write `benchmarks/results/cpu.json` and `filters.json`. `python -m tests.support.services COMMAND` starts PostgreSQL,
without which its figures are left out. `python -m benchmarks.job --device cpu --instant 2` is a whole job with a voice that costs
nothing.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import numpy as np
import sqlalchemy as sa

from benchmarks.common import Row, commit, new_database, processor_name, table
from benchmarks.voices import SENTENCES
from jobs.checks import Quality
from jobs.export.items import AudioItem, audio_items, item_metadata
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import Job, JobSpec, NewJob
from jobs.recent_jobs import settings_for_job
from jobs.settings import load_settings
from jobs.store import open_store
from jobs.where import parse_where
from pipelines.duration import Pace, text_units
from pipelines.errors import ErrorCode, NotFoundError

if TYPE_CHECKING:
    from numpy.typing import NDArray

RESULTS = Path(__file__).parent / "results"
#: A filter that keeps 1 % of the items of `filters`, and one with three conditions that keeps as many.
FILTERS = {"1 %": "wer < 0.01", "1 %, three scores": "wer < 0.01 and distillmos > 1.2 and pause < 0.95"}
#: Larger jobs are read whole only where a filter keeps few items.
WHOLE_ITEMS = 2_000_000
#: The columns of a row of item `i` of `filters`, as both databases write them: scores that are spread evenly.
_SPREAD = "((i * {0} + {1}) % 1000003) / 1000003.0"
_SCORES = ", ".join(
    [_SPREAD.format(48271, 11), f"1 + 4 * {_SPREAD.format(69621, 7)}", _SPREAD.format(39373, 5)]
)
_SERIES = {
    "sqlite": "(WITH RECURSIVE series(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM series WHERE i + 1 < {0}) SELECT i FROM series)",
    "postgresql": "(SELECT i::bigint AS i FROM generate_series(0, {0} - 1) AS series(i)) AS numbers",
}
_NAME = {"sqlite": "printf('utterance-%09d', i)", "postgresql": "'utterance-' || lpad(i::text, 9, '0')"}
_SHA = {"sqlite": "printf('%064d', i)", "postgresql": "lpad(i::text, 64, '0')"}
#: A voice with fewer items has no pace of its own.
LEAST_ITEMS = 30
#: Of one voice; more items would change little and cost the square of their number.
MOST_ITEMS = 1000
#: The bounds leave out this share of the items at each end, and then widen by `_MARGIN`.
_TAIL, _MARGIN = 0.005, 0.15
#: Speech this many times too long or too short is a fault, not a slow voice.
_OUTLIER = 1.6

#: (hash, text's units, seconds)
_Length = tuple[bytes, float, float]


def figure(
    name: str, value: float, unit: str, aim: str = "", limit: float | None = None, of: str = ""
) -> Row:
    """One value. `limit` is what the machine does for the bare work `of` this name in the same run."""
    share = value / limit if limit else None
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "aim": aim,
        "limit": limit,
        "limit_name": of,
        "share": share,
    }


def report(name: str, figures: Sequence[Row]) -> None:
    """Prints figures as a table, and writes `results/<name>.json` with commit, device and date."""
    print(table(figures, ("name", "value", "unit", "aim", "limit", "limit_name", "share")))
    facts = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d}", "device": processor_name()}
    (RESULTS / f"{name}.json").write_text(json.dumps({**facts, "figures": figures}, indent=1) + "\n")


def write_lines(path: Path, count: int) -> None:
    """A file of `count` dialogues of about 200 bytes."""
    with path.open("w") as file:
        for number, text in enumerate(islice(cycle(SENTENCES), count)):
            system, audio = ["system", "text", "Read it calmly."], ["assistant", "audio", f"wav/{number}.wav"]
            messages = [system, ["user", "text", text], audio]
            file.write(json.dumps({"example_id": f"utterance-{number:09d}", "messages": messages}) + "\n")


def ingest(folder: Path, lines: int, postgres: str | None) -> list[Row]:
    """Ingest of one file into each ledger, in a process of its own; then the status query at that size."""
    source = folder / "input.jsonl"
    write_lines(source, lines)
    figures: list[Row] = []
    databases = {"SQLite": (f"sqlite:///{folder}/ledger.sqlite", "150,000")}
    if postgres is not None:
        databases["PostgreSQL"] = (new_database(postgres, "ingest"), "100,000")
    for name, (url, aim) in databases.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as processes:
            given = processes.submit(ingest_once, url, str(folder / name), str(source))
            seconds, megabytes, job = given.result()
        figures += [
            figure(f"ingest into {name}", lines / seconds, "lines/s", f">= {aim}"),
            figure(f"ingest into {name}, memory", megabytes, "MB RSS", "<= 200"),
            figure(f"status at {lines:,} items, {name}", _status_ms(url, job), "ms", "<= 50"),
        ]
    return figures


def ingest_once(url: str, store: str, source: str) -> tuple[float, float, str]:
    """Ingests one file. Seconds, the most MB that this process held, and the job."""
    with closing(Ledger(url)) as ledger:
        ledger.migrate()
        start = time.perf_counter()
        result = submit(load_settings(), ledger, open_store(store), source, JobSpec(model="hibari"))
        seconds = time.perf_counter() - start
    # Unlike `ru_maxrss` it does not begin with the memory of the parent.
    status = Path("/proc/self/status").read_text().splitlines()
    return (
        seconds,
        next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1000,
        result.job.id,
    )


def _status_ms(url: str, job: str) -> float:
    """Median milliseconds of the ledger's status call."""
    times: list[float] = []
    with closing(Ledger(url)) as ledger:
        for _ in range(21):
            start = time.perf_counter()
            ledger.status(job)
            times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def made_job(ledger: Ledger, items: int) -> str:
    """A job of `items` items that are done, made by the database from a series of numbers, with an artifact and three
    scores each; its id."""
    ledger.migrate()
    spec = JobSpec("instant", quality=Quality(meters={"asr": {}, "distillmos": {}}), pack=True)
    job = ledger.begin_job(NewJob(spec, "spec", "input", "input", "key", "file:///store"))
    kind = ledger.engine.dialect.name
    name, shard = _NAME[kind], 10_000
    artifact = "sha256, bytes, duration_ms, sample_rate, samples, seed, epoch, meta, made_at"
    values = f"{_SHA[kind]}, 500, 10000, 24000, 240000, i, 1, '{{}}', 1.0"
    rows = {
        "items (job_no, idx, example_id, shard_no, state, attempts)": f"1, i, {name}, i / {shard}, 1, 1",
        f"artifacts (job_no, idx, kind, key, {artifact})": f"1, i, 'audio', 'audio/' || {name}, {values}",
        "scores (job_no, idx, draw, wer, distillmos, pause)": f"1, i, 0, {_SCORES}",
    }
    shards = "shards (job_id, job_no, no, state, first_index, last_index, n_items, n_done, estimated_ms, input_key, input_sha256)"
    numbers = f"i, 'done', i * {shard}, (i + 1) * {shard} - 1, {shard}, {shard}, 1, 'key', ''"
    statements = [
        f"INSERT INTO {shards} SELECT '{job.id}', 1, {numbers} FROM {_SERIES[kind].format(-(-items // shard))}",
        *(
            f"INSERT INTO {into} SELECT {row} FROM {_SERIES[kind].format(items)}"
            for into, row in rows.items()
        ),
        f"UPDATE jobs SET state = 'completed', total_items = {items}, finished_at = 1",
        "ANALYZE",
    ]
    for statement in statements:
        with ledger.engine.begin() as connection:
            connection.execute(sa.text(statement))
    return job.id


def filter_figures(url: str, items: int, name: str) -> list[Row]:
    """The time to the first page and the whole time of each filter, beside those without one."""
    figures: list[Row] = []
    about = f"{items:,} items, {name}"
    with closing(Ledger(url)) as ledger:
        job_id = made_job(ledger, items)

        def read(text: str, whole: bool) -> tuple[float, float, int]:
            start = time.perf_counter()
            rows = ledger.items(job_id, where=parse_where(text) if text else None)
            first = next(rows, None)
            first_ms = (time.perf_counter() - start) * 1000
            count = int(first is not None) + (sum(1 for _ in rows) if whole else 0)
            return first_ms, time.perf_counter() - start, count

        read("wer < 0.001", True)
        bare_ms, bare_seconds, _ = read("", items <= WHOLE_ITEMS)
        figures.append(figure(f"no filter, first page, {about}", bare_ms, "ms"))
        bare = bare_seconds if items <= WHOLE_ITEMS else None
        for share, text in FILTERS.items():
            first_ms, seconds, kept = read(text, True)
            figures += [
                figure(f"keeps {share}, first page, {about}", first_ms, "ms", text, bare_ms, "no filter"),
                figure(
                    f"keeps {share}, all pages, {about}", seconds, "s", f"{kept:,} items", bare, "no filter"
                ),
            ]
    return figures


def learned_paces(job: Job, items: Iterable[AudioItem]) -> tuple[Pace, ...]:
    """The paces of the voices and languages of a job with these items: those with most items first, and last
    one for all others.

    Items are chosen by a hash of their id, so the same job gives the same paces. Raises `NotFoundError`
    for a job with fewer than `LEAST_ITEMS` finished items that have a text.
    """
    lengths: dict[tuple[str, str], list[_Length]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for item in items:
        known = item_metadata(job, item)
        if not (units := text_units(known.text)):
            continue
        length = (hashlib.blake2b(item.example_id.encode(), digest_size=8).digest(), units, item.seconds)
        for voice in {(known.voice or "", known.language or ""), ("", "")}:
            counts[voice] += 1
            heapq.heappush(lengths[voice], length)
            if len(lengths[voice]) > MOST_ITEMS:
                heapq.heappop(lengths[voice])
    if counts["", ""] < LEAST_ITEMS:
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Job {job.id} has {counts['', '']} finished items with a text; at least {LEAST_ITEMS} are needed.",
            "Measure a larger job of the same model.",
        )
    order = sorted(counts, key=lambda voice: (voice == ("", ""), -counts[voice], voice))
    return tuple([fit_pace(lengths[voice], *voice) for voice in order if counts[voice] >= LEAST_ITEMS])


def fit_pace(lengths: list[_Length], voice: str = "", language: str = "") -> Pace:
    """The pace of `lengths`: the line after Theil and Sen, drawn again without those that are
    `_OUTLIER` times off it."""
    units, seconds = np.array([length[1:] for length in sorted(lengths)]).T
    base, slope = _line(units, seconds)
    ratio = seconds / (base + slope * units)
    ratio = ratio / np.median(ratio)
    usual = (ratio < _OUTLIER) & (ratio > 1 / _OUTLIER)
    units, seconds = units[usual], seconds[usual]
    base, slope = _line(units, seconds)
    low, high = np.quantile(seconds / (base + slope * units), [_TAIL, 1 - _TAIL])
    return Pace(
        round(base, 4), round(slope, 6), round(float(low) * (1 - _MARGIN), 3), round(float(high) * (1 + _MARGIN), 3),
        voice=voice, language=language,
    )  # fmt: skip


def _line(units: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(base, slope), neither negative. `units`, `seconds`: [items]."""
    from scipy.stats import theilslopes

    if np.ptp(units) > 0:
        line: Any = theilslopes(seconds, units)
        slope, base = float(line[0]), float(line[1])
        if slope > 0 and base >= 0:
            return base, slope
    return 0.0, float(np.median(seconds / np.maximum(units, 1.0)))


def as_toml(paces: tuple[Pace, ...]) -> str:
    """The paces as a part of a quality config."""
    tables = [
        ["[[paces]]", *(f"{name} = {_toml(value)}" for name, value in msgspec.structs.asdict(pace).items())]
        for pace in paces
    ]
    return "\n\n".join("\n".join(table) for table in tables)


def _toml(value: str | float) -> str:
    """A value as TOML has it, which knows no surrogate pairs, and no DEL as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


POSTGRES = click.option("--postgres", envvar="BENCH_POSTGRES", help="As in postgresql://user@host/postgres.")


@click.group()
def main() -> None:
    """Measures Nightjar on this machine."""


@main.command()
@click.option("--lines", default=1_000_000, show_default=True, help="Lines of the ingest figures.")
@click.option("--name", default="cpu", show_default=True, help="Name of the file of results.")
@POSTGRES
def jobs(lines: int, name: str, postgres: str | None) -> None:
    """The job system's own cost."""
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as folder:
        report(name, ingest(Path(folder), lines, postgres))


@main.command()
@click.option(
    "--items", "sizes", multiple=True, type=int, default=[1_000_000], show_default=True, help="Of a ledger."
)
@click.option("--name", default="filters", show_default=True, help="Name of the file of results.")
@POSTGRES
def filters(sizes: tuple[int, ...], name: str, postgres: str | None) -> None:
    """Filters of items beside no filter, on each ledger."""
    figures: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as folder:
        for items in sizes:
            figures += filter_figures(f"sqlite:///{folder}/filters{items}.sqlite", items, "SQLite")
            if postgres is not None:
                figures += filter_figures(new_database(postgres, f"filters{items}"), items, "PostgreSQL")
    report(name, figures)


@main.command()
@click.argument("job")
@click.option("--home", metavar="DIR", help="Folder of the run that made the job.")
def paces(job: str, home: str | None) -> None:
    """Prints the paces of JOB, a finished job, as the `[[paces]]` of a quality configuration."""
    settings = settings_for_job(job, home)
    with closing(Ledger.of(settings)) as ledger:
        found = ledger.find_job(job)
        items = audio_items(ledger, open_store(found.store_url, settings.s3), found.id)
        click.echo(as_toml(learned_paces(found, items)))


if __name__ == "__main__":
    main()
