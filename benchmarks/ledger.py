"""The ledger alone: staging items, and committing outcomes in micro-batches of 64. `python -m benchmarks.ledger [--items N]`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from benchmarks.figures import Figure, show, write
from jobs.ledger import Ledger
from jobs.ledger.records import Artifact, Done, JobSpec, NewJob, NewShard
from tests.support.services import Postgres

SHARD_ITEMS = 256
STAGE_ITEMS = 10_240
COMMIT_ITEMS = 64
COMMITTED_SHARDS = 40


def run(url: str, name: str, items: int) -> list[Figure]:
    """The figures of one database, which must be empty."""
    ledger = Ledger.open(url)
    ledger.migrate()
    job = ledger.begin_job(NewJob(JobSpec("fake"), "spec", "input", "sha", "key", "file:///store"))
    stage_seconds = sum(_stage(ledger, job.id, first, min(items, first + STAGE_ITEMS)) for first in range(0, items, STAGE_ITEMS))
    ledger.seal_job(job.id)
    commit_seconds = sum(_commit_next(ledger) for _ in range(COMMITTED_SHARDS))
    ledger.close()
    return [
        Figure(f"items staged, {name}", items / stage_seconds, "items/s", ">= 250,000" if name == "SQLite" else ">= 200,000"),
        Figure(f"items committed by {COMMIT_ITEMS}, one worker, {name}", COMMITTED_SHARDS * SHARD_ITEMS / commit_seconds, "items/s"),
    ]


def _stage(ledger: Ledger, job_id: str, first: int, end: int) -> float:
    shards = [
        NewShard(
            no=start // SHARD_ITEMS,
            items=tuple((index, f"utterance-{index:09d}") for index in range(start, min(end, start + SHARD_ITEMS))),
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
        Done(index, (Artifact(index, "audio", f"{index}.wav", "0" * 64, 480_000, 10_000, 24_000, 240_000, index),))
        for index in lease.open_items
    ]
    for first in range(0, len(outcomes), COMMIT_ITEMS):
        ledger.commit(lease.ticket, outcomes[first : first + COMMIT_ITEMS])
    ledger.finish_shard(lease.ticket)
    return time.perf_counter() - start_at


@click.command()
@click.option("--items", default=1_000_000, show_default=True, help="Items to stage.")
def main(items: int) -> None:
    """Measures the ledger on this machine."""
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        figures = run(f"sqlite:///{folder}/ledger.sqlite", "SQLite", items)
        postgres = Postgres(folder / "postgres")
        postgres.start()
        try:
            figures += run(postgres.create_database("ledger"), "PostgreSQL", items)
        finally:
            postgres.stop()
    show("The ledger on this machine", figures)
    write("ledger", figures)


if __name__ == "__main__":
    main()
