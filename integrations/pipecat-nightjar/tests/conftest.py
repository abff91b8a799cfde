"""A real `nightjar serve --model hibari`, and speech recognition with whisper-base."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from faster_whisper import WhisperModel
from rapidfuzz.distance import Levenshtein
from whisper_base import whisper_folder

ROOT = Path(__file__).parents[3]
#: The interpreter of the server's environment; `make test` sets it.
SERVER_PYTHON = os.environ.get("NIGHTJAR_PYTHON", str(ROOT / ".venv/bin/python"))
#: Maximum time that a test waits for an event, which takes moments on a quiet machine.
PATIENCE_SECONDS = 120.0
WHISPER_RATE = 16_000
PORTS = range(11_000, 12_000)


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def free_port() -> int:
    """A free port that the system assigns to no other connection, so that it is still free when a server
    restarts."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("No port is free.")


class NightjarServer:
    """The server in its own process. It keeps its port when it restarts."""

    def __init__(self, folder: Path, model: str = "hibari", **variables: str) -> None:
        self._folder = folder
        self._model = model
        self._variables = variables
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.websocket_url = f"ws://127.0.0.1:{self.port}/tts/websocket"
        self._process: subprocess.Popen[str] | None = None

    def start(self, wait: bool = True) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SPEECH_")}
        state = {
            "XDG_STATE_HOME": str(self._folder),
            "XDG_CACHE_HOME": str(self._folder),
            "PYTHONPATH": str(ROOT),
        }
        program = Path(__file__).with_name("seeded_server.py")
        command = [
            SERVER_PYTHON,
            "-P",
            str(program),
            "serve",
            "--model",
            self._model,
            "--port",
            str(self.port),
            "--quiet",
        ]
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                command,
                env=clean | state | self._variables,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                text=True,
            )
        if wait:
            wait_until(self.is_ready)

    def is_ready(self) -> bool:
        return self._health() == 200

    def is_loading(self) -> bool:
        """Whether it answers, but has not loaded its model."""
        return self._health() == 503

    def _health(self) -> int | None:
        """The status of its health; None while it does not answer."""
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "server.log").read_text()[-3000:]
        try:
            return self._get("/health")[0]
        except OSError:
            return None

    def kill(self) -> None:
        """Ends the server like a crash: no connection is closed properly."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def stop(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(120)

    def metrics(self) -> dict[str, float]:
        """The samples without labels, by name."""
        return {
            name: float(value) for name, value in re.findall(r"(?m)^(\w+) (\S+)$", self._get("/metrics")[1])
        }

    def is_idle(self) -> bool:
        """Whether nothing holds a slot or waits for one, in the server and in the engine."""
        now = self.metrics()
        names = (
            "speech_server_running",
            "speech_server_waiting",
            "speech_engine_batch_size",
            "speech_engine_waiting",
        )
        return all(now[name] == 0 for name in names)

    def post(self, path: str, body: dict[str, Any]) -> str:
        """The answer to a request without a key."""
        return self._ask("POST", path, json.dumps(body), {"content-type": "application/json"})[1]

    def _get(self, path: str) -> tuple[int, str]:
        key = self._variables.get("SPEECH_SERVE__API_KEY")
        return self._ask("GET", path, None, {"Authorization": f"Bearer {key}"} if key else {})

    def _ask(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NightjarServer]:
    """A server that tests share. Each test leaves it idle."""
    running = NightjarServer(tmp_path_factory.mktemp("server"))
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def chinese_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NightjarServer]:
    """A server whose small model reads any text, and does not know when it says a word."""
    if subprocess.run([SERVER_PYTHON, "-c", "import torch"], capture_output=True, check=False).returncode:
        pytest.skip("The server's environment has no PyTorch.")
    folder = tmp_path_factory.mktemp("chinese")
    whole = [SERVER_PYTHON, "-m", "tests.support.golden_checkpoint"]
    golden = ROOT / "tests/golden/qwen3_tts/checkpoint-custom"
    subprocess.run([*whole, str(golden), str(folder / "model")], cwd=ROOT, check=True)
    running = NightjarServer(folder, str(folder / "model"))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NightjarServer]:
    """A server that a test may kill and start again."""
    running = NightjarServer(tmp_path)
    running.start()
    yield running
    running.stop()


class Ears:
    """Speech recognition with whisper-base. Texts of tests have no word that can also be written as two
    words, such as `notebook`, because whisper writes either."""

    def __init__(self) -> None:
        self._model = WhisperModel(str(whisper_folder()), device="cpu", compute_type="int8", cpu_threads=1)

    def text(self, audio: bytes, rate: int) -> str:
        """The words in 16-bit mono PCM."""
        samples = np.frombuffer(audio, np.int16).astype(np.float32) / 32768
        segments, _ = self._model.transcribe(
            soxr.resample(samples, rate, WHISPER_RATE), language="en", beam_size=1
        )
        return " ".join(segment.text for segment in segments)

    def word_error_rate(self, audio: bytes, rate: int, text: str) -> float:
        """The number of edits of words, divided by the number of words of `text`."""
        expected = words(text)
        return Levenshtein.distance(expected, words(self.text(audio, rate))) / len(expected)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


@pytest.fixture(scope="session")
def ears() -> Ears:
    return Ears()
