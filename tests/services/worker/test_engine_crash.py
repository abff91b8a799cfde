"""Engine processes, workers and supervisors that are killed: every item is made once, nobody innocent is
blamed, nothing stays behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.ingest import SubmitOptions
from jobs.ledger.records import ItemState, Job, ShardState
from pipelines.audio import encode
from pipelines.errors import ErrorCode
from tests.support.fakes import SAMPLE_RATE, sine
from tests.support.golden_checkpoint import whole
from tests.support.ledger_kit import expire_leases_of_the_dead, rows
from tests.support.native_plugin import NAME, installed
from tests.support.worker_process import REPOSITORY, Site, stop

CHECKPOINT = whole(REPOSITORY / "tests" / "golden" / "qwen3_tts" / "checkpoint-design")
#: Crashes that are no item's fault must not count as one.
MANY = SubmitOptions(max_attempts=50)
SEED = int(os.environ.get("NIGHTJAR_ENGINE_SEED", "18"))


@pytest.fixture
def site(tmp_path: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    plugin = installed(tmp_path / "plugin")
    monkeypatch.syspath_prepend(tmp_path / "plugin")
    quick = {"NIGHTJAR_TIMES__BACKOFF_SECONDS": "0.05", "NIGHTJAR_TIMES__RESTART_SECONDS": "0.5"}
    with Site(tmp_path, valkey_url, **quick, **plugin) as site:
        yield site
        # The workers end with the site; here the engines must have ended with their workers.
        for process in site.processes:
            process.kill()
            process.wait()
        site.wait_for(lambda: not engines_of(site), 60)


def engines_of(site: Site) -> list[int]:
    """The engine processes of the site's workers: what has its folder in the environment."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"jobs.engine_process" in command and f"SPEECH_HOME={site.folder}/".encode() in environment:
            found.append(int(folder.name))
    return found


def engine_of(site: Site) -> int:
    """The one engine process, once it is there."""
    site.wait_for(lambda: engines_of(site))
    return engines_of(site)[0]


def assert_made_once(site: Site, job: Job, texts: list[str]) -> None:
    """One artifact and one object for every item, with the bytes of a run without faults."""
    status = site.status(job)
    assert (status.items.total, status.items.done, status.items.failed) == (len(texts), len(texts), 0)
    items = list(site.ledger.items(job.id))
    assert [(row.index, row.state) for row in items] == [
        (index, ItemState.DONE) for index in range(len(texts))
    ]
    keys = {info.key for info in site.store.list(f"jobs/{job.id}/audio/")}
    assert keys == {row.artifact.key for row in items if row.artifact}
    for row in items:
        assert row.artifact is not None
        assert site.store.get(row.artifact.key) == encode(
            sine(texts[row.index], row.artifact.seed), SAMPLE_RATE, "wav"
        )
    assert status.audio_ms == sum(row.artifact.duration_ms for row in items if row.artifact)
    assert status.bytes_out == sum(row.artifact.bytes for row in items if row.artifact)
    assert rows(site.ledger, "SELECT count(*) FROM item_errors") == [(0,)]


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    return [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink()]


def test_an_engine_that_is_killed_at_any_time_costs_only_time(site: Site) -> None:
    chance = random.Random(SEED)
    texts = [f"text {n}" for n in range(400)]
    texts[0] = site.held("lasts")
    job = site.submit(texts, model=NAME, options=MANY)
    worker = site.worker(engine={"seconds": 0.02, "slots": 8})
    done = 0
    for _ in range(4):
        site.wait_for(lambda before=done: site.status(job).items.done > before + 5)
        time.sleep(chance.uniform(0.0, 0.3))
        os.kill(engine_of(site), signal.SIGKILL)
        done = site.status(job).items.done
    site.let_go()
    assert site.wait_until_final(job).items.done == len(texts)
    assert_made_once(site, job, texts)
    assert worker.poll() is None
    assert not [one for one in descriptors(worker.pid) if "memfd:nightjar" in one]
    assert stop(worker) == 0
    assert "Traceback" not in site.log_text()
    ends = [code for (code,) in rows(site.ledger, "SELECT error_code FROM attempts WHERE outcome = 'failed'")]
    assert set(ends) <= {ErrorCode.WORKER_CRASH, ErrorCode.MODEL_UNREACHABLE}
    assert ErrorCode.WORKER_CRASH in ends


