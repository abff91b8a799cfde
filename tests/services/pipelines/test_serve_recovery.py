"""What a server does when its engine is killed: requests that have sent nothing are tried again, once."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil

from pipelines.errors import EngineCrashError, ErrorCode
from pipelines.request import AudioChunk, EngineStats, SynthesisRequest
from tests.services.pipelines.test_serve_process import LONG, metrics, serving, speak, until
from tests.support.serving_kit import PATIENCE_SECONDS, Running, error_of
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import talk

CRASH = "The engine's process ended by signal 9 (SIGKILL)."


class Mortal(StreamVoice):
    """Dies at a text with `die`: before its first chunk, or after it if the text has `late`."""

    def __init__(self, **capabilities: object) -> None:
        super().__init__(**capabilities)
        self.died, self.begun, self.may_die = threading.Event(), threading.Event(), threading.Event()
        self.may_die.set()

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        text = str(request.messages[-1].content)
        dies = "die" in text and not self.died.is_set()
        chunks = super().stream(request)
        if "late" in text:
            yield next(chunks)
        if dies:
            self.begun.set()
            assert self.may_die.wait(PATIENCE_SECONDS)
            self.died.set()
            raise EngineCrashError(ErrorCode.WORKER_CRASH, CRASH)
        yield from chunks

    def stats(self) -> EngineStats:
        return EngineStats(state="broken") if self.died.is_set() else super().stats()


def reopening(*engines: StreamVoice, wait: Callable[[], object] = lambda: None) -> Callable[[], StreamVoice]:
    """Opens these one after another; `wait` comes before all but the first one."""
    left = list(engines)

    def open_model() -> StreamVoice:
        if len(left) < len(engines):
            wait()
        return left.pop(0)

    return open_model


def pcm(server: Running, text: str) -> httpx2.Response:
    return server.speak(text, response_format="pcm", seed=7)


def test_what_has_sent_nothing_is_tried_again_and_what_has_fails() -> None:
    first, second = Mortal(), StreamVoice()
    with (
        Running(first, open_model=reopening(first, second), slots=1) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        first.may_die.clear()
        asked = [pool.submit(pcm, server, "Please die.")]
        assert first.begun.wait(PATIENCE_SECONDS)
        # They have no slot yet when the engine dies.
        asked += [pool.submit(pcm, server, "Then this.")]
        whole = pool.submit(server.speak, "And this one whole.")
        first.may_die.set()
        assert [answer.result().status_code for answer in (*asked, whole)] == [200, 200, 200]
        assert sorted(second.texts) == ["And this one whole.", "Please die.", "Then this."]
        assert asked[0].result().content == pcm(server, "Please die.").content, "the seed is the same"
        assert server.metrics()["speech_requests_retried_total"] >= 1
        server.until_idle()
    first, second = Mortal(), StreamVoice()
    with Running(first, open_model=reopening(first, second)) as server:
        lines = {"text": "die late", "stream_format": "sse"}
        answer = server.speak(lines["text"], stream_format="sse", response_format="pcm")
        assert "speech.audio.delta" in answer.text
        assert '"code":"worker.crash"' in answer.text
        assert second.requests == []
        assert server.metrics()["speech_requests_retried_total"] == 0
        server.until_idle()


def test_a_request_that_kills_engines_kills_two() -> None:
    engines = [Mortal(), Mortal(), StreamVoice()]
    with Running(engines[0], open_model=reopening(*engines)) as server:
        answer = pcm(server, "Please die.")
        assert (answer.status_code, error_of(answer)["code"]) == (503, "worker.crash")
        assert "retry-after" in answer.headers
        server.until(lambda: server.health() == 200)
        assert engines[2].requests == []
        server.until_idle()


def test_the_wait_for_an_engine_ends_with_the_time_of_the_request() -> None:
    back = threading.Event()
    first = Mortal()
    opened = reopening(first, StreamVoice(), wait=lambda: back.wait(PATIENCE_SECONDS))
    with Running(first, open_model=opened, request_seconds=1.0) as server:
        try:
            answer = pcm(server, "Please die.")
            assert (answer.status_code, error_of(answer)["code"]) == (504, "synth.timeout")
            late = pcm(server, "I came later.")
            assert (late.status_code, error_of(late)["code"]) == (503, "engine_starting")
        finally:
            back.set()
        server.until(lambda: server.health() == 200)
        server.until_idle()


def test_no_new_request_waits_behind_those_that_are_tried_again() -> None:
    opening, back = threading.Event(), threading.Event()

    def wait() -> None:
        opening.set()
        back.wait(PATIENCE_SECONDS)

    first, second = Mortal(), StreamVoice()
    opened = reopening(first, second, wait=wait)
    with Running(first, open_model=opened, slots=1) as server, ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(pcm, server, "Please die.")
            assert opening.wait(PATIENCE_SECONDS)
            late = pcm(server, "I came later.")
            assert (late.status_code, error_of(late)["code"]) == (503, "engine_starting")
            assert "retry-after" in late.headers
            with talk(server.url) as client:
                client.say("late", "I came later too.")
                refused = client.error("late")
                assert (refused["error_code"], refused["status_code"]) == ("engine_starting", 503)
        finally:
            back.set()
        assert asked.result().status_code == 200
        assert second.texts == ["Please die."]
        server.until_idle()


def test_a_growing_text_is_said_whole_by_the_next_engine() -> None:
    first, second = Mortal(), StreamVoice()
    with Running(first, open_model=reopening(first, second)) as server, talk(server.url) as client:
        client.say("a", "Please die. ", more=True, voice={"id": "ada"})
        server.until(lambda: second.texts == ["Please die."])
        client.say("a", "Now go on.")
        assert client.hear("a")
        assert second.texts == ["Please die.", "Now go on."]


def children(server: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of a server, the oldest first."""
    return sorted(psutil.Process(server.pid).children(), key=psutil.Process.create_time)


def test_a_killed_engine_costs_time_and_no_request(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url, log), ThreadPoolExecutor(4) as pool:
        (engine,) = children(process)
        asked = [pool.submit(speak, url, LONG) for _ in range(4)]
        until(lambda: metrics(url)["speech_engine_batch_size"] > 0)
        os.kill(engine.pid, signal.SIGKILL)
        assert [answer.result().status_code for answer in asked] == [200] * 4
        assert 1 <= metrics(url)["speech_requests_retried_total"] <= 4
        assert "by signal 9 (SIGKILL); requests in it:" in log.read_text()


def test_a_spare_process_takes_over_and_its_own_death_is_no_harm(tmp_path: Path) -> None:
    with serving(tmp_path, SPEECH_SERVE__SPARE_PROCESS="true") as (process, url, _):
        until(lambda: len(children(process)) == 2)
        engine, spare = children(process)
        for killed, left in ((engine, spare), (spare, None)):
            # The spare of the second turn dies first, and nobody notices before it is needed.
            for one in children(process)[1:] if left is None else ():
                one.kill()
            killed.kill()
            until(lambda killed=killed: killed.pid not in [one.pid for one in children(process)])
            until(lambda: speak(url, "Hello.").status_code == 200)
            until(lambda: len(children(process)) == 2)
            if left is not None:
                assert children(process)[0].pid == left.pid, "the spare process has become the engine"
