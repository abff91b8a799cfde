"""Flower and nights as real processes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.settings import load_settings
from pipelines.errors import ConfigError
from tests.support.services import free_port
from tests.support.worker_process import REPOSITORY, Site, stop
from worker.celery_app import run_flower


@pytest.fixture
def site(tmp_path: Path, valkey_url: str) -> Iterator[Site]:
    schedule = {"input": str(tmp_path / "in-{date}.jsonl"), "model": "fake"}
    with Site(tmp_path, valkey_url, SPEECH_SCHEDULES=json.dumps({"evening": schedule})) as site:
        yield site


def start(site: Site, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    variables = os.environ | site.environment | environment
    with site.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_worker", *arguments],
            cwd=REPOSITORY,
            env=variables,
            stdout=log,
            stderr=log,
        )
    site.processes.append(process)
    return process


def ask(port: int, path: str, auth: str | None = None, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", method=method, data=b"" if method == "POST" else None
    )
    if auth is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(auth.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


def test_flower_shows_jobs_and_shards_to_those_with_a_password_and_changes_nothing(site: Site) -> None:
    port = free_port()
    flower = start(site, "flower", SPEECH_FLOWER__BASIC_AUTH="admin:hunter2", SPEECH_FLOWER__PORT=str(port))
    site.wait_for(lambda: ask(port, "/", "admin:hunter2")[0] == 200)
    worker = site.worker()
    # What happened before Flower heard its first event is unknown to it for ever.
    site.wait_for(lambda: f"nightjar-{worker.pid}@" in ask(port, "/workers?json=1", "admin:hunter2")[1])
    job = site.submit([f"text {n}" for n in range(20)])
    site.wait_until_final(job)
    site.wait_for(lambda: job.id in ask(port, "/api/tasks", "admin:hunter2")[1])
    tasks = json.loads(ask(port, "/api/tasks", "admin:hunter2")[1])
    assert {task["name"] for task in tasks.values()} == {"nightjar.run_shard"}
    shown = sorted(task["kwargs"] for task in tasks.values())
    assert f"'job': '{job.id}'" in shown[0]
    assert "'shard': 0" in shown[0]
    assert ask(port, "/api/tasks")[0] == 401
    assert ask(port, "/", "admin:wrong")[0] == 401
    assert (
        ask(port, f"/api/worker/shutdown/{next(iter(tasks.values()))['worker']}", "admin:hunter2", "POST")[0]
        == 403
    )
    assert b"hunter2" not in Path(f"/proc/{flower.pid}/cmdline").read_bytes()
    assert worker.poll() is None
    assert stop(flower) == 0
    assert "hunter2" not in site.log_text()


@pytest.mark.parametrize(
    "auth", [None, "", ":", "me:", ":secret", "me", " : ", "me:secret,", "me:secret,:", "me:sec,ret"]
)
def test_flower_takes_no_empty_user_and_no_empty_password(auth: str | None) -> None:
    settings = load_settings(flower={"basic_auth": auth})
    with pytest.raises(ConfigError, match="without a user and a password"):
        run_flower(settings)


def test_flower_does_not_start_without_a_password(site: Site) -> None:
    flower = start(site, "flower")
    assert flower.wait(240) == 4
    assert "config.invalid" in site.log_text()


def test_a_cron_line_runs_nights_and_reports_them(site: Site) -> None:
    nightly = start(site, "nightly", "--night", "2026-11-20")
    assert nightly.wait(240) == 1
    assert "evening 2026-11-20 missing" in site.log_text()
    assert start(site, "nightly", "--schedule", "none").wait(240) == 4
