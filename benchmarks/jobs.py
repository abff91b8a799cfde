"""The job system's own cost: ingest, status, the ledger, the whole path around a free engine, and what a
run keeps of hibari.

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
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from benchmarks import instant
from benchmarks.figures import Figure
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import Artifact, Done, Job, JobSpec, NewJob, NewShard
from jobs.settings import load_settings
from jobs.store import open_store
from pipelines.audio import encode

if TYPE_CHECKING:
    from hibari import Hibari

REPOSITORY = Path(__file__).parents[1]
SHARD_ITEMS, STAGE_ITEMS, COMMIT_ITEMS, COMMITTED_SHARDS = 256, 10_240, 64, 40
#: Harvard sentences, lists 1 and 2.
SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It's easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "The hogs were fed chopped corn and garbage.",
    "Four hours of steady work faced us.",
    "A large size in stockings is hard to sell.",
    "The boy was there when the sun rose.",
    "A rod is used to catch pink salmon.",
    "The source of the huge river is the clear spring.",
    "Kick the ball straight and follow through.",
    "Help the woman get back to her feet.",
    "A pot of tea helps to pass the evening.",
    "Smoky fires lack flame and heat.",
    "The soft cushion broke the man's fall.",
    "The salt breeze came across from the sea.",
    "The girl at the booth sold fifty bonds.",
)


def write_lines(path: Path, count: int) -> None:
    """A file of `count` dialogues of about 200 bytes."""
    with path.open("w") as file:
        for number, text in enumerate(islice(cycle(SENTENCES), count)):
            messages = [
                ["system", "text", "Read it calmly."],
                ["user", "text", text],
                ["assistant", "audio", f"wav/{number}.wav"],
            ]
            file.write(json.dumps({"example_id": f"utterance-{number:09d}", "messages": messages}) + "\n")


def run_job(
    source: Path, home: Path, *options: str, environment: dict[str, str] | None = None
) -> tuple[dict[str, Any], Job]:
    """`nightjar run` over a file: what it printed, and the job in its ledger."""
    command = [sys.executable, "-m", "jobs", "run", str(source), "--out", str(home), "--json", *options]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    status = json.loads(done.stdout.splitlines()[-1])
    with closing(Ledger.open(f"sqlite:///{home}/.nightjar/ledger.sqlite")) as ledger:
        return status, ledger.job(status["job"])


def run_seconds(job: Job) -> float:
    """From the first claim of a shard to the end of the job."""
    if job.started_at is None or job.finished_at is None:
        raise RuntimeError(f"The job {job.id} has not ended.")
    return job.finished_at - job.started_at


def ingest(folder: Path, lines: int, postgres: str | None) -> list[Figure]:
    """Ingest of one file into each ledger, in a process of its own; then the status query at that size."""
    source = folder / "input.jsonl"
    write_lines(source, lines)
    figures: list[Figure] = []
    databases: list[tuple[str, str, str, Callable[[], float]]] = [
        (
            "SQLite",
            f"sqlite:///{folder}/ledger.sqlite",
            "150,000",
            lambda: _bare_sqlite(folder / "bare.sqlite", lines),
        )
    ]
    if postgres is not None:
        url, bare_url = new_database(postgres, "ingest"), new_database(postgres, "bare")
        databases.append(("PostgreSQL", url, "100,000", lambda: _bare_postgres(bare_url, lines)))
    for name, url, aim, bare in databases:
        command = [sys.executable, "-m", "benchmarks.jobs", url, str(folder / f"store-{name}"), str(source)]
        done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
        result = json.loads(done.stdout)
        limit = bare()
        figures += [
            Figure(
                f"ingest into {name}",
                lines / result["seconds"],
                "lines/s",
                f">= {aim}",
                limit,
                "bare insert of the item rows",
            ),
            Figure(f"ingest into {name}, memory", result["rss_mb"], "MB RSS", "<= 200"),
            Figure(f"status at {lines:,} items, {name}", _status_ms(url, result["job"]), "ms", "<= 50"),
        ]
    return figures


def ingest_once(url: str, store: str, source: str) -> dict[str, Any]:
    """Ingests one file: seconds, the most memory that this process held, and the job."""
    with closing(Ledger.open(url)) as ledger:
        ledger.migrate()
        start = time.perf_counter()
        result = submit(load_settings(), ledger, open_store(store), source, JobSpec(model="hibari"))
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "rss_mb": peak_mb(), "job": result.job.id}


def peak_mb() -> float:
    """Most memory this process ever held. Unlike `ru_maxrss` it does not begin with the memory of the
    parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


def new_database(server: str, name: str) -> str:
    """The URL of a new empty database of a PostgreSQL server."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{server.rpartition('/')[0]}/{name}"


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
            rows = [
                (1, index, f"utterance-{index:09d}") for index in range(first, min(first + 10_000, lines))
            ]
            with connection:
                connection.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
        return lines / (time.perf_counter() - start)


def _bare_postgres(url: str, lines: int) -> float:
    """Rows a second of COPY into a table with the items' keys."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE items (job INT, idx BIGINT, example_id TEXT, PRIMARY KEY (job, idx), UNIQUE (job, example_id))"
        )
        start = time.perf_counter()
        for first in range(0, lines, 10_000):
            with connection.cursor().copy("COPY items FROM STDIN") as copy:
                for index in range(first, min(first + 10_000, lines)):
                    copy.write_row((1, index, f"utterance-{index:09d}"))
        return lines / (time.perf_counter() - start)


