"""The demo, run as a new user would: a question goes in as a WAV file, an answer that can be understood comes out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import soundfile
from conftest import ROOT, SERVER_PYTHON, Ears, NightjarServer, words
from stub_llm import answer

DEMO = ROOT / "examples/voice_agent"
QUESTION = "What can you tell me about the weather in the mountains?"


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command of the README, away from the checkout."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPEECH_", "OPENAI_"))}
    own = {"NIGHTJAR_PYTHON": SERVER_PYTHON, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, DEMO / "run.py", *arguments]
    return subprocess.run(command, cwd=folder, env=clean | own, capture_output=True, text=True, timeout=400, check=False)


def test_a_question_gets_an_answer_that_is_heard(tmp_path: Path, ears: Ears) -> None:
    done = run(tmp_path, DEMO / "question.wav", DEMO / "question.wav", "--to", "answer.wav")
    assert done.returncode == 0, done.stderr
    assert words(re.findall(r"heard: (.*)", done.stdout)[0]) == words(QUESTION)
    assert len(re.findall(r"time to first audio: \d+ ms after the question, \d+ ms of it", done.stdout)) == 2
    assert len(re.findall(r"real-time factor: \d+\.\d+ \(\d+\.\d s of speech\)", done.stdout)) == 2
    samples, rate = soundfile.read(tmp_path / "answer.wav", dtype="int16")
    assert ears.word_error_rate(samples.tobytes(), rate, f"{answer(QUESTION)} {answer(QUESTION)}") <= 0.1


def test_a_server_that_runs_already_is_used(server: NightjarServer, tmp_path: Path, ears: Ears) -> None:
    before = server.metrics()["speech_engine_requests_total"]
    done = run(tmp_path, DEMO / "question.wav", "--server", server.url, "--voice", "heart")
    assert done.returncode == 0, done.stderr
    samples, rate = soundfile.read(tmp_path / "answer.wav", dtype="int16")
    assert ears.word_error_rate(samples.tobytes(), rate, answer(QUESTION)) <= 0.1
    assert server.metrics()["speech_engine_requests_total"] > before


def test_what_is_wrong_is_said_in_a_sentence(server: NightjarServer, tmp_path: Path) -> None:
    for arguments in (("nothing.wav",), (DEMO / "question.wav", "--server", server.url, "--voice", "nobody")):
        done = run(tmp_path, *arguments)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert re.search(r"nothing\.wav|unknown_voice", done.stderr)
