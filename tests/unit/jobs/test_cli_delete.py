"""`nightjar delete` in this process: what it asks, what it says, and what of other jobs stays."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jobs.cli import cli
from jobs.ingest import submit
from jobs.ledger.records import Job, JobSpec
from jobs.store import open_store
from jobs.verify import expected_objects, listed_faults
from pipelines.audio import encode
from pipelines.errors import ConfigError, ErrorCode, ServiceError
from tests.support.cli_kit import JOBS
from tests.support.fakes import SAMPLE_RATE, sine
from tests.support.worker_rig import Rig


def call(rig: Rig, *words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "--out", str(rig.folder)], standalone_mode=False)


def cloned(rig: Rig, name: str, seed: int, *, pack: bool = False) -> Job:
    """A job that is done, of two lines with the recording that all of them share."""
    if not (rig.folder / "voice.wav").exists():
        (rig.folder / "voice.wav").write_bytes(encode(sine("voice", 1), SAMPLE_RATE, "wav"))
        line = {"messages": [["user", "audio", "voice.wav"], ["user", "text", "[[says:Hello.]] a"]]}
        (rig.folder / "in.jsonl").write_text(
            "".join(json.dumps({"example_id": f"e{n}", **line}) + "\n" for n in range(2))
        )
    rig.store = open_store(str(rig.folder))  # type: ignore[assignment]
    spec = JobSpec(model="fake", seed=seed, pack=pack) if pack else JobSpec(model="fake", seed=seed)
    job = submit(rig.settings, rig.ledger, rig.store, str(rig.folder / "in.jsonl"), spec).job
    rig.run_next()
    return job


@pytest.mark.parametrize("pack", [False, True])
def test_what_two_jobs_share_stays(rig: Rig, pack: bool) -> None:
    first, second = cloned(rig, "first", 1, pack=pack), cloned(rig, "second", 2, pack=pack)
    counted = json.loads(call(rig, "delete", first.id, "--dry-run", "--json").stdout)
    assert (counted["deleted"], counted["items"], counted["job"]) == (False, 2, first.id)
    files = [path for path in (rig.folder / "jobs" / first.id).rglob("*") if path.is_file()]
    assert (counted["objects"], counted["bytes"]) == (len(files), sum(path.stat().st_size for path in files))
    gone = json.loads(call(rig, "delete", first.id, "--yes", "--json").stdout)
    assert gone == counted | {"deleted": True}
    assert [path.name for path in (rig.folder / "jobs").iterdir()] == [second.id]
    assert [job.id for job in rig.ledger.jobs()] == [second.id]
    assert list(listed_faults(rig.store, expected_objects(rig.ledger, second.id))) == []
    assert {path.name for path in (rig.folder / "jobs" / second.id).iterdir()} >= {
        "references",
        "input",
        "packs" if pack else "audio",
    }
    assert (rig.folder / "voice.wav").exists()
    again = cloned(rig, "again", 1, pack=pack)
    assert again.id not in {first.id, second.id}


def test_nothing_is_deleted_without_a_yes(rig: Rig) -> None:
    job = cloned(rig, "job", 1)
    asked = call(rig, "delete", job.id)
    assert isinstance(asked.exception, ConfigError)
    assert "--yes" in asked.exception.advice
    assert rig.ledger.job(job.id).id == job.id
    running = rig.submit(["a"])
    refused = call(rig, "delete", running.id, "--yes")
    assert isinstance(refused.exception, ServiceError)
    assert (refused.exception.code, f"nightjar cancel {running.id}" in refused.exception.advice) == (
        ErrorCode.LEDGER_STATE,
        True,
    )
    told = call(rig, "delete", running.id, "--dry-run")
    assert "cancel it" in told.output
    assert rig.status(running).items.total == 1


@pytest.mark.parametrize(("answer", "status"), [(b"n\n", 1), (b"y\n", 0)])
def test_a_person_on_a_terminal_is_asked(rig: Rig, answer: bytes, status: int, tmp_path: Path) -> None:
    job = cloned(rig, "job", 1)
    person, terminal = pty.openpty()
    os.write(person, answer)
    command = [*JOBS, "delete", job.id[:20], "--out", str(rig.folder)]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        command, stdin=terminal, capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    os.close(person)
    os.close(terminal)
    assert (done.returncode, f"Delete job {job.id} with 2 items, 0.00 h of audio" in done.stderr) == (
        status,
        True,
    ), done
    assert [one.id for one in rig.ledger.jobs()] == ([] if status == 0 else [job.id])
