"""One kind of bad luck at a time: stopped workers, wrong clocks, a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.ledger import Ledger
from jobs.ledger.records import ItemState
from tests.faults.cluster import REPOSITORY, Cluster, assert_exactly_once
from tests.support.ledger_kit import execute, rows


def sentences(count: int, suffix: str = "") -> dict[str, str]:
    return {f"item-{number}": f"Sentence number {number}.{suffix}" for number in range(count)}


def test_a_worker_that_wakes_after_its_lease_expired_writes_nothing(patient: Cluster) -> None:
    patient.end_worker(1)
    texts = {"first": patient.held("A sentence that lasts."), **sentences(600)}
    job = patient.submit(texts, max_attempts=50)
    stop_in_a_lease(patient, 0, job)
    before = patient.attempts(job)["expired"]
    execute(
        patient.ledger,
        "UPDATE shards SET lease_until = 1 WHERE job_id = :job AND lease_until IS NOT NULL",
        job=job,
    )
    patient.start_worker(1)
    deadline = time.monotonic() + 240
    while patient.attempts(job)["expired"] == before:
        assert time.monotonic() < deadline, patient.status(job)
        time.sleep(0.2)
    patient.let_go()
    patient.signal_worker(0, signal.SIGCONT)
    patient.wait(job, seconds=240)
    time.sleep(2)
    assert_exactly_once(patient, job, texts)


def stop_in_a_lease(cluster: Cluster, number: int, job: str) -> None:
    """Stops the only worker at a moment when it holds a shard, has made some of the job's items, and locks
    no row."""
    cluster.wait_for_done(job, 100)
    deadline = time.monotonic() + 240
    while True:
        cluster.signal_worker(number, signal.SIGSTOP)
        time.sleep(0.5)  # what it had sent to the database has arrived by now
        if cluster.leases(job) and not cluster.idle_transactions():
            return
        assert time.monotonic() < deadline, cluster.status(job)
        cluster.signal_worker(number, signal.SIGCONT)
        time.sleep(0.1)


def test_an_item_longer_than_its_lease_runs_once(patient: Cluster) -> None:
    texts = {**sentences(20), "slow": patient.held("A long sentence.")}
    job = patient.submit(texts)
    patient.wait_for_done(job, 20)
    lease_seconds = int(patient.timing["NIGHTJAR_TIMES__LEASE_SECONDS"])
    for _ in range(3):
        outlast(patient, job, lease_seconds * 2 / 3)
    patient.let_go()
    patient.wait(job, seconds=240)
    assert_exactly_once(patient, job, texts)
    assert patient.attempts(job) == {"done": 1}


def outlast(cluster: Cluster, job: str, seconds: float) -> None:
    """So much of the time of a job's leases is over at once; waits until their worker has extended them."""
    ends = "SELECT min(lease_until) FROM shards WHERE job_id = :job AND lease_until IS NOT NULL"
    ((before,),) = rows(cluster.ledger, ends, job=job)
    execute(
        cluster.ledger,
        "UPDATE shards SET lease_until = lease_until - :seconds WHERE job_id = :job",
        seconds=seconds,
        job=job,
    )
    deadline = time.monotonic() + 240
    while rows(cluster.ledger, ends, job=job)[0][0] <= before:
        assert time.monotonic() < deadline, cluster.status(job)
        time.sleep(0.1)


def test_wrong_clocks_of_workers_change_nothing(patient: Cluster) -> None:
    for number, skew in enumerate(("-7200", "7200")):
        patient.end_worker(number)
        patient.start_worker(number, NIGHTJAR_CLOCK_SKEW=skew)
    texts = sentences(400)
    job = patient.submit(texts)
    patient.wait(job, seconds=240)
    assert_exactly_once(patient, job, texts)
    assert set(patient.attempts(job)) == {"done"}


SMALL_DISK = """
mount -t tmpfs -o size=2m tmpfs "$1"
"$2" -m jobs run "$3" --out "$1/out" --quiet; echo "exit $?"
mount -o remount,size=64m "$1"
"$2" -m jobs run "$3" --out "$1/out" --quiet; echo "exit $?"
cp -r "$1/out" "$4"
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-Urm", "true"], check=False).returncode != 0,
    reason="this machine gives no user namespace to mount a small disk in",
)
def test_a_full_disk_is_said_and_the_job_goes_on_when_there_is_space(tmp_path: Path) -> None:
    text = "The lamp in the window burned all night. " * 3
    lines = [{"example_id": f"item-{n}", "messages": [["user", "text", text]]} for n in range(12)]
    source = tmp_path / "input.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    command = [
        "unshare",
        "-Urm",
        "sh",
        "-c",
        SMALL_DISK,
        "sh",
        str(disk),
        sys.executable,
        str(source),
        str(kept),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=dict(os.environ),
        timeout=540,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    exits = [line for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert exits[0] == "exit 5"
    assert "store.full" in done.stderr, done.stderr
    assert exits[1] == "exit 0", done.stderr
    ledger = Ledger(f"sqlite:///{kept}/.nightjar/ledger.sqlite")
    (job,) = ledger.jobs(10)
    rows = list(ledger.items(job.id))
    assert [row.state for row in rows] == [ItemState.DONE] * len(lines)
    for row in rows:
        assert row.artifact is not None
        assert hashlib.sha256((kept / row.artifact.key).read_bytes()).hexdigest() == row.artifact.sha256
