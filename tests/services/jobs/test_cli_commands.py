"""The `nightjar` command as a process: what it does to a job and shows of it, with exit codes, streams and
JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from jobs.ledger import Ledger
from jobs.ledger.records import SCHEMA_REVISION
from jobs.ledger.status import find_job, status_and_errors
from jobs.ledger.transaction import read_with_driver
from pipelines.errors import NotFoundError
from tests.support.cli_kit import CLOSED_PORT, LINE, call, error_code
from tests.support.ledger_kit import execute
from tests.support.services import MotoS3


def test_submit_prints_the_bare_id_and_is_idempotent(submitted: tuple[Path, str, str]) -> None:
    folder, broker, job = submitted
    assert len(job) == 26
    again = call(folder, "submit", "in.jsonl", "--json", SPEECH_BROKER_URL=broker)
    view = json.loads(again.stdout)
    assert (view["schema"], view["job"], view["created"]) == ("nightjar.submit/1", job, False)
    other = call(folder, "submit", "in.jsonl", "-q", "--seed", "7", SPEECH_BROKER_URL=broker)
    assert other.stdout.strip() != job
    keyed = call(folder, "submit", "in.jsonl", "-q", "--idempotency-key", "k", SPEECH_BROKER_URL=broker)
    assert keyed.stdout.strip() not in {job, other.stdout.strip()}


def test_submit_reads_standard_input(folder: Path, valkey_url: str) -> None:
    done = call(folder, "submit", "-", "--json", stdin=LINE % ("x", "Hello."), SPEECH_BROKER_URL=valkey_url)
    assert json.loads(done.stdout)["items"] == 1


def test_views_of_a_job(submitted: tuple[Path, str, str]) -> None:
    folder, _, job = submitted
    status = json.loads(call(folder, "status", job[:10], "--json").stdout)
    assert (status["schema"], status["job"], status["state"]) == ("nightjar.status/1", job, "ready")
    assert status["items"] == {"total": 2, "done": 0, "failed": 0, "skipped": 0, "pending": 2}
    assert status["real_time_factor"] == status["rtfx"]
    assert {
        "audio_seconds",
        "items_per_second",
        "eta_seconds",
        "rejected_lines",
        "rtfx",
        "engine_seconds",
    } <= set(status)
    assert status["errors"] == {"input.bad_json": 1}
    assert "cost" not in status
    priced = json.loads(call(folder, "status", job, "--json", SPEECH_PRICE_PER_GPU_HOUR="2.5").stdout)
    assert priced["cost"] == 0
    items = [json.loads(line) for line in call(folder, "items", job, "--json").stdout.splitlines()]
    assert [(item["example_id"], item["index"], item["state"], item["key"]) for item in items] == [
        ("a", 0, "pending", None),
        ("b", 1, "pending", None),
    ]
    assert {"error_code", "sha256", "duration_ms", "seed"} <= set(items[0])
    (listed,) = call(folder, "list", "--json").stdout.splitlines()
    assert json.loads(listed)["name"] == "first"
    assert call(folder, "list", "--state", "completed").stdout == ""
    (error,) = [json.loads(line) for line in call(folder, "errors", job, "--json").stdout.splitlines()]
    assert (error["line"], error["code"]) == (3, "input.bad_json")
    (count,) = [
        json.loads(line) for line in call(folder, "errors", job, "--by", "code", "--json").stdout.splitlines()
    ]
    assert count["count"] == 1


def test_pause_resume_wait_cancel(submitted: tuple[Path, str, str]) -> None:
    folder, _, job = submitted
    assert json.loads(call(folder, "pause", job, "--json").stdout)["state"] == "paused"
    timeout = call(folder, "wait", job, "--timeout", "0.2", "--json")
    assert (timeout.returncode, json.loads(timeout.stdout)["state"]) == (7, "paused")
    assert "resume" in call(folder, "resume", "--help").stdout
    assert json.loads(call(folder, "resume", job, "--json").stdout)["state"] == "ready"
    assert json.loads(call(folder, "cancel", job, "--json").stdout)["state"] == "cancelled"
    assert call(folder, "wait", job).returncode == 6
    assert call(folder, "watch", job, "-q").returncode == 6
    refused = call(folder, "pause", job, "--json")
    assert (refused.returncode, error_code(refused)) == (1, "ledger.state")
    assert json.loads(call(folder, "status", job, "--json").stdout)["items"]["skipped"] == 2


def test_priority_of_a_waiting_job(submitted: tuple[Path, str, str]) -> None:
    folder, _, job = submitted
    assert json.loads(call(folder, "priority", job, "7", "--json").stdout) == {
        "schema": "nightjar.priority/1",
        "job": job,
        "priority": 7,
    }
    with closing(Ledger(f"sqlite:///{folder}/out/.nightjar/ledger.sqlite")) as ledger:
        assert ledger.job(job).priority == 7
    assert call(folder, "priority", job, "-7").stdout == f"{job} has priority -7.\n"
    assert call(folder, "priority", job, "1000").returncode == 2


def test_what_is_said_counts_in_english_and_leads_on(submitted: tuple[Path, str, str]) -> None:
    folder, broker, job = submitted
    again = call(folder, "submit", "in.jsonl", SPEECH_BROKER_URL=broker)
    assert f"2 items, 1 line refused. Follow it with: nightjar watch {job}" in again.stderr
    call(folder, "pause", job)
    shown = call(folder, "status", job).stdout
    assert "input   1 line refused" in shown
    assert "unknown left" not in shown
    assert "1 voice, 1 language\n" in call(folder, "models").stdout


def test_the_submit_of_a_cancelled_job_makes_nothing_and_says_how_to_make_another(
    submitted: tuple[Path, str, str],
) -> None:
    folder, broker, job = submitted
    call(folder, "cancel", job)
    (lost,) = (folder / "out/jobs" / job).rglob("*.zst")
    lost.unlink()
    for command in ("submit", "run"):
        again = call(folder, command, "in.jsonl", "-q", "--json", SPEECH_BROKER_URL=broker)
        assert (again.returncode, error_code(again)) == (6, "ledger.cancelled")
        assert f"Job {job} of this input" in again.stderr
        assert not lost.exists()
    assert (
        json.loads(call(folder, "submit", "in.jsonl", "--json", SPEECH_BROKER_URL=broker).stdout)["job"]
        == job
    )
    told = re.search(r"`(--idempotency-key) KEY`", again.stderr)
    assert told is not None
    other = call(folder, "submit", "in.jsonl", "-q", told[1], "again", SPEECH_BROKER_URL=broker)
    # One line is bad, as of the first job.
    assert (other.returncode, len(other.stdout.split())) == (1, 1)
    assert other.stdout.strip() != job


def test_dry_run_writes_nothing(folder: Path) -> None:
    done = call(folder, "submit", "in.jsonl", "--dry-run", "--json")
    view = json.loads(done.stdout)
    assert (view["schema"], view["items"], view["rejected"]) == (
        "nightjar.estimate/1",
        2,
        {"input.bad_json": 1},
    )
    assert view["audio_seconds"] > 0
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[3] / "examples").glob("*.jsonl")), ids=lambda path: path.name
)
def test_no_line_of_an_example_is_refused(folder: Path, example: Path) -> None:
    view = json.loads(call(folder, "submit", str(example), "--dry-run", "--json").stdout)
    assert view["rejected"] == {}
    assert view["items"] >= len(example.read_text().splitlines())


def test_config_shows_origins_and_hides_secrets(folder: Path) -> None:
    (folder / "nightjar.toml").write_text("[worker]\nthreads = 3\n")
    secrets = {
        "SPEECH_DATABASE_URL": "postgresql://me:hunter2@h/db",
        "SPEECH_S3__SECRET_ACCESS_KEY": "hunter2",
    }
    for options in ([], ["--json"]):
        done = call(folder, "config", "show", *options, **secrets)
        assert done.returncode == 0
        assert "hunter2" not in done.stdout
    settings = json.loads(done.stdout)["settings"]
    assert settings["worker.threads"] == {"value": 3, "origin": "nightjar.toml"}
    assert settings["database_url"]["origin"] == "environment"
    assert call(folder, "config", "list", SPEECH_NONSENSE="x").returncode == 0


def test_doctor(folder: Path, valkey_url: str) -> None:
    good = call(folder, "doctor", "--json", SPEECH_BROKER_URL=valkey_url)
    findings = {view["check"]: view for view in map(json.loads, good.stdout.splitlines())}
    assert good.returncode == 0, good.stdout
    assert {
        "python",
        "settings",
        "ledger",
        "broker",
        "store",
        "disk",
        "models",
        "workers",
        "gpu",
        "compilers",
        "kernels",
    } <= set(findings)
    assert not (folder / "out").exists()
    bad = call(folder, "doctor", SPEECH_BROKER_URL=f"redis://127.0.0.1:{CLOSED_PORT}/0")
    assert bad.returncode == 1
    assert "fail  broker" in bad.stdout


def test_a_meter_that_is_not_installed_is_told_before_anything_is_made(folder: Path, valkey_url: str) -> None:
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['faster_whisper'] = None\n")
    lacking = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[3]}", "SPEECH_BROKER_URL": valkey_url}
    refused = call(folder, "run", "in.jsonl", "--out", "made", "--qa", "strict", "--json", **lacking)
    assert (refused.returncode, error_code(refused)) == (4, "config.missing_library")
    assert "faster_whisper" in refused.stderr
    assert "with its extra `qa`" in refused.stderr
    assert not (folder / "made").exists()
    noted = call(folder, "submit", "in.jsonl", "--qa", "strict", **lacking)
    # For one of the lines was refused.
    assert noted.returncode == 1
    assert len(noted.stdout.split()) == 1
    assert "faster_whisper" in noted.stderr
    (meters,) = [
        view
        for view in map(json.loads, call(folder, "doctor", "--json", **lacking).stdout.splitlines())
        if view["check"] == "meters"
    ]
    assert meters["health"] == "warn"
    assert "asr needs faster_whisper" in meters["message"]
    assert "with its extra `qa`" in meters["advice"]


def test_weights_that_are_not_here_end_a_run_at_once(folder: Path, valkey_url: str) -> None:
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "SPEECH_BROKER_URL": valkey_url}
    strict = ("in.jsonl", "--qa", "strict", "--qa-set", "meters.distillmos=false")
    refused = call(folder, "run", *strict, "--out", "made", "--json", **hub)
    assert (refused.returncode, error_code(refused)) == (5, "model.unreachable")
    assert "meters.asr.model" in refused.stderr
    assert not (folder / "made").exists()
    noted = call(folder, "submit", *strict, **hub)
    # For one of the lines was refused.
    assert (noted.returncode, len(noted.stdout.split())) == (1, 1)
    assert "A worker that cannot download them waits." in noted.stderr


def test_models(folder: Path) -> None:
    assert "hibari" in call(folder, "models").stdout
    view = json.loads(call(folder, "models", "hibari", "--json").stdout)
    assert (view["schema"], view["sample_rate"]) == ("nightjar.model/1", 24000)


def test_completion_knows_job_ids(submitted: tuple[Path, str, str]) -> None:
    folder, _, job = submitted
    assert "_NIGHTJAR_COMPLETE" in call(folder, "completion", "bash").stdout
    done = call(
        folder, _NIGHTJAR_COMPLETE="bash_complete", COMP_WORDS=f"nightjar status {job[:3]}", COMP_CWORD="2"
    )
    assert job in done.stdout


@pytest.mark.parametrize("command", ["status", "workers"])
def test_status_and_workers_pay_for_nothing_else(submitted: tuple[Path, str, str], command: str) -> None:
    folder, _, job = submitted
    words = [command, job] if command == "status" else [command]
    code = "import sys; from jobs.cli import main; main(); sys.stderr.write(' '.join(sys.modules))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    for heavy in ("torch", "celery", "kombu", "boto3", "pandas", "numpy", "sqlalchemy", "alembic", "rich"):
        assert heavy not in done.stderr.split(), heavy


def test_the_driver_reads_what_the_ledger_says(submitted: tuple[Path, str, str]) -> None:
    folder, _, job = submitted
    url = f"sqlite:///{folder}/out/.nightjar/ledger.sqlite"
    ledger = Ledger(url)
    before = ledger.now()
    seen = read_with_driver(url, lambda reader: status_and_errors(reader, job[:8].upper()))
    assert seen is not None
    status, errors = seen
    expected = ledger.status(job)
    assert (status.job, status.items, status.shards, status.bytes_out) == (
        expected.job,
        expected.items,
        expected.shards,
        expected.bytes_out,
    )
    assert errors == ledger.error_counts(job)
    assert before - 0.01 <= status.now <= expected.now + 0.01
    for other in ("", "zz", "%", job + "0"):
        with pytest.raises(NotFoundError):
            read_with_driver(url, lambda reader, other=other: find_job(reader, other))
    assert (
        read_with_driver(f"sqlite:///{folder}/missing.sqlite", lambda reader: find_job(reader, job)) is None
    )
    execute(ledger, "UPDATE alembic_version SET version_num = '0005'")
    assert read_with_driver(url, lambda reader: find_job(reader, job)) is None
    execute(ledger, "UPDATE alembic_version SET version_num = :revision", revision=SCHEMA_REVISION)
    ledger.close()


def test_postgresql_and_s3(folder: Path, valkey_url: str, postgres_url: str, moto: MotoS3) -> None:
    bucket = moto.create_bucket(f"cli-{os.getpid()}-{time.time_ns()}")
    environment = {
        **moto.environment(),
        "SPEECH_DATABASE_URL": postgres_url,
        "SPEECH_BROKER_URL": valkey_url,
        "SPEECH_STORE_URL": f"s3://{bucket}/x",
    }
    unready = call(folder, "submit", "in.jsonl", "--json", **environment)
    assert (unready.returncode, error_code(unready)) == (5, "ledger.schema")
    assert call(folder, "db", "upgrade", **environment).returncode == 0
    assert call(folder, "db", "current", **environment).stdout.startswith(SCHEMA_REVISION)
    job = call(folder, "submit", "in.jsonl", "-q", **environment).stdout.strip()
    seen = read_with_driver(postgres_url, lambda reader: status_and_errors(reader, job[:10]))
    assert seen is not None
    ledger = Ledger(postgres_url)
    expected = ledger.status(job)
    assert (seen[0].job, seen[0].items, seen[0].shards) == (expected.job, expected.items, expected.shards)
    assert seen[1] == ledger.error_counts(job)
    ledger.close()
    assert json.loads(call(folder, "status", job, "--json", **environment).stdout)["items"]["pending"] == 2
    assert not (folder / "out").exists()
    doctor = call(folder, "doctor", **environment)
    assert doctor.returncode == 0, doctor.stdout
