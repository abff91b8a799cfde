"""What the tests of the ledger share: small jobs, outcomes, and a hand on the database's clock."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import sqlalchemy as sa

from jobs.ledger import Ledger
from jobs.ledger.records import (
    Artifact,
    Done,
    Draw,
    Failed,
    ItemState,
    Job,
    JobSpec,
    Lease,
    NewJob,
    NewShard,
    Score,
    WorkerInfo,
)
from pipelines.errors import ErrorCode

LEASE_SECONDS = 3600.0

_keys = itertools.count()


def new_job(**changes: object) -> NewJob:
    values: dict = {
        "spec": JobSpec("fake"),
        "spec_sha": "spec",
        "input_uri": "input.jsonl",
        "input_sha256": "input",
        "idempotency_key": f"key-{next(_keys)}",
        "store_url": "file:///store",
        **changes,
    }
    return NewJob(**values)


def shards_of(sizes: Sequence[int], first: int = 0) -> list[NewShard]:
    """Shards of `sizes` items; item i is called `e<i>`."""
    shards, index = [], first
    for no, size in enumerate(sizes):
        items = tuple((i, f"e{i}") for i in range(index, index + size))
        shards.append(NewShard(no, items, f"input/{no}", f"sha-{no}", 1000 * size))
        index += size
    return shards


def submit(ledger: Ledger, sizes: Sequence[int] = (3,), **changes: object) -> Job:
    """A job that is ready, with shards of `sizes` items."""
    job = ledger.begin_job(new_job(**changes))
    ledger.stage(job.id, shards_of(sizes), [], sum(sizes))
    return ledger.seal_job(job.id)


def lease_next(ledger: Ledger, worker_id: str = "w1") -> Lease:
    """Dispatches one shard and claims it."""
    wake(ledger)
    (ticket,) = ledger.take_ready(1)
    lease = ledger.claim(ticket, worker_id, LEASE_SECONDS)
    assert lease is not None
    return lease


def done(index: int, seed: int = 7) -> Done:
    return Done(
        index,
        (
            Artifact(
                index,
                "audio",
                f"audio/{index}",
                f"sha-{index}",
                100,
                1500,
                24000,
                36000,
                seed,
                meta={"frames": 3},
            ),
        ),
        20,
    )


def measured(index: int, scores: Mapping[str, float | None], draw: int = 0, samples: int = 36000) -> Done:
    """As `done`, with checks that kept this draw and refused those before it, which had the same scores
    and one more."""
    audio = msgspec.structs.replace(done(index).artifacts[0], samples=samples)
    values = {name: Score(value) for name, value in scores.items()}
    refused = [
        Draw(no, no, ErrorCode.QA_WER, False, 1500, {**values, "refused": Score(1.0)}) for no in range(draw)
    ]
    return Done(index, (audio,), 20, (*refused, Draw(draw, 7, None, True, 1500, values)))


def failed(index: int, code: ErrorCode = ErrorCode.SYNTH_NO_EOS, message: str = "It went wrong.") -> Failed:
    return Failed(index, code, message, engine_ms=7)


def worker(worker_id: str = "w1", host: str = "here", slots: int = 2) -> WorkerInfo:
    return WorkerInfo(worker_id, host, 1, "", "fake", "1", slots)


def wake(ledger: Ledger) -> None:
    """Ends every backoff."""
    execute(ledger, "UPDATE shards SET not_before = NULL")


def expire(ledger: Ledger, lease: Lease) -> None:
    """Puts the end of a lease into the past."""
    execute(
        ledger,
        "UPDATE shards SET lease_until = 1 WHERE job_id = :job AND no = :no AND state = 'leased'",
        job=lease.job.id,
        no=lease.shard_no,
    )


def expire_leases_of_the_dead(ledger: Ledger) -> None:
    """Puts the end of every lease whose worker's process is gone into the past: tests of kills need no
    short leases, which a machine that stands still for a moment would end under the living."""
    for row in ledger.worker_statuses(include_ended=True):
        if not Path("/proc", str(row.pid)).exists():
            execute(
                ledger,
                "UPDATE shards SET lease_until = 1 WHERE state = 'leased' AND worker_id = :worker",
                worker=row.id,
            )


def execute(ledger: Ledger, statement: str, **values: object) -> None:
    with ledger.engine.begin() as connection:
        connection.execute(sa.text(statement), values)


def rows(ledger: Ledger, statement: str, **values: object) -> list[tuple]:
    with ledger.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(statement), values)]


def assert_exact(ledger: Ledger, job_id: str) -> None:
    """Counters of every shard equal the states of its items; done items have one audio artifact each,
    others none."""
    counted = rows(
        ledger,
        "SELECT shard_no, count(*), sum(CASE WHEN state = 1 THEN 1 ELSE 0 END), sum(CASE WHEN state IN (2, 3) THEN 1 ELSE 0 END),"
        " sum(CASE WHEN state = 4 THEN 1 ELSE 0 END) FROM items WHERE job_no = (SELECT no FROM jobs WHERE id = :job)"
        " GROUP BY shard_no ORDER BY shard_no",
        job=job_id,
    )
    kept = rows(
        ledger,
        "SELECT no, n_items, n_done, n_failed, n_skipped FROM shards WHERE job_id = :job AND n_items > 0 ORDER BY no",
        job=job_id,
    )
    assert kept == counted
    audio = rows(
        ledger,
        "SELECT idx FROM artifacts WHERE job_no = (SELECT no FROM jobs WHERE id = :job) AND kind = 'audio' ORDER BY idx",
        job=job_id,
    )
    assert audio == rows(
        ledger,
        "SELECT idx FROM items WHERE job_no = (SELECT no FROM jobs WHERE id = :job) AND state = 1 ORDER BY idx",
        job=job_id,
    )
    sums = rows(ledger, "SELECT sum(audio_ms), sum(bytes_out) FROM shards WHERE job_id = :job", job=job_id)
    assert sums == [(1500 * len(audio), 100 * len(audio))]


def states(ledger: Ledger, job_id: str) -> list[ItemState]:
    return [item.state for item in ledger.items(job_id)]


def outcomes_of_attempts(ledger: Ledger, job_id: str) -> list[tuple]:
    return rows(
        ledger,
        "SELECT shard_no, epoch, outcome, n_ok, n_failed FROM attempts WHERE job_id = :job ORDER BY epoch, shard_no",
        job=job_id,
    )