def test_a_worker_that_is_killed_takes_its_engine_with_it(site: Site) -> None:
    texts = [f"text {n}" for n in range(120)]
    job = site.submit(texts, model=NAME, options=MANY)
    first = site.worker(engine={"seconds": 0.1, "slots": 4})
    site.wait_for(lambda: site.status(job).items.done > 5)
    engine = engine_of(site)
    # An engine that does not run must end too.
    os.kill(engine, signal.SIGSTOP)
    first.kill()
    first.wait()
    site.wait_for(lambda: not Path(f"/proc/{engine}").exists())
    expire_leases_of_the_dead(site.ledger)
    second = site.worker(engine={"seconds": 0.01, "slots": 4})
    assert site.wait_until_final(job).items.done == len(texts)
    assert_made_once(site, job, texts)
    assert stop(second) == 0


def test_a_supervisor_that_is_killed_leaves_no_process(site: Site) -> None:
    texts = [f"text {n}" for n in range(120)]
    job = site.submit(texts, model=NAME, options=MANY)
    supervisor = site.worker("--supervise", engine={"seconds": 0.1, "slots": 4})
    site.wait_for(lambda: site.status(job).items.done > 5)
    workers = [row.pid for row in site.ledger.worker_statuses(include_ended=True)]
    supervisor.kill()
    supervisor.wait()
    site.wait_for(lambda: not engines_of(site) and not any(Path(f"/proc/{pid}").exists() for pid in workers))
    expire_leases_of_the_dead(site.ledger)
    again = site.worker("--supervise", engine={"seconds": 0.01, "slots": 4})
    assert site.wait_until_final(job).items.done == len(texts)
    assert_made_once(site, job, texts)
    assert stop(again) == 0


def test_an_item_that_kills_the_engine_dies_alone(site: Site) -> None:
    texts = [f"text {n}" for n in range(6)]
    texts[3] = "[[crash]]"
    job = site.submit(texts, model=NAME, options=SubmitOptions(max_attempts=2))
    worker = site.worker(engine={"seconds": 0.01})
    status = site.wait_until_final(job)
    assert status.items.done == 5
    states = {
        row.index: (row.state, row.error_code)
        for row in site.ledger.items(job.id)
        if row.state is not ItemState.DONE
    }
    assert states == {3: (ItemState.DEAD, ErrorCode.POISON_WORKER_CRASH)}
    assert worker.poll() is None
    assert stop(worker) == 0
    assert "by signal 9 (SIGKILL)" in site.log_text()


def test_an_item_that_kills_the_engine_once_is_done(site: Site) -> None:
    texts = [f"text {n}" for n in range(20)]
    texts[7] = f"[[crash_once:{site.folder / 'crashed'}]]"
    job = site.submit(texts, model=NAME)
    site.worker(engine={"seconds": 0.01})
    assert site.wait_until_final(job).items.done == len(texts)
    assert_made_once(site, job, texts)


def test_an_engine_that_never_opens_ends_the_job_after_its_attempts(site: Site) -> None:
    job = site.submit(["one"], model=NAME, options=SubmitOptions(max_attempts=3))
    worker = site.worker(engine={"exit": 9})
    assert site.wait_until_final(job).items.done == 0
    (item,) = site.ledger.items(job.id)
    assert item.error_code is ErrorCode.POISON_WORKER_CRASH
    assert item.error_message is not None
    assert "ended with status 9" in item.error_message
    assert site.log_text().count('"model opening"') == 3
    assert stop(worker) == 0


