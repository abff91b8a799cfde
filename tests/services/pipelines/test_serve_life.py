"""What a server does when it is full, when clients leave, when its engine is away, and when it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from pipelines.errors import ErrorCode, ModelError
from pipelines.serving.model import SUBMIT_THREADS
from tests.support.fake_dialogues import DialoguePipeline
from tests.support.fakes import FakePipeline
from tests.support.serving_kit import PATIENCE_SECONDS, Running, b64, error_of, wav

CHAT = "/v1/chat/completions"
AUDIO = {"mode": "text_audio"}
LONG = "[[long]] Never."


@pytest.fixture
def pipeline() -> Iterator[DialoguePipeline]:
    pipeline = DialoguePipeline(slots=4)
    yield pipeline
    pipeline.close()


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "dialogues",
        "messages": [{"role": "user", "content": text}],
        "vllm_xargs": AUDIO,
        **fields,
    }


def raw_request(server: Running, view: dict[str, Any]) -> socket.socket:
    """A request whose socket the test holds."""
    data = json.dumps(view).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    connection.sendall(
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    connection.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return connection


def in_thread(pool: ThreadPoolExecutor, server: Running, text: str, **fields: Any) -> Future[httpx2.Response]:
    return pool.submit(
        lambda: httpx2.post(
            server.url + CHAT, json=body(text, **fields), timeout=PATIENCE_SECONDS, trust_env=False
        )
    )


def test_a_full_queue_says_when_to_come_back_and_serves_in_order(pipeline: DialoguePipeline) -> None:
    with Running(pipeline, slots=1, waiting_room=2) as server, ThreadPoolExecutor(3) as pool:
        first = raw_request(server, body(LONG))
        server.until(lambda: server.metrics()["speech_server_running"] == 1)
        asked = []
        for number in range(2):
            asked.append(in_thread(pool, server, f"Number {number}."))
            server.until(lambda count=number + 1: server.metrics()["speech_server_waiting"] == count)
        refused = server.chat({"role": "user", "content": "Late."})
        assert (refused.status_code, error_of(refused)["type"]) == (429, "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        first.close()
        assert [answer.result(PATIENCE_SECONDS).status_code for answer in asked] == [200, 200]
        assert [request.messages[0].content for request in pipeline.seen] == [LONG, "Number 0.", "Number 1."]
        server.until_idle()


def test_a_server_hands_its_engine_what_runs_and_waits_there() -> None:
    """Two run and three wait in the engine, two wait in the server, and one is refused."""
    pipeline = FakePipeline(seconds=1000, slots=2, waiting_room=3)
    with Running(pipeline, slots=None, waiting_room=2) as server, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.speak) for _ in range(8)]
        server.until(lambda: server.busy() == (5, 2, 2, 3))
        server.until(lambda: sum(answer.done() for answer in answers) == 1)
        assert next(answer for answer in answers if answer.done()).result().status_code == 429
        pipeline.close()
        assert all(answer.result().status_code != 200 for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slot(pipeline: DialoguePipeline, stream: bool) -> None:
    with Running(pipeline, slots=2, waiting_room=4) as server:
        running = [raw_request(server, body(LONG, stream=stream)) for _ in range(2)]
        server.until(lambda: server.busy()[0] == 2 and server.busy()[2] == 2)
        waiting = [raw_request(server, body(LONG, stream=stream)) for _ in range(3)]
        server.until(lambda: server.busy()[1] == 3)
        waiting[1].close()
        server.until(lambda: server.busy()[1] == 2)
        if stream:
            assert all(b"200 OK" in connection.recv(1000) for connection in running)
        for connection in (*running, waiting[0], waiting[2]):
            connection.close()
        server.until_idle()
        assert (
            server.metrics()[f"speech_http_requests_total{{route={CHAT},status={200 if stream else 499}}}"]
            >= 2
        )
        assert server.chat({"role": "user", "content": "Next."}).status_code == 200


def test_requests_that_wait_for_room_in_the_engine_can_be_given_up(pipeline: DialoguePipeline) -> None:
    pipeline.room, pipeline.slots = 1, 1
    with Running(pipeline, slots=40, waiting_room=0) as server:
        crowd = {f"{LONG} {number}": raw_request(server, body(f"{LONG} {number}")) for number in range(40)}
        # One runs, one waits in the engine, and each thread that submits has one more to submit.
        server.until(lambda: server.busy()[0] == 40 and len(pipeline.seen) == 2 + SUBMIT_THREADS)
        submitted = {str(request.messages[0].content) for request in pipeline.seen}
        for text in crowd.keys() - submitted:
            crowd[text].close()
        server.until(lambda: server.busy()[0] == len(submitted))
        for text in submitted:
            crowd[text].close()
        server.until_idle()
        assert len(pipeline.seen) == len(submitted), "those that had not been submitted yet never were"


def test_time_is_bounded(pipeline: DialoguePipeline) -> None:
    with Running(pipeline, request_seconds=0.3) as server:
        late = server.http.post(CHAT, json=body(LONG))
        assert (late.status_code, error_of(late)["code"]) == (504, "synth.timeout")
        said: list[str] = []
        with (
            suppress(httpx2.TransportError),
            server.http.stream("POST", CHAT, json=body(LONG, stream=True)) as answer,
        ):
            said += answer.iter_lines()
        assert not any("[DONE]" in line for line in said)
        server.until_idle()


def test_the_time_of_a_body_is_bounded(pipeline: DialoguePipeline) -> None:
    with Running(pipeline, body_seconds=0.3) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as slow:
            slow.sendall(
                b"POST "
                + CHAT.encode()
                + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 1000\r\n\r\n{"
            )
            assert b"HTTP/1.1 408" in slow.recv(4000)
        server.until_idle()


def test_a_dead_engine_is_503_until_it_is_back(pipeline: DialoguePipeline) -> None:
    with Running(pipeline) as server, ThreadPoolExecutor(6) as pool:
        flying = [in_thread(pool, server, LONG) for _ in range(6)]
        server.until(lambda: sum(server.busy()[2:]) == 6)
        pipeline.die()
        for future in flying:
            answer = future.result(PATIENCE_SECONDS)
            assert (answer.status_code, error_of(answer)["code"]) == (503, "synth.engine")
            assert "/secret/place" not in answer.text
        assert (server.health(), server.metrics()["speech_engine_up"]) == (503, 0)
        away = server.chat({"role": "user", "content": "Hello?"})
        assert (away.status_code, error_of(away)["code"]) == (503, "engine_starting")
        assert away.headers["retry-after"]
        pipeline.state = "ready"
        assert server.health() == 200
        assert server.chat({"role": "user", "content": "Hello?"}).status_code == 200
        server.until_idle()


def test_an_engine_that_is_given_up_is_opened_again(pipeline: DialoguePipeline) -> None:
    second = DialoguePipeline()
    opened: list[DialoguePipeline] = []
    faults = [ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, "The disk is away.")]

    def open_model() -> DialoguePipeline:
        if opened and faults:
            raise faults.pop()
        opened.append(second if opened else pipeline)
        return opened[-1]

    with Running(pipeline, open_model=open_model) as server:
        pipeline.state = "broken"
        server.until(lambda: len(opened) == 2)
        server.until(lambda: server.health() == 200)
        assert server.chat({"role": "user", "content": "Hello?"}).status_code == 200
        assert (len(second.seen), pipeline.closed, faults) == (1, True, [])


def test_a_model_that_loads_is_503_and_one_that_cannot_ends_the_server(pipeline: DialoguePipeline) -> None:
    loaded = threading.Event()

    def open_model() -> DialoguePipeline:
        loaded.wait(PATIENCE_SECONDS)
        return pipeline

    with Running(pipeline, wait=False, open_model=open_model) as server:
        server.until(lambda: server.health() == 503)
        assert server.http.get("/health").json() == {"status": "starting"}
        assert server.http.get("/v1/models").status_code == 200
        assert error_of(server.chat({"role": "user", "content": "Hello?"}))["code"] == "engine_starting"
        loaded.set()
        server.until(lambda: server.health() == 200)

    def fail() -> DialoguePipeline:
        raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, "There is a tensor too many.")

    failing = Running(pipeline, wait=False, open_model=fail)
    with pytest.raises(ModelError):
        failing.server.run()


def test_what_is_under_way_is_finished_before_the_end(pipeline: DialoguePipeline) -> None:
    with Running(pipeline, slots=1) as server, ThreadPoolExecutor(2) as pool:
        flying = [in_thread(pool, server, "[[held]] Slow.", stream=stream) for stream in (True, False)]
        server.until(lambda: server.busy()[:2] == (1, 1))
        idle = server.http
        server.server.served[0].admission.closed = True
        assert idle.get("/health").json() == {"status": "draining"}
        assert idle.post(CHAT, json=body("Late.")).status_code == 503
        server.server.stop()
        server.until(lambda: server.health() == 0)
        assert not any(future.done() for future in flying)
        pipeline.let_go()
        answers = [future.result(PATIENCE_SECONDS) for future in flying]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert any("[DONE]" in answer.text for answer in answers)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(server.url + "/health", trust_env=False)


def test_the_end_waits_no_longer_than_it_was_told_to(pipeline: DialoguePipeline) -> None:
    with Running(pipeline, drain_seconds=0.3) as server:
        connection = raw_request(server, body(LONG))
        server.until(lambda: server.busy()[2] == 1)
        server.stop()
        connection.close()
        server.until(lambda: pipeline.aborted == [request.request_id for request in pipeline.seen])


def test_only_those_with_a_key_come_in(pipeline: DialoguePipeline, caplog: pytest.LogCaptureFixture) -> None:
    with (
        Running(pipeline, keys=("hunter2", "other-key")) as server,
        caplog.at_level(logging.DEBUG, logger="pipelines"),
    ):
        for path in ("/metrics", "/v1/models", "/openapi.json", "/nope"):
            assert server.http.get(path).status_code == 401, path
        for header in (
            "",
            "Bearer",
            "Bearer hunter",
            "Bearer hunter22",
            "Basic hunter2",
            "hunter2",
            "Bearer \xff",
        ):
            answer = server.http.post(
                CHAT, json=body("x"), headers={"authorization": header.encode("latin-1")}
            )
            assert (answer.status_code, error_of(answer)["type"]) == (401, "authentication_error"), header
        assert server.http.get("/health").status_code == 200
        assert (server.http.head("/health").status_code, server.http.head("/health").content) == (200, b"")
        for header in ("Bearer hunter2", "bearer other-key", "Bearer  hunter2"):
            assert (
                server.http.post(CHAT, json=body("x"), headers={"authorization": header}).status_code == 200
            ), header
        assert len(pipeline.seen) == 3
    assert "hunter2" not in caplog.text


async def storm(server: Running, connections: int, rounds: int) -> dict[str, int]:
    """Many clients at once that ask for everything, wrong things too, and some of whom leave in the
    middle."""
    dice = random.Random(5)
    heard = b64(wav(0.2))
    understanding = {**body("x"), "vllm_xargs": {}}
    understanding["messages"] = [
        {
            "role": "user",
            "content": [{"type": "input_audio", "input_audio": {"data": heard, "format": "wav"}}],
        }
    ]
    kinds: list[dict[str, Any]] = [
        {**body("Text."), "vllm_xargs": {}},
        body("Audio. [[steps:20]]"),
        body("Guided. [[steps:20]]", vllm_xargs={**AUDIO, "cfg": 3.0}),
        understanding,
        body("Streamed. [[steps:20]]", stream=True),
        body("[[no_audio]] Mute."),
        body("Bad.", vllm_xargs={"cfg": -1}),
        body("[[fail:synth.no_eos]]", stream=True),
        {"left": body(LONG)},
        {"left": body(LONG, stream=True)},
    ]
    seen: dict[str, int] = {}

    async def one(client: httpx2.AsyncClient) -> None:
        for _ in range(rounds):
            kind = dice.choice(kinds)
            if "left" in kind:
                task = asyncio.create_task(client.post(CHAT, json=kind["left"]))
                await asyncio.sleep(dice.uniform(0, 0.5))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                outcome = "left"
            else:
                outcome = str((await client.post(CHAT, json=kind)).status_code)
            seen[outcome] = seen.get(outcome, 0) + 1

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=server.url, timeout=PATIENCE_SECONDS, limits=limits, trust_env=False
    ) as client:
        await asyncio.gather(*(one(client) for _ in range(connections)))
    return seen


def test_a_storm_of_clients_leaves_every_slot_free(pipeline: DialoguePipeline) -> None:
    with Running(pipeline, slots=6, waiting_room=600, stream_queue_seconds=3000.0) as server:
        seen = asyncio.run(storm(server, 96, 6))
        assert set(seen) <= {"200", "400", "422", "left"}, seen
        assert seen["left"] > 50
        server.until_idle()
        held = [raw_request(server, body(LONG)) for _ in range(6)]
        server.until(lambda: server.busy()[0] == 6)
        for connection in held:
            connection.close()
        server.until_idle()
        with ThreadPoolExecutor(6) as pool:
            asked = [in_thread(pool, server, "[[steps:50]] All at once.") for _ in range(6)]
            assert [future.result(PATIENCE_SECONDS).status_code for future in asked] == [200] * 6
        server.until_idle()