def _status_ms(url: str, job: str) -> float:
    """Median milliseconds of the ledger's status call."""
    times: list[float] = []
    with closing(Ledger.open(url)) as ledger:
        for _ in range(21):
            start = time.perf_counter()
            ledger.status(job)
            times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def ledger_alone(url: str, name: str, items: int) -> list[Figure]:
    """Staging of items, and commits of outcomes in micro-batches, in an empty database."""
    with closing(Ledger.open(url)) as ledger:
        ledger.migrate()
        job = ledger.begin_job(NewJob(JobSpec("fake"), "spec", "input", "sha", "key", "file:///store"))
        stage_seconds = sum(
            _stage(ledger, job.id, first, min(items, first + STAGE_ITEMS))
            for first in range(0, items, STAGE_ITEMS)
        )
        ledger.seal_job(job.id)
        shards = min(COMMITTED_SHARDS, items // SHARD_ITEMS)
        commit_seconds = sum(_commit_next(ledger) for _ in range(shards))
    return [
        Figure(
            f"items staged, {name}",
            items / stage_seconds,
            "items/s",
            ">= 250,000" if name == "SQLite" else ">= 200,000",
        ),
        Figure(
            f"items committed by {COMMIT_ITEMS}, one worker, {name}",
            shards * SHARD_ITEMS / commit_seconds,
            "items/s",
        ),
    ]


def _stage(ledger: Ledger, job_id: str, first: int, end: int) -> float:
    shards = [
        NewShard(
            no=start // SHARD_ITEMS,
            items=tuple(
                (index, f"utterance-{index:09d}") for index in range(start, min(end, start + SHARD_ITEMS))
            ),
            input_key=f"jobs/{job_id}/input/{start // SHARD_ITEMS:06d}.jsonl.zst",
            input_sha256="0" * 64,
            estimated_ms=60_000,
        )
        for start in range(first, end, SHARD_ITEMS)
    ]
    start_at = time.perf_counter()
    ledger.stage(job_id, shards, [], end)
    return time.perf_counter() - start_at


def _commit_next(ledger: Ledger) -> float:
    """Seconds from claim to finish of one shard."""
    (ticket,) = ledger.take_ready(1)
    start_at = time.perf_counter()
    lease = ledger.claim(ticket, "worker", 60)
    assert lease is not None
    outcomes = [
        Done(
            index,
            (Artifact(index, "audio", f"{index}.wav", "0" * 64, 480_000, 10_000, 24_000, 240_000, index),),
        )
        for index in lease.open_items
    ]
    for first in range(0, len(outcomes), COMMIT_ITEMS):
        ledger.commit(lease.ticket, outcomes[first : first + COMMIT_ITEMS])
    ledger.finish_shard(lease.ticket)
    return time.perf_counter() - start_at


def whole_path(folder: Path, items: int, checks: str = "off") -> Figure:
    """Items a second from the first claim to the end of `nightjar run` with an engine that costs nothing,
    on SQLite and a folder.

    `checks`: the quality preset of the job; `python -m benchmarks.quality --path` tells what the default
    ones add.
    """
    source = folder / "path.jsonl"
    write_lines(source, items)
    voice = instant.install(folder / "voice")
    status, job = run_job(source, folder / "home", "--model", instant.NAME, "--qa", checks, environment=voice)
    assert status["items"]["done"] == items
    limit = _bare_writes(folder / "bare", items)
    return Figure(
        "whole path, free engine",
        items / run_seconds(job),
        "items/s",
        ">= 5,000",
        limit,
        "encode, hash and write, one thread",
    )


def _bare_writes(folder: Path, items: int) -> float:
    """Files a second of a loop that encodes, hashes and writes the same audio."""
    folder.mkdir()
    samples, start = instant.samples(), time.perf_counter()
    for index in range(items):
        data = encode(samples, instant.SAMPLE_RATE, "wav")
        hashlib.sha256(data).hexdigest()
        with io.FileIO(folder / f"{index}.wav", "xb") as file:
            file.write(data)
    return items / (time.perf_counter() - start)


def voice_share(folder: Path, sentences: int, bare_seconds: float = 15.0) -> Figure:
    """`nightjar run` with the embedded voice against the bare voice on as many threads, the bare one
    before and after."""
    from hibari import Hibari

    source = folder / "voice.jsonl"
    write_lines(source, sentences)
    voice, threads = Hibari(), len(os.sched_getaffinity(0))
    voice("Warm up.")
    before = _bare_rtfx(voice, threads, bare_seconds)
    status, job = run_job(source, folder / "voice-home")
    after = _bare_rtfx(voice, threads, bare_seconds)
    kept = status["audio_seconds"] / run_seconds(job)
    return Figure(
        "hibari through nightjar run",
        kept,
        "RTFx",
        ">= 90 % of bare",
        (before + after) / 2,
        f"bare hibari, {threads} threads",
    )


def _bare_rtfx(voice: Hibari, threads: int, seconds: float) -> float:
    """Audio seconds a second that `threads` make of separate sentences with one stock voice, and nothing
    else."""
    made = [0.0] * threads
    start = time.perf_counter()

    def work(number: int) -> None:
        for index, text in enumerate(cycle(SENTENCES)):
            if time.perf_counter() - start >= seconds:
                return
            made[number] += len(voice(text, seed=index)) / voice.sample_rate

    crew = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return sum(made) / (time.perf_counter() - start)


if __name__ == "__main__":
    print(json.dumps(ingest_once(*sys.argv[1:])))
