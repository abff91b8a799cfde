"""A job over a Qwen3-TTS checkpoint folder: two shards in one running batch, and audio that does not
depend on order or company."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_kit import run_command
from tests.support.golden_checkpoint import whole
from tests.support.run_kit import until

CHECKPOINT = whole(Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-design")
LINES = 18


def environment_of_run() -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
    return environment | {
        "OMP_NUM_THREADS": "1",
        "NIGHTJAR_TIMES__SHARD_ITEMS": "6",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }


def nightjar_run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`nightjar run` over the folder's input.jsonl."""
    return run_command(
        folder,
        ["run", "input.jsonl", "--model", str(CHECKPOINT), "--seed", "7", "--json", *options],
        environment_of_run(),
    )


def processes_of(folder: Path) -> list[str]:
    """Commands of processes that work for the folder's home."""
    mark = f"SPEECH_HOME={folder / 'out'}\0".encode()
    found: list[str] = []
    for process in Path("/proc").iterdir():
        try:
            if mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().decode())
        except OSError:
            continue
    return found


def write_lines(folder: Path, numbers: list[int]) -> None:
    folder.mkdir()
    with (folder / "input.jsonl").open("w") as file:
        for number in numbers:
            messages = [
                ["system", "text", "A calm voice."],
                ["user", "text", f"This is line {number}, and it goes on for a bit."],
            ]
            file.write(json.dumps({"example_id": f"line-{number}", "messages": messages}) + "\n")


def run_job(folder: Path, numbers: list[int], *options: str) -> dict[str, bytes]:
    """Runs `nightjar run` over these lines; the WAV file of each example."""
    write_lines(folder, numbers)
    done = nightjar_run(folder, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["items"]["done"], summary["items"]["failed"]) == (len(numbers), 0)
    rows = query(
        folder,
        "select i.example_id, a.key from artifacts a join items i on i.job_no = a.job_no and i.idx = a.idx",
    )
    return {name: (folder / "out" / key).read_bytes() for name, key in rows if key.endswith(".wav")}


def query(folder: Path, sql: str) -> list[Any]:
    with sqlite3.connect(folder / "out" / ".nightjar" / "ledger.sqlite") as ledger:
        return ledger.execute(sql).fetchall()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """The folder of a finished job, and its audio."""
    folder = tmp_path_factory.mktemp("qwen3") / "first"
    return folder, run_job(folder, list(range(LINES)))


def test_dialogues_in_shards_and_again_in_another_order(
    finished: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    folder, audio = finished
    assert len(audio) == LINES
    assert len(set(audio.values())) == LINES
    attempts = query(folder, "select started_at, ended_at from attempts order by started_at")
    assert len(attempts) >= 2
    assert any(later[0] < earlier[1] for earlier, later in pairwise(attempts)), (
        "the shards ran one after the other"
    )
    few = list(range(LINES - 1, 0, -5))
    again = run_job(tmp_path / "second", few)
    assert again == {f"line-{number}": audio[f"line-{number}"] for number in few}


def test_a_worker_that_opens_its_model_ahead_touches_nothing_of_a_refused_file(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_text('{"example_id": "a", "messages": []}\n')
    refused = nightjar_run(tmp_path, "--on-error", "abort")
    assert refused.returncode not in (0, 1), refused.stderr
    assert "Traceback" not in refused.stderr
    assert query(tmp_path, "select count(*) from workers") == [(0,)]
    until(lambda: not processes_of(tmp_path), "processes are left", 60)


def test_a_finished_job_that_is_given_again_needs_no_worker(finished: tuple[Path, dict[str, bytes]]) -> None:
    folder, _ = finished
    again = nightjar_run(folder)
    assert again.returncode == 0, again.stderr
    assert query(folder, "select count(*) from workers") == [(1,)], "the second run's worker was never let go"
    until(lambda: not processes_of(folder), "processes are left", 60)


def test_codes_survive_a_kill_and_decode_later_to_the_audio_of_a_job_of_audio(tmp_path: Path) -> None:
    audio = run_job(tmp_path / "audio", list(range(12)))
    folder = tmp_path / "codes"
    write_lines(folder, list(range(12)))
    command = ["run", "input.jsonl", "--model", str(CHECKPOINT), "--seed", "7", "--output", "codes"]
    killed = subprocess.Popen(
        [sys.executable, "-m", "jobs", *command],
        cwd=folder,
        env=environment_of_run(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until(lambda: any(folder.rglob("*.safetensors")), "no codes were stored", 240)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    until(lambda: not processes_of(folder), "processes are left", 60)
    done = nightjar_run(folder, "--output", "codes")
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["items"]["done"], summary["items"]["failed"]) == (12, 0)
    assert (summary["audio"], Path(summary["codes"]).name) == (None, "codes")
    verified = run_command(
        folder, ["verify", summary["job"], "--out", "out", "--sample", "2"], environment_of_run()
    )
    assert verified.returncode == 0, verified.stderr
    report = run_command(folder, ["report", summary["job"], "--out", "out"], environment_of_run())
    assert report.returncode == 0, report.stderr
    decoded = run_command(
        folder, ["decode", summary["job"], "--out", "out", "--to", "decoded"], environment_of_run()
    )
    assert decoded.returncode == 0, decoded.stderr
    lines = [json.loads(line) for line in (folder / "decoded" / "manifest.jsonl").read_text().splitlines()]
    found = {line["example_id"]: (folder / "decoded" / line["audio_filepath"]).read_bytes() for line in lines}
    assert found == audio
    # In other batches, and with other outputs, the model's own log probabilities are the same.
    measured = log_probabilities(folder)
    assert len(measured) == 12
    assert all(lowest <= mean < 0 for mean, lowest in measured.values())
    assert measured == log_probabilities(tmp_path / "audio")


def log_probabilities(folder: Path) -> dict[str, tuple[float, float]]:
    """The scores of each example's draw."""
    rows = query(
        folder,
        "select i.example_id, d.scores from draws d join items i on i.job_no = d.job_no and i.idx = d.idx",
    )
    scores = [(name, json.loads(text)) for name, text in rows]
    return {name: (own["log_probability"][0], own["lowest_log_probability"][0]) for name, own in scores}
