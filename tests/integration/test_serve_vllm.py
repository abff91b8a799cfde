"""A server on a real vLLM: SparkTTS spoken, streamed and cloned, and an engine core that is killed under load."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.vllm_kit import GOLDEN, checkpoint, kill_core, require_vllm

require_vllm()

from pipelines.registry import open_pipeline  # noqa: E402
from tests.serving_kit import Running, b64, error_of, heard  # noqa: E402

#: An engine core takes 10 s to start on quiet cores, and minutes on busy ones.
SECONDS = 420
TEXT = "Good morning, how are you today?"
GREEDY = {"voice": "female/high/low", "temperature": 0.0, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pipeline = open_pipeline(str(checkpoint()), max_context=4096, slots=8, keep_unfinished=True)
    with Running(pipeline, slots=12, waiting_room=40) as running:
        yield running


def test_speech_is_the_same_whole_and_streamed(server: Running) -> None:
    whole = server.speak(TEXT, **GREEDY)
    samples, rate = heard(whole.content)
    assert (whole.status_code, rate) == (200, 16_000)
    streamed = server.speak(TEXT, stream=True, **GREEDY)
    assert len(streamed.content) - 44 == 2 * len(samples)
    cloned = server.speak(TEXT, voice="default", reference_audio=b64((GOLDEN / "wavs/ref_a.wav").read_bytes()), seed=3)
    assert cloned.status_code == 200, cloned.text
    wrong = server.speak(TEXT, voice="robot")
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "voice")
    assert any(name.startswith("vllm:") for name in server.metrics())
    server.until_idle()


def test_a_core_that_is_killed_under_load_is_503_until_the_next_one_is_there(server: Running) -> None:
    before = server.speak(TEXT, **GREEDY).content

    def ask(number: int) -> httpx2.Response:
        # Sequences that a random model does not end by itself, so that they are under way when the core dies.
        view: dict[str, Any] = {"model": server.pipeline.name, "input": TEXT, "seed": number, "max_seconds": 60}
        return httpx2.post(server.url + "/v1/audio/speech", json=view, timeout=SECONDS, trust_env=False)

    with ThreadPoolExecutor(32) as pool:
        flying = [pool.submit(ask, number) for number in range(32)]
        server.until(lambda: server.busy()[1] > 0 and server.busy()[2] > 0, SECONDS)
        kill_core(os.getpid())
        server.until(lambda: server.health() == 503, SECONDS)
        away = server.speak(TEXT, **GREEDY)
        assert (away.status_code, error_of(away)["code"]) == (503, "engine_starting")
        assert away.headers["retry-after"]
        answers = [future.result(SECONDS) for future in flying]
    assert {answer.status_code for answer in answers} <= {200, 422, 503}
    failed = [error_of(answer)["code"] for answer in answers if answer.status_code == 503]
    assert "synth.engine" in failed, "nothing was under way when the core was killed"
    deadline = time.monotonic() + SECONDS
    while server.health() != 200:
        assert time.monotonic() < deadline, "the server did not recover"
        time.sleep(0.1)
    assert server.speak(TEXT, **GREEDY).content == before
    server.until_idle()
