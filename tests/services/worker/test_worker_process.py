"""A real Celery worker on Valkey, SQLite and a folder: kills, drains, lost messages, a broker that goes
away."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import redis

from jobs.dispatch import Publisher
from jobs.gpus import MIN_CORES
from jobs.ingest import SubmitOptions
from jobs.ledger.records import ItemState, Job, JobState, ShardState, Ticket
from jobs.worker_group import CRASHES_BESIDE_OTHERS
from pipelines.audio import encode
from pipelines.errors import ErrorCode
from tests.support.fakes import SAMPLE_RATE, sine
from tests.support.gpu_host import core_text, install_nvidia_smi
from tests.support.ledger_kit import execute, expire_leases_of_the_dead, rows
from tests.support.manifests import newest_job_manifest, read_manifest
from tests.support.services import Valkey, free_port
from tests.support.worker_process import REPOSITORY, Site, closed_port, stop


@pytest.fixture
def site(tmp_path: Path, valkey_url: str) -> Iterator[Site]:
    with Site(tmp_path, valkey_url) as site:
        yield site


def assert_all_done(site: Site, job_id: str, items: int) -> None:
    """Exactly one artifact and one object for every item, with the right bytes."""
    rows = list(site.ledger.items(job_id))
    assert [row.state for row in rows] == [ItemState.DONE] * items
    keys = {info.key for info in site.store.list(f"jobs/{job_id}/audio/")}
    assert keys == {row.artifact.key for row in rows if row.artifact}
    for row in rows:
        assert row.artifact is not None
        assert site.store.get(row.artifact.key) == encode(
            sine(f"text {row.index}", row.artifact.seed), SAMPLE_RATE, "wav"
        )


def attempts(site: Site) -> dict[str, int]:
    """How the leases of all shards ended: outcome -> count."""
    return dict(rows(site.ledger, "SELECT outcome, count(*) FROM attempts GROUP BY outcome"))


def test_a_job_runs_to_its_end_and_the_worker_drains(site: Site) -> None:
    job = site.submit([f"text {n}" for n in range(100)])
    worker = site.worker()
    status = site.wait_until_final(job)
    assert status.job.state is JobState.COMPLETED
    assert_all_done(site, job.id, 100)
    site.wait_for(lambda: newest_job_manifest(site.store, job.id))
    lines = list(read_manifest(site.store, f"jobs/{job.id}/manifest.jsonl"))
    assert [(line.index, line.text) for line in lines] == [(n, f"text {n}") for n in range(100)]
    assert stop(worker) == 0
    assert [row.state for row in site.ledger.worker_statuses(include_ended=True)] == ["retired"]
    assert "Traceback" not in site.log_text()
    shard_lines = [json.loads(line) for line in site.log_text().splitlines() if '"shard ended"' in line]
    assert {"job", "shard", "epoch", "worker"} <= shard_lines[0].keys()


def test_a_killed_worker_loses_nothing(site: Site) -> None:
    job = site.submit([f"text {n}" for n in range(80)])
    first = site.worker(engine={"seconds": 0.1, "slots": 4})
    site.wait_for(lambda: site.status(job).items.done > 5)
    first.kill()
    first.wait()
    expire_leases_of_the_dead(site.ledger)
    site.worker(engine={"seconds": 0.01, "slots": 4})
    assert site.wait_until_final(job).items.done == 80
    assert_all_done(site, job.id, 80)


def test_sigterm_finishes_the_shards_in_flight(site: Site) -> None:
    job = site.submit([site.held("lasts") if n in (0, 16) else f"text {n}" for n in range(200)])
    # No shard comes out of its turn because its message waits for long.
    worker = site.worker(NIGHTJAR_TIMES__QUEUED_TIMEOUT_SECONDS="600", NIGHTJAR_TIMES__SHARDS_IN_FLIGHT="2")
    # All that its two shards have beside what is held: it takes no third one.
    site.wait_for(lambda: site.status(job).items.done == 30)
    worker.send_signal(signal.SIGTERM)
    site.wait_for(lambda: '"draining"' in site.log_text())
    site.let_go()
    assert worker.wait(240) == 0
    status = site.status(job)
    assert status.items.done == 32
    assert not status.shards.get(ShardState.LEASED)
    assert attempts(site) == {"done": 2}
    assert [row.state for row in site.ledger.worker_statuses(include_ended=True)] == ["retired"]


def test_a_worker_whose_ledger_is_upgraded_finishes_its_shard_and_ends_with_a_sentence(site: Site) -> None:
    job = site.submit([site.held("lasts") if n == 0 else f"text {n}" for n in range(200)])
    worker = site.worker(NIGHTJAR_TIMES__SHARDS_IN_FLIGHT="1")
    site.wait_for(lambda: site.status(job).items.done == 15)
    execute(site.ledger, "UPDATE alembic_version SET version_num = '9999'")
    site.let_go()
    assert worker.wait(240) == 5
    status = site.status(job)
    assert status.items.done == 16
    assert not status.shards.get(ShardState.LEASED)
    assert "changed to another version" in site.log_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_drain_past_its_deadline_gives_shards_back(
    tmp_path: Path, valkey_url: str, number: signal.Signals
) -> None:
    with Site(tmp_path, valkey_url, SPEECH_WORKER__DRAIN_SECONDS="0.5") as site:
        job = site.submit(["quick", "[[slow:6000]] late"])
        worker = site.worker()
        site.wait_for(lambda: site.status(job).items.done == 1)
        worker.send_signal(number)
        assert worker.wait(240) == 0
        assert site.status(job).shards[ShardState.READY] == 1
        assert site.status(job).items.done == 1
        assert attempts(site) == {"released": 1}
        assert "Traceback" not in site.log_text()


def test_a_second_signal_hurries(site: Site) -> None:
    job = site.submit(["[[slow:6000]] late"])
    worker = site.worker()
    site.wait_for(lambda: site.status(job).shards.get(ShardState.LEASED))
    worker.send_signal(signal.SIGTERM)
    site.wait_for(lambda: '"draining"' in site.log_text())
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(240) == 0
    assert site.status(job).shards[ShardState.READY] == 1


def wait_and_repeat(site: Site, job: Job, act: Callable[[], object], times: int) -> None:
    """Does `act` so many times, half a second apart, while the job lasts; the job comes through at last."""
    for _ in range(times):
        if site.status(job).job.state.final:
            return
        act()
        time.sleep(0.5)
    site.wait_until_final(job)


def test_repeated_messages_of_every_epoch_do_nothing(site: Site) -> None:
    """For two workers, at work and at the end."""
    job = site.submit([f"text {n}" for n in range(160)])
    tickets = [Ticket(job.id, shard, epoch) for shard in range(job.total_shards) for epoch in range(3)]
    publisher = Publisher(site.settings)
    publisher.publish([Ticket(job.id, 0, 7), Ticket("no-such-job", 0, 0)])
    for _ in range(2):
        site.worker(engine={"seconds": 0.1, "slots": 4})
    wait_and_repeat(site, job, lambda: publisher.publish(tickets), 30)
    publisher.publish(tickets)
    site.wait_for(lambda: site.queue_depth() == 0)
    assert_all_done(site, job.id, 160)
    assert attempts(site) == {"done": job.total_shards}


def test_an_emptied_broker_costs_only_time(site: Site, valkey_url: str) -> None:
    """Before and while a worker is at work."""
    job = site.submit([f"text {n}" for n in range(160)])
    site.dispatch()
    broker = redis.Redis.from_url(valkey_url)
    broker.flushall()
    site.worker(engine={"seconds": 0.1, "slots": 4})
    site.wait_for(lambda: site.status(job).items.done)
    wait_and_repeat(site, job, broker.flushall, 6)
    assert_all_done(site, job.id, 160)


def test_an_item_that_kills_its_workers_dies_alone(tmp_path: Path, valkey_url: str) -> None:
    quick = {"NIGHTJAR_TIMES__RESTART_SECONDS": "0.5", "NIGHTJAR_TIMES__BACKOFF_SECONDS": "0.1"}
    with Site(tmp_path, valkey_url, **quick) as site:
        job = site.submit(["one", "[[crash]]", "two"], options=SubmitOptions(max_attempts=2))
        supervisor = site.worker("--supervise")

        expire_until_final(site, job)
        status = site.status(job)
        assert status.items.done == 2
        codes = [row.error_code for row in site.ledger.items(job.id)]
        assert codes == [None, ErrorCode.POISON_WORKER_CRASH, None]
        assert stop(supervisor) == 0


def test_a_broker_that_comes_back_finds_the_worker_waiting(tmp_path: Path) -> None:
    broker = Valkey(tmp_path / "valkey")
    broker.start()
    try:
        with Site(tmp_path, broker.url) as site:
            job = site.submit([f"text {n}" for n in range(160)])
            site.worker(engine={"seconds": 0.1, "slots": 4})
            site.wait_for(lambda: site.status(job).items.done > 5)
            broker.kill()
            time.sleep(1)
            broker.start()
            assert site.wait_until_final(job).items.done == 160
            assert_all_done(site, job.id, 160)
    finally:
        broker.stop()


def test_a_worker_without_a_broker_waits_and_still_drains(tmp_path: Path) -> None:
    with closed_port() as port, Site(tmp_path, f"redis://:hidden@127.0.0.1:{port}/0") as site:
        worker = site.worker()
        site.wait_for(lambda: "worker up" in site.log_text())
        time.sleep(1)
        assert stop(worker) == 0
        assert "hidden" not in site.log_text()


def test_a_pinned_worker_leaves_other_models_to_others(site: Site) -> None:
    other = site.submit([f"text {n}" for n in range(16)], model="fake-two")
    mine = site.submit([f"text {n}" for n in range(16)], model="fake")
    site.worker("--model", "fake")
    site.wait_until_final(mine)
    assert site.status(other).items.done == 0
    site.worker("--model", "fake-two")
    assert site.wait_until_final(other).items.done == 16


def test_one_worker_serves_jobs_of_two_models(site: Site) -> None:
    jobs = [site.submit([f"text {n}" for n in range(40)], model=model) for model in ("fake", "fake-two")]
    site.worker()
    assert [site.wait_until_final(job).items.done for job in jobs] == [40, 40]


def test_a_worker_whose_parent_is_gone_ends(site: Site) -> None:
    job = site.submit(["[[slow:6000]] late"])
    command = (
        "import time\nfrom jobs.worker_group import WorkerReport\nfrom pipelines.child_process import Child\n"
    )
    command += "child = Child(['-m', 'tests.support.fake_worker', 'run'], WorkerReport, bound=False)\n"
    command += "child.channel.send(True)\ntime.sleep(600)"
    with site.log.open("ab") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", command],
            cwd=REPOSITORY,
            env=os.environ | site.environment,
            stdout=log,
            stderr=log,
        )
    site.processes.append(parent)
    site.wait_for(lambda: site.status(job).shards.get(ShardState.LEASED))
    parent.kill()
    parent.wait()
    site.wait_for(lambda: site.status(job).shards.get(ShardState.READY))
    site.wait_for(lambda: site.ledger.worker_statuses(include_ended=True)[0].state == "retired")


def test_a_worker_that_cannot_start_says_why(tmp_path: Path, valkey_url: str) -> None:
    with Site(tmp_path, valkey_url) as site:
        worker = site.worker(SPEECH_DATABASE_URL=f"sqlite:///{tmp_path}/none.sqlite")
        assert worker.wait(240) != 0
        assert "Traceback" not in site.log_text()
        assert "ledger." in site.log_text()


def test_metrics_are_served(tmp_path: Path, valkey_url: str) -> None:
    port = free_port()
    with Site(tmp_path, valkey_url, SPEECH_WORKER__METRICS_PORT=str(port)) as site:
        job = site.submit(["one", "[[fail:synth.no_eos]] two"])
        site.worker()
        site.wait_until_final(job)
        text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert 'speech_items_total{code="",outcome="done"} 1.0' in text
        assert 'speech_items_total{code="synth.no_eos",outcome="failed"} 1.0' in text
        for name in (
            "speech_audio_seconds_total",
            "speech_engine_batch_size",
            "speech_lease_lost_total",
            "speech_queue_depth",
        ):
            assert f"\n{name} " in text
        assert (
            'speech_engine_info{device="",dtype="",executor="",kernels="",model="fake",reproducible="yes"} 1.0'
            in text
        )
        assert "\nspeech_engine_slots 8.0" in text
        assert "engine ready: fake, 8 slots, reproducible" in site.log_text()
        assert job.id not in text


def test_workers_of_gpus_have_ports_and_cores_of_their_own(tmp_path: Path, valkey_url: str) -> None:
    """Real GPUs are not needed: what a process gets is in its environment and in /proc."""
    gpus = max(2, min(4, len(os.sched_getaffinity(0)) // MIN_CORES))
    port = free_port()
    hosts = install_nvidia_smi(tmp_path / "bin", gpus)
    with Site(tmp_path, valkey_url, SPEECH_WORKER__METRICS_PORT=str(port), **hosts) as site:
        job = site.submit([f"text {n}" for n in range(40)])
        supervisor = site.worker("--gpu", "all")
        site.wait_for(lambda: site.log_text().count('"worker up"') == gpus)
        started = [json.loads(line) for line in site.log_text().splitlines() if '"worker started"' in line]
        assert [line["gpu"] for line in started] == [str(number) for number in range(gpus)]
        assert [line["metrics_port"] for line in started] == list(range(port, port + gpus))
        for line in started:
            (allowed,) = re.findall(
                r"Cpus_allowed_list:\s*(\S+)", Path(f"/proc/{line['pid']}/status").read_text()
            )
            assert allowed == core_text(line.get("cores", os.sched_getaffinity(0)))
            assert urlopen(f"http://127.0.0.1:{line['metrics_port']}/metrics").status == 200
        assert sorted(row.gpu for row in site.ledger.worker_statuses(include_ended=True)) == sorted(
            line["gpu"] for line in started
        )
        assert site.wait_until_final(job).items.done == 40
        assert stop(supervisor) == 0


def test_one_bad_gpu_of_four_is_quarantined_and_the_job_completes(tmp_path: Path, valkey_url: str) -> None:
    quick = {"NIGHTJAR_TIMES__RESTART_SECONDS": "0.5", "NIGHTJAR_TIMES__BACKOFF_SECONDS": "0.1"}
    with Site(tmp_path, valkey_url, **quick, **install_nvidia_smi(tmp_path / "bin", 4)) as site:
        job = site.submit([f"text {n}" for n in range(200)], options=SubmitOptions(max_attempts=50))
        supervisor = site.worker(
            "--gpu", "all", "--model", "fake", engine={"seconds": 0.1, "slots": 2}, NIGHTJAR_BAD_GPU="2"
        )
        expire_until_final(site, job)
        assert site.status(job).items.done == 200
        site.wait_for(lambda: '"worker quarantined"' in site.log_text())
        lines = [json.loads(line) for line in site.log_text().splitlines() if line.startswith("{")]
        (quarantined,) = [line for line in lines if line["event"] == "worker quarantined"]
        assert (quarantined["gpu"], quarantined["level"]) == ("2", "error")
        assert "The worker of GPU 2 ended by signal 6 (SIGABRT)" in quarantined["reason"]
        starts = Counter(line["gpu"] for line in lines if line["event"] == "worker started")
        assert (starts["0"], starts["1"], starts["3"]) == (1, 1, 1)
        assert starts["2"] == CRASHES_BESIDE_OTHERS
        assert_all_done(site, job.id, 200)
        quarantines = lambda: [row for row in site.ledger.worker_statuses() if row.state == "quarantined"]  # noqa: E731
        site.wait_for(quarantines)
        assert [(row.gpu, row.pid, row.state_reason) for row in quarantines()] == [
            ("2", supervisor.pid, quarantined["reason"])
        ]
        assert stop(supervisor) == 1
        assert quarantines() == []


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("7", "GPU 7 does not exist; this host has 0, 1."),
        ("0,0", "--gpu names GPU 0 twice."),
        ("-1", "--gpu: '-1' is not the name of a GPU."),
        ("both", "--gpu: 'both' is not the name of a GPU."),
        ("", "--gpu: '' is not the name of a GPU."),
    ],
)
def test_wrong_gpus_are_refused_before_anything_starts(tmp_path: Path, wanted: str, message: str) -> None:
    environment = (
        os.environ | install_nvidia_smi(tmp_path / "bin", 2) | {"SPEECH_HOME": str(tmp_path / "home")}
    )
    command = [sys.executable, "-m", "worker", "run", f"--gpu={wanted}"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert f"config.invalid: {message}" in done.stderr
    assert "--gpu all" in done.stderr
    assert not (tmp_path / "home").exists()


def expire_until_final(site: Site, job: Job) -> None:
    """As time would, ends the leases of workers that died."""

    def over() -> bool:
        expire_leases_of_the_dead(site.ledger)
        return site.status(job).job.state.final

    site.wait_for(over, 500)
