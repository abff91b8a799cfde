"""`python -m benchmarks.filters [--items N ...] [--postgres URL]`: filters of items beside no filter, on
each ledger.

The ledger is made by the database from a series of numbers: items that are done, their artifacts, and a
draw with three scores for each. The scores are spread evenly over 0 to 1, so that `wer < 0.01` keeps 1 %.
Then: the time to the first page and the whole time of filters that keep 1, 50 and 99 %, beside the same
reading without a filter; what the scores take on disk; what they cost a commit. At the sizes of `--memory`
a loop over a job and an export run in processes of their own, whose peak memory is shown.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import sqlalchemy as sa

from benchmarks.figures import Figure, show, write
from benchmarks.jobs import REPOSITORY, new_database, peak_mb
from jobs.checks import Quality
from jobs.export import export
from jobs.ledger import Ledger, leases
from jobs.ledger.records import Artifact, Done, Draw, JobSpec, NewJob, NewShard, Score
from jobs.settings import Settings
from jobs.shard_file import compress, encode_lines
from jobs.store import open_store
from jobs.where import Where, parse_where

SHARD_ITEMS = 10_000
PACK_BYTES = 1000
#: Larger jobs are read whole only where a filter keeps few items.
WHOLE_ITEMS = 2_000_000
COMMIT_ITEMS, COMMITTED_SHARDS, COMMIT_SHARD_ITEMS, COMMIT_ROUNDS = 64, 12, 256, 5
#: The columns of a row of item `i`, as both databases write them.
_SPREAD = "((i * {0} + {1}) % 1000003) / 1000003.0"
_WER, _MOS, _PAUSE = (
    _SPREAD.format(48271, 11),
    f"1 + 4 * {_SPREAD.format(69621, 7)}",
    _SPREAD.format(39373, 5),
)
_NAME = {"sqlite": "printf('utterance-%09d', i)", "postgresql": "'utterance-' || lpad(i::text, 9, '0')"}
_SHA = {"sqlite": "printf('%064d', i)", "postgresql": "lpad(i::text, 64, '0')"}
_SERIES = {
    "sqlite": "(WITH RECURSIVE series(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM series WHERE i + 1 < {0}) SELECT i FROM series)",
    "postgresql": "(SELECT i::bigint AS i FROM generate_series(0, {0} - 1) AS series(i)) AS numbers",
}
_SCORES_OF_DRAW = {
    "sqlite": f"json_object('wer', json_array({_WER}, json('true'), ''), 'distillmos', json_array({_MOS}, json('true'), ''),"
    f" 'pause', json_array({_PAUSE}, json('true'), ''))",
    "postgresql": f"json_build_object('wer', json_build_array({_WER}, true, ''), 'distillmos', json_build_array({_MOS}, true, ''),"
    f" 'pause', json_build_array({_PAUSE}, true, ''))",
}
FILTERS = {
    "1 %": "wer < 0.01",
    "50 %": "wer < 0.5",
    "99 %": "wer < 0.99",
    "1 %, three scores": "wer < 0.01 and distillmos > 1.2 and pause < 0.95",
    "50 %, with or": "wer < 0.25 or distillmos > 3.6667",
}


def make_job(ledger: Ledger, store_root: Path, items: int, *, lines: bool) -> str:
    """A job of `items` items that are done, with all audio in one pack of a store, and there the `lines`
    of its shards; its id."""
    ledger.migrate()
    store = open_store(store_root)
    spec = JobSpec("instant", quality=Quality(meters={"asr": {}}), pack=True)
    job = ledger.begin_job(NewJob(spec, "spec", "input", "input", "key", store.url))
    pack = f"jobs/{job.id}/packs/000000-1-0-{'0' * 16}.tar"
    store.put(pack, bytes(PACK_BYTES))
    for number, first in enumerate(range(0, items, SHARD_ITEMS)):
        last, key, sha256 = (
            min(items, first + SHARD_ITEMS) - 1,
            f"jobs/{job.id}/input/{number:06d}.jsonl.zst",
            "",
        )
        if lines:
            data = compress(
                itertools.chain.from_iterable(
                    encode_lines(no, no + 1, _line(no), {}) for no in range(first, last + 1)
                )
            )
            sha256 = hashlib.sha256(data).hexdigest()
            store.put(key, data)
        count = last - first + 1
        _execute(
            ledger,
            "INSERT INTO shards (job_id, job_no, no, state, first_index, last_index, n_items, n_done, estimated_ms, input_key,"
            " input_sha256)"
            f" VALUES ('{job.id}', 1, {number}, 'done', {first}, {last}, {count}, {count}, 1, '{key}', '{sha256}')",
        )
    kind = ledger.database.engine.dialect.name
    series = _SERIES[kind].format(items)
    rows = {
        "items (job_no, idx, example_id, shard_no, state, attempts)": f"1, i, {_NAME[kind]}, i / {SHARD_ITEMS}, 1, 1",
        "artifacts (job_no, idx, kind, key, sha256, bytes, duration_ms, sample_rate, samples, seed, epoch, meta, made_at, pack,"
        " pack_offset)": (
            f"1, i, 'audio', 'jobs/{job.id}/audio/' || {_NAME[kind]} || '.wav', {_SHA[kind]}, 500, 10000, 24000, 240000, i, 1, '{{}}', 1.0,"
            f" '{pack}', 0"
        ),
        "draws (job_no, idx, draw, seed, kept, duration_ms, scores)": f"1, i, 0, i, {'1' if kind == 'sqlite' else 'true'}, 10000,"
        f" {_SCORES_OF_DRAW[kind]}",
        "scores (job_no, idx, draw, wer, distillmos, pause)": f"1, i, 0, {_WER}, {_MOS}, {_PAUSE}",
    }
    for table, values in rows.items():
        _execute(ledger, f"INSERT INTO {table} SELECT {values} FROM {series}")
    _execute(ledger, f"UPDATE jobs SET state = 'completed', total_items = {items}, finished_at = 1")
    if kind == "postgresql":
        with ledger.database.engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(sa.text("VACUUM ANALYZE"))
    else:
        _execute(ledger, "ANALYZE")
    return job.id


def _line(index: int) -> bytes:
    return json.dumps(
        {
            "example_id": f"utterance-{index:09d}",
            "messages": [["user", "text", "Four hours of steady work faced us."]],
        }
    ).encode()


def _execute(ledger: Ledger, statement: str) -> None:
    with ledger.database.engine.begin() as connection:
        connection.execute(sa.text(statement))


def sizes_mb(ledger: Ledger) -> tuple[float, float]:
    """MB of the ledger, and of its scores alone."""
    with ledger.database.engine.connect() as connection:
        if ledger.database.path is None:
            whole = connection.scalar(sa.text("SELECT pg_database_size(current_database())"))
            scores = connection.scalar(sa.text("SELECT pg_total_relation_size('scores')"))
            return float(whole or 0) / 1e6, float(scores or 0) / 1e6
        pages, size = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0 for name in ("page_count", "page_size")
        )
    # Not every SQLite can tell the pages of a table; so the scores are copied into a file of their own.
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "scores.sqlite"
        with closing(sqlite3.connect(copy)) as bare:
            bare.execute(
                "CREATE TABLE scores (job_no INTEGER, idx BIGINT, draw SMALLINT, wer DOUBLE, distillmos DOUBLE, pause DOUBLE,"
                " PRIMARY KEY (job_no, idx)) WITHOUT ROWID"
            )
            bare.execute("ATTACH ? AS ledger", [str(ledger.database.path)])
            bare.execute(
                "INSERT INTO scores SELECT job_no, idx, draw, wer, distillmos, pause FROM ledger.scores ORDER BY 1, 2"
            )
            bare.commit()
        return pages * size / 1e6, copy.stat().st_size / 1e6


def read_items(
    ledger: Ledger, job_id: str, where: Where | None, *, whole: bool = True
) -> tuple[float, float, int]:
    """(milliseconds to the first item, seconds to the last one, items) of reading a job's items; without
    `whole` only the first page."""
    start = time.perf_counter()
    rows = ledger.items(job_id, where=where)
    first = next(rows, None)
    first_ms = (time.perf_counter() - start) * 1000
    count = 0 if first is None else 1 + (sum(1 for _ in rows) if whole else 0)
    return first_ms, time.perf_counter() - start, count


def reading(url: str, job_id: str, items: int, name: str) -> list[Figure]:
    """The figures of each filter, beside those without one. Of a large job only filters that keep 1 % are
    read to the end."""
    figures: list[Figure] = []
    about = f"{items:,} items, {name}"
    with closing(Ledger.open(url)) as ledger:
        read_items(ledger, job_id, parse_where("wer < 0.001"))
        bare_ms, bare_seconds, count = read_items(ledger, job_id, None, whole=items <= WHOLE_ITEMS)
        figures.append(Figure(f"no filter, first page, {about}", bare_ms, "ms"))
        if count > 1:
            figures.append(Figure(f"no filter, all pages, {about}", bare_seconds, "s"))
        for share, text in FILTERS.items():
            whole = items <= WHOLE_ITEMS or share.startswith("1 %")
            first_ms, seconds, kept = read_items(ledger, job_id, parse_where(text), whole=whole)
            figures.append(
                Figure(f"keeps {share}, first page, {about}", first_ms, "ms", text, bare_ms, "no filter")
            )
            if whole:
                limit = bare_seconds if count > 1 else None
                figures.append(
                    Figure(
                        f"keeps {share}, all pages, {about}",
                        seconds,
                        "s",
                        f"{kept:,} items",
                        limit,
                        "no filter",
                    )
                )
        start = time.perf_counter()
        ledger.filtered_out(job_id, parse_where(FILTERS["1 %, three scores"]))
        figures.append(
            Figure(f"counts of what three conditions leave out, {about}", time.perf_counter() - start, "s")
        )
        whole_mb, scores_mb = sizes_mb(ledger)
        figures.append(
            Figure(
                f"scores on disk, {about}",
                scores_mb,
                "MB",
                "",
                whole_mb - scores_mb,
                "the rest of the ledger",
            )
        )
    return figures


def commits(url: str, name: str) -> list[Figure]:
    """Items a second of commits with and without rows in `scores`, taking turns; the median of the rounds."""
    with closing(Ledger.open(url)) as ledger:
        ledger.migrate()
        shards = 2 * COMMIT_ROUNDS * COMMITTED_SHARDS
        job = ledger.begin_job(NewJob(JobSpec("fake"), "spec", "input", "sha", "commits", "file:///store"))
        numbers = range(shards)
        ledger.stage(job.id, [_shard(no) for no in numbers], [], shards * COMMIT_SHARD_ITEMS)
        ledger.seal_job(job.id)
        real, seconds = leases.add_scores, {True: [], False: []}
        for turn in range(2 * COMMIT_ROUNDS):
            with_scores = turn % 2 == 0
            leases.add_scores = real if with_scores else lambda *_: None
            seconds[with_scores].append(sum(_commit_next(ledger) for _ in range(COMMITTED_SHARDS)))
        leases.add_scores = real
    rates = {
        kind: COMMITTED_SHARDS * COMMIT_SHARD_ITEMS / sorted(found)[COMMIT_ROUNDS // 2]
        for kind, found in seconds.items()
    }
    return [
        Figure(
            f"commits of items with six scores, {name}",
            rates[True],
            "items/s",
            "",
            rates[False],
            "without the table of scores",
        )
    ]


def _shard(no: int) -> NewShard:
    first = no * COMMIT_SHARD_ITEMS
    return NewShard(
        no,
        tuple((index, f"u{index}") for index in range(first, first + COMMIT_SHARD_ITEMS)),
        f"input/{no}",
        "0" * 64,
        1000,
    )


def _commit_next(ledger: Ledger) -> float:
    (ticket,) = ledger.take_ready(1)
    lease = ledger.claim(ticket, "worker", 600)
    assert lease is not None
    names = ("ended", "clipped", "silence", "pause", "loudness", "wer")
    made: list[Done] = []
    for index in lease.open_items:
        audio = Artifact(index, "audio", f"{index}.wav", "0" * 64, 480_000, 10_000, 24_000, 240_000, index)
        draw = Draw(0, index, None, True, 10_000, {name: Score(index % 97 / 97, True) for name in names})
        made.append(Done(index, (audio,), 20, (draw,)))
    start = time.perf_counter()
    for first in range(0, len(made), COMMIT_ITEMS):
        ledger.commit(lease.ticket, made[first : first + COMMIT_ITEMS])
    seconds = time.perf_counter() - start
    ledger.finish_shard(lease.ticket)
    return seconds


def memory(
    folder: Path, url: str, job_id: str, small: Sequence[float] | None, about: str
) -> tuple[list[Figure], list[float]]:
    """Seconds and peak memory of a loop over a job and of exports, each in a process of its own; `small`:
    MB at a tenth of the items."""
    figures: list[Figure] = []
    peaks: list[float] = []
    for number, (kind, text) in enumerate(
        (("loop", ""), ("export", ""), ("export", FILTERS["50 %"]), ("export", FILTERS["1 %"]))
    ):
        command = [
            sys.executable,
            "-m",
            "benchmarks.filters",
            "--child",
            kind,
            url,
            str(folder),
            job_id,
            text,
        ]
        done = json.loads(
            subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
        )
        what = "for item in job" if kind == "loop" else f"export --where '{text}'" if text else "export"
        peaks.append(done["rss_mb"])
        figures.append(Figure(f"{what}, {about}", done["seconds"], "s", f"{done['items']:,} items"))
        before = "" if small is None else f"{small[number]:.0f} at a tenth of the items"
        figures.append(Figure(f"{what}, memory, {about}", done["rss_mb"], "MB RSS", before))
    return figures, peaks


def child(kind: str, url: str, folder: str, job_id: str, text: str) -> None:
    """A loop over a job, or an export; prints its seconds, items and peak memory."""
    start = time.perf_counter()
    if kind == "loop":
        from nightjar.job import Job

        with closing(Ledger.open(url)) as ledger:
            row = replace(ledger.job(job_id), store_url=open_store(folder).url)
        job = Job(row, Settings.model_validate({"database_url": url}))
        items = sum(1 for _ in job)
        job.close()
    else:
        with closing(Ledger.open(url)) as ledger, tempfile.TemporaryDirectory() as to:
            where = parse_where(text) if text else None
            items = export(ledger, open_store(folder), job_id, "manifest", f"{to}/x.jsonl", where=where).items
    print(json.dumps({"seconds": time.perf_counter() - start, "items": items, "rss_mb": peak_mb()}))


def measure(
    folder: Path, sizes: Sequence[int], memory_items: int, postgres: str | None, *, with_commits: bool
) -> list[Figure]:
    figures: list[Figure] = []
    servers: list[tuple[str, Any]] = [("SQLite", lambda name: f"sqlite:///{folder}/{name}.sqlite")]
    if postgres is not None:
        servers.append(("PostgreSQL", lambda name: new_database(postgres, name)))
    for name, new_url in servers:
        if with_commits:
            figures += commits(new_url("commits"), name)
        for items in sizes:
            url = new_url(f"filters{items}")
            with closing(Ledger.open(url)) as ledger:
                job_id = make_job(ledger, folder / f"store-{name}-{items}", items, lines=False)
            found = reading(url, job_id, items, name)
            for figure in found:
                print(f"{figure.name}: {figure.value:,.1f} {figure.unit}", file=sys.stderr, flush=True)
            figures += found
    peaks: list[float] | None = None
    for items in (memory_items // 10, memory_items) if memory_items else ():
        url = f"sqlite:///{folder}/memory{items}.sqlite"
        with closing(Ledger.open(url)) as ledger:
            job_id = make_job(ledger, folder / f"store-{items}", items, lines=True)
        found, peaks = memory(folder / f"store-{items}", url, job_id, peaks, f"{items:,} items")
        figures += found
    figures.append(
        Figure(
            "load of the machine at the end",
            os.getloadavg()[0],
            "processes",
            f"{os.cpu_count()} cores; 1.0 is this benchmark alone",
        )
    )
    return figures


@click.command()
@click.option(
    "--items",
    "sizes",
    multiple=True,
    type=int,
    default=(1_000_000,),
    show_default=True,
    help="Items of a ledger.",
)
@click.option(
    "--memory",
    "memory_items",
    default=1_000_000,
    show_default=True,
    help="Items of the loop and the exports; 0: none.",
)
@click.option(
    "--postgres",
    envvar="BENCH_POSTGRES",
    metavar="URL",
    help="A PostgreSQL server; without it only SQLite is measured.",
)
@click.option(
    "--commits/--no-commits", "with_commits", default=True, show_default=True, help="Measure commits too."
)
@click.option("--name", default="filters", show_default=True, help="Name of the file of results.")
@click.option("--child", "of_child", nargs=5, hidden=True)
def main(
    sizes: tuple[int, ...],
    memory_items: int,
    postgres: str | None,
    with_commits: bool,
    name: str,
    of_child: tuple[str, str, str, str, str] | None,
) -> None:
    """Measures filters of items on this machine."""
    if of_child:
        child(*of_child)
        return
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-", ignore_cleanup_errors=True) as folder:
        figures = measure(Path(folder), sizes, memory_items, postgres, with_commits=with_commits)
    show("Filters on this machine", figures)
    write(name, figures)


if __name__ == "__main__":
    main()
