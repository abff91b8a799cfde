"""The job system's own cost: ingest, status, the whole path around a free engine, and what a run keeps of the embedded voice.

Every figure stands beside what this machine does for the bare work, measured in the same run.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path

import psycopg

from benchmarks.figures import Figure
from benchmarks.hibari import SENTENCES, bare_rate
from jobs.dispatch import Dispatcher
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec
from jobs.quality import Quality
from jobs.settings import load_settings
from jobs.store import open_store
from pipelines.audio import encode
from tests.support.fake_worker import register
from tests.support.fakes import SAMPLE_RATE, sine
from tests.support.services import Postgres, Valkey

REPOSITORY = Path(__file__).parents[1]


def write_lines(path: Path, count: int) -> None:
    """A file of `count` dialogues of about 200 bytes."""
    with path.open("w") as file:
        for number, text in enumerate(islice(cycle(SENTENCES), count)):
            messages = [["system", "text", "Read it calmly."], ["user", "text", text], ["assistant", "audio", f"wav/{number}.wav"]]
            file.write(json.dumps({"example_id": f"utterance-{number:09d}", "messages": messages}) + "\n")


def ingest(folder: Path, lines: int, postgres: Postgres) -> list[Figure]:
    """Ingest of one file into each ledger, in a process of its own; then the status query at that size."""
    source = folder / "input.jsonl"
    write_lines(source, lines)
    figures: list[Figure] = []
    databases: list[tuple[str, str, str, Callable[[], float]]] = [
        ("SQLite", f"sqlite:///{folder}/ledger.sqlite", "150,000", lambda: _bare_sqlite(folder / "bare.sqlite", lines)),
        ("PostgreSQL", postgres.create_database("ingest"), "100,000", lambda: _bare_postgres(postgres.create_database("bare"), lines)),
    ]
    for name, url, aim, bare in databases:
        command = [sys.executable, "-m", "benchmarks.ingest_once", url, str(folder / f"store-{name}"), str(source)]
        done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout)
        limit = bare()
        figures += [
            Figure(f"ingest into {name}", lines / result["seconds"], "lines/s", f">= {aim}", limit, "bare insert of the item rows"),
            Figure(f"ingest into {name}, memory", result["rss_mb"], "MB RSS", "<= 200"),
            Figure(f"status at {lines:,} items, {name}", _status_ms(url, result["job"]), "ms", "<= 50"),
        ]
    return figures


def _bare_sqlite(path: Path, lines: int) -> float:
    """Rows a second of the driver's executemany into a table with the items' keys."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(
            "CREATE TABLE items (job INT, idx INT, example_id TEXT, UNIQUE (job, example_id), PRIMARY KEY (job, idx)) WITHOUT ROWID"
        )
        start = time.perf_counter()
        for first in range(0, lines, 10_000):
            rows = [(1, index, f"utterance-{index:09d}") for index in range(first, min(first + 10_000, lines))]
            with connection:
                connection.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
        return lines / (time.perf_counter() - start)


def _bare_postgres(url: str, lines: int) -> float:
    """Rows a second of COPY into a table with the items' keys."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE items (job INT, idx BIGINT, example_id TEXT, PRIMARY KEY (job, idx), UNIQUE (job, example_id))")
        start = time.perf_counter()
        for first in range(0, lines, 10_000):
            with connection.cursor().copy("COPY items FROM STDIN") as copy:
                for index in range(first, min(first + 10_000, lines)):
                    copy.write_row((1, index, f"utterance-{index:09d}"))
        return lines / (time.perf_counter() - start)


def _status_ms(url: str, job: str) -> float:
    """Median milliseconds of the ledger's status call."""
    ledger = Ledger.open(url)
    times: list[float] = []
    for _ in range(21):
        start = time.perf_counter()
        ledger.status(job)
        times.append((time.perf_counter() - start) * 1000)
    ledger.close()
    return statistics.median(times)


def whole_path(folder: Path, items: int, quality: Quality | None = None) -> list[Figure]:
    """Items a second from the queue to the committed artifact with an engine that costs nothing, on SQLite and a folder.

    `quality`: checks of the job; None: none, `python -m benchmarks.quality --path` tells what the default ones add.
    """
    source = folder / "path.jsonl"
    write_lines(source, items)
    broker = Valkey(folder / "valkey")
    broker.start()
    environment = {"SPEECH_BROKER_URL": broker.url, "SPEECH_HOME": str(folder / "home"), "SPEECH_DISPATCH__INTERVAL_SECONDS": "0.5"}
    os.environ.update(environment)
    settings = load_settings()
    ledger = Ledger.open(settings.ledger_url)
    ledger.migrate()
    register()
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fake_worker", "run", "--model", "instant"], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    try:
        while not ledger.workers():
            time.sleep(0.1)
        spec = JobSpec(model="instant", quality=quality)
        job = submit(settings, ledger, open_store(settings.effective_store_url), str(source), spec).job.id
        start = time.perf_counter()
        Dispatcher(ledger, settings).run_once()
        while not ledger.status(job).job.state.final:
            time.sleep(0.05)
        seconds = time.perf_counter() - start
        assert ledger.status(job).items.done == items
    finally:
        worker.terminate()
        worker.wait()
        broker.stop()
        ledger.close()
        for name in environment:
            del os.environ[name]
    limit = _bare_writes(folder / "bare", items)
    return [Figure("whole path, free engine", items / seconds, "items/s", ">= 5,000", limit, "encode, hash and write, one thread")]


def _bare_writes(folder: Path, items: int) -> float:
    """Files a second of a loop that encodes, hashes and writes the same audio."""
    folder.mkdir()
    start = time.perf_counter()
    for index in range(items):
        data = encode(sine("instant", 7), SAMPLE_RATE, "wav")
        hashlib.sha256(data).hexdigest()
        with io.FileIO(folder / f"{index}.wav", "xb") as file:
            file.write(data)
    return items / (time.perf_counter() - start)


def voice_share(folder: Path, sentences: int) -> list[Figure]:
    """`nightjar run` with the embedded voice against the bare voice on as many threads, the bare one before and after."""
    from hibari import Hibari

    source = folder / "voice.jsonl"
    write_lines(source, sentences)
    voice, threads = Hibari(), len(os.sched_getaffinity(0))
    voice("Warm up.")
    before = bare_rate(voice, threads, 15.0)
    command = [sys.executable, "-m", "jobs", "run", str(source), "--out", str(folder / "voice"), "--json"]
    status = json.loads(subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout)
    after = bare_rate(voice, threads, 15.0)
    ledger = Ledger.open(f"sqlite:///{folder}/voice/.nightjar/ledger.sqlite")
    job = ledger.job(status["job"])
    ledger.close()
    assert job.started_at is not None
    assert job.finished_at is not None
    kept = status["audio_seconds"] / (job.finished_at - job.started_at)
    return [
        Figure(
            "hibari through nightjar run", kept, "x real time", ">= 90 % of bare", (before + after) / 2, f"bare hibari, {threads} threads"
        )
    ]
