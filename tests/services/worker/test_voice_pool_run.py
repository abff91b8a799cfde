"""A run with a Qwen3-TTS checkpoint that clones the voices of a pool, whose folder is deleted when the job is
in the ledger."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import nightjar
from jobs.cli import main
from jobs.console import Stop
from jobs.embedded import embedded_settings
from jobs.job_options import checked_options, job_of
from jobs.ledger.records import Job, JobState
from jobs.local_run import run_locally
from jobs.progress import Progress
from jobs.settings import load_settings
from jobs.spec import resolve
from jobs.store import open_store
from jobs.voices import voice_folder
from tests.support.golden_checkpoint import whole

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_tts"


def test_a_pool_gives_each_role_a_voice_that_every_export_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    pool = tmp_path / "pool"
    pool.mkdir()
    for name in ("a", "b"):
        shutil.copy(GOLDEN / "refs" / f"ref_{name}_24k_mono.wav", pool / f"{name}.wav")
    (pool / "a.txt").write_text("Good morning, and welcome.")
    lines = [
        {
            "example_id": f"e{n}",
            "messages": [["user", "text", "Are you there?"], ["assistant", "text", f"Yes, number {n}."]],
        }
        for n in range(12)
    ]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = load_settings(home="out")
    settings = embedded_settings(chosen)
    asked = {"model": str(whole(GOLDEN / "checkpoint-base")), "voices": pool, "speak": "all"}
    spec, options = job_of(checked_options({**asked, "qa": "off", "generation": {"max_seconds": 1}}))
    resolved = resolve(spec, stored=voice_folder(chosen, options.recordings))
    jobs: list[Job] = []

    def submitted(job: Job) -> None:
        jobs.append(job)
        shutil.rmtree(pool)

    progress, stop = Progress(quiet=True), Stop()
    status, _ = run_locally(settings, "in.jsonl", resolved, options, None, progress, stop, submitted)
    assert status.job.state in (JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS)
    (job,) = jobs
    job_id = job.id
    assert main(["export", job_id, "--out", "out", "--format", "manifest"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    voices = {(row["example_id"], row["role"]): row["voice"] for row in rows}
    assert set(voices.values()) == {"a", "b"}
    both = {name for name, role in voices if (name, "user") in voices and (name, "assistant") in voices}
    assert both
    assert all(voices[name, "user"] != voices[name, "assistant"] for name in both)
    assert main(["show", job_id, "--out", "out", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    minutes = {
        voice: sum(row["duration"] for row in rows if row["voice"] == voice) / 60
        for voice in shown["minutes_by_voice"]
    }
    assert shown["minutes_by_voice"] == pytest.approx(minutes, abs=1e-6)
    assert set(shown["minutes_by_voice"]) == {row["voice"] for row in rows}
    # A command names no voices of a large pool, and without the lines the rest of the job is still shown.
    monkeypatch.setattr("jobs.cli.jobs.SHOWN_ENTRIES", 1)
    kept = tmp_path / "out" / "jobs" / job_id / "input"
    kept.rename(tmp_path / "kept")
    assert main(["show", job_id, "--out", "out"]) == 0
    shown_text, notes = capsys.readouterr()
    (tmp_path / "kept").rename(kept)
    assert "--voices VOICES" in shown_text
    assert "The minutes of each voice cannot be read: No such file" in notes
    nightjar.find_job(job_id, out="out").report()
    assert main(["report", job_id, "--out", "out", "--to", "r.html", "-q"]) == 0
    assert "Minutes by voice" in Path("r.html").read_text()
    assert open_store(settings.effective_store_url).list(f"jobs/{job_id}/") is not None
