"""The demo, as a new user runs it: it gets a question as a WAV file, and its answer can be understood."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from conftest import ROOT, SERVER_PYTHON, Ears, NightjarServer, words
from run import parse_arguments
from stub_llm import answer

DEMO = ROOT / "examples/voice_agent"
QUESTION = "What can you tell me about the weather in the mountains?"


def environment(folder: Path) -> dict[str, str]:
    """The environment of a new user, with its own state folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SPEECH_", "OPENAI_"))}
    own = {
        "NIGHTJAR_PYTHON": SERVER_PYTHON,
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(folder),
        "XDG_CACHE_HOME": str(folder),
    }
    return clean | own


def run(folder: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of the README outside of the checkout."""
    command = [sys.executable, DEMO / "run.py", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder) | variables,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


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


def test_a_machine_without_sound_devices_says_so(tmp_path: Path) -> None:
    # Without the system's sound configuration a process has no device, even if the machine has one.
    done = run(tmp_path, "--microphone", ALSA_CONFIG_PATH=str(tmp_path), PULSE_SERVER="none")
    assert done.returncode == 1
    assert re.search(
        r"(?m)^(This machine has no sound device for input\.|The microphone needs PortAudio\.) ", done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--browser", "--microphone"], ["question.wav", "--browser"]])
def test_there_is_one_way_to_talk(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert "one of the three" in capsys.readouterr().err


def test_what_is_wrong_is_said_in_a_sentence(server: NightjarServer, tmp_path: Path) -> None:
    question = DEMO / "question.wav"
    nowhere = (question, "--server", "http://127.0.0.1:1")
    for arguments in (("nothing.wav",), (question, "--server", server.url, "--voice", "nobody"), nowhere):
        done = run(tmp_path, *arguments)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert re.search(r"nothing\.wav|unknown_voice|No speech server answers at", done.stderr)
