"""A server of several models: requests reach the one that they name, and none is touched by what happens to
another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil
import pytest

from jobs.cli import main
from jobs.engine_process import engine_options
from jobs.settings import load_settings
from pipelines.registry import PUBLISHED, describe
from tests.support.fakes import FakePipeline
from tests.support.serving_kit import PATIENCE_SECONDS, Running, error_of, wait_until
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import talk


@pytest.fixture
def tone() -> StreamVoice:
    return StreamVoice()


@pytest.fixture
def server(tone: StreamVoice) -> Iterator[Running]:
    """The model `fake`, which is the first one, and `tone`, with one slot each."""
    with Running(FakePipeline(), more=[tone], slots=1, waiting_room=0) as running:
        running.until(lambda: running.http.get("/health?model=tone").status_code == 200)
        yield running


def test_a_request_reaches_the_model_that_it_names(server: Running) -> None:
    cards = server.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["capabilities"]["streaming"]) for card in cards] == [
        ("fake", False),
        ("tone", True),
    ]
    assert server.http.get("/v1/models/tone").json() == cards[1]
    assert server.speak(model="tone").headers["x-sample-rate"] == "24000"
    assert server.speak(model="fake").headers["x-sample-rate"] == "16000"
    unknown = error_of(server.speak(model="nobody"))
    assert (unknown["code"], unknown["param"]) == ("model_not_found", "model")
    assert unknown["message"].endswith("The server has: fake, tone.")
    said = {"transcript": "Hello.", "model_id": "nobody"}
    refused = server.http.post("/tts/bytes", json=said)
    assert (refused.status_code, error_of(refused)["param"]) == (404, "model_id")
    assert server.http.post("/tts/bytes", json={**said, "model_id": "tone"}).status_code == 200
    with talk(server.url) as client:
        client.say("a", "Hello.", model_id="tone", voice={"id": "ada"})
        assert client.hear("a")
        client.say("b", "Hello.", model_id="nobody")
        assert client.next("b")["error_code"] == "model_not_found"
    voices = [
        server.http.get(path).json()["voices"] for path in ("/v1/audio/voices", "/v1/audio/voices?model=tone")
    ]
    assert voices == [["sine"], ["ada", "bob"]]
    assert server.http.get("/voices").json()["data"][0]["id"] == "sine"
    assert server.http.get("/v1/audio/voices?model=nobody").status_code == 404


def test_each_model_has_its_own_limits_metrics_and_state(server: Running, tone: StreamVoice) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(server.speak, "hold", model="tone", response_format="pcm")
        try:
            server.until(lambda: server.metrics()["speech_server_running{model=tone}"] == 1)
            assert server.speak(model="tone").status_code == 429
            assert server.speak(model="fake").status_code == 200
            server.until(lambda: server.metrics()["speech_server_running{model=fake}"] == 0)
            now = server.metrics()
            assert now["speech_server_running{model=tone}"] == 1
            assert now["speech_audio_seconds_total{model=fake}"] > 0.0
            assert now["speech_engine_slots{model=fake}"] == 8
            assert now["speech_http_requests_total{route=/v1/audio/speech,status=429}"] == 1
            states = {"fake": "ready", "tone": "ready"}
            assert server.http.get("/health").json() == {"status": "ready", "models": states}
        finally:
            tone.let_go()
        assert held.result().status_code == 200


def test_the_death_of_one_engine_leaves_the_other_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jobs", "serve", "--port", "0", "--json"]
    command += ["--model", "hibari", "--model", "hibari", "--name", "first", "--name", "second"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=2, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            http = httpx2.Client(base_url=url, timeout=PATIENCE_SECONDS, trust_env=False)

            def states() -> list[int]:
                return [
                    http.get("/health", params={"model": name}).status_code for name in ("first", "second")
                ]

            def speaks(model: str) -> int:
                return http.post("/v1/audio/speech", json={"model": model, "input": "Hello."}).status_code

            wait_until(lambda: states() == [200, 200])
            engines = [
                one
                for one in psutil.Process(process.pid).children()
                if "jobs.engine_process" in one.cmdline()
            ]
            assert len(engines) == 2
            os.kill(engines[0].pid, signal.SIGKILL)
            wait_until(lambda: 503 in states())
            dead = states().index(503)
            assert http.get("/health").status_code == 200, "the other one takes requests"
            assert speaks(("first", "second")[1 - dead]) == 200
            wait_until(lambda: states() == [200, 200])
            assert speaks(("first", "second")[dead]) == 200
            http.close()
        finally:
            process.terminate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "hibari", "--model", "hibari"),
        ("--model", "hibari", "--model", "hibari", "--name", "one"),
        ("--model", "hibari", "--model", "hibari", "--name", "one", "--name", "one"),
        ("--model", "hibari", "--name", ""),
        ("--model", "hibari", "--name", "one", "--name", "two\n"),
    ],
)
def test_names_tell_models_apart(capfd: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert main(["serve", "--json", *words]) == 4
    assert json.loads(capfd.readouterr().err)["error"]["code"] == "config.invalid"


def test_models_share_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, card = load_settings(), PUBLISHED["qwen3-tts-0.6b-base"][2]
    monkeypatch.setattr("pipelines.options.DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert engine_options(settings, card, 2)["memory_share"] == 0.45
    assert "memory_share" not in engine_options(settings, card)
    assert "memory_share" not in engine_options(settings, describe("hibari"), 2), "it uses no GPU"
    chosen = load_settings(engine={"memory_share": 0.3})
    assert engine_options(chosen, card, 2)["memory_share"] == 0.3
