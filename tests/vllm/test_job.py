"""Jobs over a SparkTTS folder on a real vLLM: an engine core that is killed in the middle, and a second
worker on Redis."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm_kit import (
    GOLDEN,
    PATIENCE_SECONDS,
    core_pids,
    is_running,
    paused_core,
    require_vllm,
    wait_for_core,
    wide_checkpoint,
)

require_vllm()

from jobs.ingest import SubmitOptions, submit  # noqa: E402
from jobs.ledger.records import Job, JobSpec, JobState  # noqa: E402
from tests.support.worker_process import REPOSITORY, Site  # noqa: E402

ITEMS = 100
#: Of another job, for another worker.
FEWER = 40
WAVS = ("ref_a.wav", "ref_quiet.wav")
#: Settings of a worker whose engine takes half a minute to start.
PATIENT = {
    "SPEECH_ENGINE__KIND": "vllm",
    "NIGHTJAR_TIMES__LEASE_SECONDS": "20",
    "NIGHTJAR_TIMES__SHARD_ITEMS": "20",
    "NIGHTJAR_TIMES__QUEUED_TIMEOUT_SECONDS": "120",
}


@pytest.fixture
def site(tmp_path: Path, valkey_url: str) -> Iterator[Site]:
    with Site(tmp_path, valkey_url, **PATIENT) as site:
        yield site


def submit_items(site: Site, count: int = ITEMS) -> Job:
    """A new job of so many lines: created voices, clones, and clones that go on after the reference's
    text."""
    for wav in WAVS:
        shutil.copy(GOLDEN / "wavs" / wav, site.folder)
    path = site.folder / "input.jsonl"
    with path.open("w") as file:
        for n in range(count):
            messages = [["user", "text", f"This is line {n}, and it goes on for a while."]]
            generation = (
                {"voice": ("male/low/high", "female/moderate/very_low")[n % 2], "temperature": 0.0}
                if n % 3
                else {}
            )
            if n % 3 == 0:
                messages.insert(0, ["user", "audio", WAVS[n % 2]])
                generation = {"reference_text": "You can read this text aloud."} if n % 2 else {}
            file.write(
                json.dumps({"example_id": f"line-{n}", "messages": messages, "generation": generation}) + "\n"
            )
    spec = JobSpec(model=str(wide_checkpoint()), seed=7)
    return submit(
        site.settings,
        site.ledger,
        site.store,
        str(path),
        spec,
        options=SubmitOptions(idempotency_key=uuid.uuid4().hex),
    ).job


def start_worker(site: Site, *, compute_process: bool) -> subprocess.Popen[bytes]:
    """A worker whose engine core computes itself, or has the process that vLLM for CPUs computes in, which
    the other tests go without."""
    with site.log.open("ab") as log:
        command = [sys.executable, "-m", "worker", "run"]
        environment = (
            os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(compute_process))} | site.environment
        )
        worker = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
    site.processes.append(worker)
    return worker


def kill_in_the_middle(site: Site, worker: int) -> tuple[Job, int]:
    """A job whose engine core was killed when some of its items were made and some not, and the core."""
    while True:
        job = submit_items(site)
        site.wait_for(lambda job=job: site.status(job).items.done >= 5, PATIENCE_SECONDS)
        with paused_core(worker) as dead:
            # Nothing is made any more; where that was too late, the next job is as good.
            if site.status(job).items.done < ITEMS / 2:
                os.kill(dead, signal.SIGKILL)
                return job, dead
        site.wait_until_final(job, PATIENCE_SECONDS)


def audio(site: Site, job: Job) -> dict[str, bytes]:
    """The audio of every item, each of which has exactly one."""
    rows = list(site.ledger.items(job.id))
    keys = [row.artifact.key for row in rows if row.artifact is not None]
    assert len(set(keys)) == len(rows)
    assert {info.key for info in site.store.list(f"jobs/{job.id}/audio/")} == set(keys)
    return {row.example_id: site.store.get(row.artifact.key) for row in rows if row.artifact is not None}


def end(site: Site, worker: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Ends a worker, and sees that its engine core ends with it."""
    orphans = core_pids(worker.pid)
    assert orphans
    worker.send_signal(how)
    worker.wait()
    site.wait_for(lambda: not any(is_running(pid) for pid in orphans), PATIENCE_SECONDS)


def test_a_killed_engine_core_costs_no_item_and_another_worker_makes_the_same_speech(site: Site) -> None:
    first = start_worker(site, compute_process=True)
    job, dead = kill_in_the_middle(site, first.pid)
    second = start_worker(site, compute_process=False)
    state = site.wait_until_final(job, PATIENCE_SECONDS).job.state
    assert (state, site.ledger.error_counts(job.id)) == (JobState.COMPLETED, {})
    assert wait_for_core(first.pid, other_than=dead), "the worker itself must open the model again"
    killed = audio(site, job)
    assert len(killed) == ITEMS

    end(site, first, signal.SIGTERM)  # what it holds goes back at once
    again = submit_items(site, FEWER)
    assert site.wait_until_final(again, PATIENCE_SECONDS).job.state is JobState.COMPLETED
    made = audio(site, again)
    assert len(made) == FEWER
    assert made == {name: killed[name] for name in made}
    end(site, second, signal.SIGKILL)
    assert site.log_text().count('"event": "model opening"') == 3


def test_the_command_line_knows_the_folder(tmp_path: Path) -> None:
    def jobs(*arguments: str) -> subprocess.CompletedProcess[str]:
        places = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"SPEECH_HOME": str(tmp_path / "out"), "PYTHONPATH": places}
        command = [sys.executable, "-m", "jobs", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    model = str(wide_checkpoint())
    messages = [["user", "text", "Good morning, how are you today?"]]
    (tmp_path / "input.jsonl").write_text(json.dumps({"example_id": "a", "messages": messages}) + "\n")
    shown = jobs("models", model)
    assert shown.returncode == 0, shown.stderr
    facts = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert (facts["family"], facts["engines"], facts["sample_rate"]) == ("spark_tts", "native, vllm", "16000")
    bad = jobs("submit", "input.jsonl", "--model", model, "--voice", "robot")
    assert bad.returncode != 0
    assert "female/high/moderate" in bad.stderr