def test_an_engine_that_dies_idle_is_no_shards_fault(site: Site) -> None:
    first = site.submit(["one"], model=NAME)
    site.worker(engine={"seconds": 0.01})
    site.wait_until_final(first)
    os.kill(engine_of(site), signal.SIGKILL)
    site.wait_for(lambda: "by signal 9 (SIGKILL)" in site.log_text())
    second = site.submit(["two"], model=NAME, options=SubmitOptions(max_attempts=1))
    assert site.wait_until_final(second).items.done == 1
    assert rows(site.ledger, "SELECT count(*) FROM attempts WHERE outcome = 'failed'") == [(0,)]


def test_a_worker_of_a_model_that_never_opens_says_why(site: Site) -> None:
    worker = site.worker("--model", NAME, engine={"broken": 1})
    assert worker.wait(240) == 1
    assert "The model could not be opened: RuntimeError('no memory for the weights')" in site.log_text()


def test_a_checkpoint_that_is_broken_has_its_own_error(site: Site) -> None:
    folder = site.folder / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:1000])
    job = site.submit(["one"], model=str(folder))
    site.worker()
    assert site.wait_until_final(job).items.done == 0
    (item,) = site.ledger.items(job.id)
    assert item.error_code is ErrorCode.MODEL_BAD_CHECKPOINT
    assert "Traceback" not in site.log_text()


def test_a_drain_waits_for_the_engine(site: Site) -> None:
    texts = [site.held("lasts"), "quick"]
    job = site.submit(texts, model=NAME)
    worker = site.worker(engine={"seconds": 0.01})
    site.wait_for(lambda: site.status(job).items.done == 1)
    # As of a terminal or a service, to all processes at once.
    os.kill(engine_of(site), signal.SIGTERM)
    worker.send_signal(signal.SIGTERM)
    site.wait_for(lambda: '"draining"' in site.log_text())
    site.let_go()
    assert worker.wait(240) == 0
    assert_made_once(site, job, texts)
    assert site.status(job).shards == {ShardState.DONE: 1}


def test_ctrl_c_ends_a_run_with_its_engine(site: Site) -> None:
    folder = site.folder / "run"
    folder.mkdir()
    lines = [
        {"example_id": f"line-{n}", "messages": [["user", "text", f"text {n} [[slow:6000]]"]]}
        for n in range(4)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SPEECH_")}
    environment = clean | {
        "SPEECH_HOME": f"{site.folder}/run-home",
        "PYTHONPATH": site.environment["PYTHONPATH"],
    }
    command = [sys.executable, "-m", "jobs", "run", "in.jsonl", "--model", NAME]
    with (site.folder / "run.log").open("wb") as log:
        run = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    engine = engine_of(site)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(240) == 130
    site.wait_for(lambda: not Path(f"/proc/{engine}").exists(), 60)


def test_a_gpu_on_which_no_engine_opens_is_quarantined(site: Site) -> None:
    """A worker that went on without an engine would fail shard after shard."""
    texts = [f"text {n}" for n in range(400)]
    texts[0] = site.held("lasts")
    job = site.submit(texts, model=NAME, options=MANY)
    supervisor = site.worker("--gpu", "0,1", engine={"seconds": 0.6, "slots": 2}, NIGHTJAR_BAD_GPU="1")
    site.wait_for(lambda: site.log_text().count('"worker quarantined"') == 1)
    site.let_go()
    (line,) = (json.loads(line) for line in site.log_text().splitlines() if '"worker quarantined"' in line)
    assert line["gpu"] == "1"
    assert (
        "The worker of GPU 1 ended with status 1, 5 times in a row without a finished item." in line["reason"]
    )
    assert "Its last message: The engine's process ended" in line["reason"]
    assert site.status(job).items.failed == 0
    assert stop(supervisor) == 1
    site.worker(engine={"seconds": 0.0, "slots": 64})
    site.wait_until_final(job)
    assert_made_once(site, job, texts)
