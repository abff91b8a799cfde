"""Streams of a server whose engine is a process of its own: what is measured, who hangs up, and an engine
that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from pipelines.engine_process.client import EngineProcess
from tests.support import streaming_fake
from tests.support.native_plugin import installed
from tests.support.serving_kit import PATIENCE_SECONDS, Running, error_of
from tests.support.websocket_kit import talk

SPEECH = "/v1/audio/speech"
#: A stream that goes on for longer than any test.
ENDLESS = "[[chunks:9]] [[seconds:600]]"
#: One that comes further all the time.
LIVELY = "[[chunks:100000]] [[seconds:0.1]]"


class Engines:
    """Opens the engine of a server, again and again if need be."""

    def __init__(self) -> None:
        self.opened: list[EngineProcess] = []

    def open(self) -> EngineProcess:
        self.opened.append(EngineProcess(streaming_fake.NAME))
        return self.opened[-1]

    @property
    def pid(self) -> int:
        pid = self.opened[-1].pid
        assert pid is not None
        return pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    for name, value in installed(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
    engines = Engines()
    yield engines
    for one in engines.opened:
        one.close()


def serving(engines: Engines, **options: Any) -> Running:
    first = [engines.open()]
    return Running(first[0], open_model=lambda: first.pop() if first else engines.open(), **options)


def head(text: str, **fields: Any) -> tuple[bytes, bytes]:
    """The head and the body of a request."""
    body = json.dumps(
        {"model": streaming_fake.NAME, "input": text, "response_format": "pcm", **fields}
    ).encode()
    return (
        f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode(),
        body,
    )


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)


def asked(server: Running, text: str, **fields: Any) -> socket.socket:
    connection = connect(server)
    connection.sendall(b"".join(head(text, **fields)))
    return connection


def answer(connection: socket.socket) -> bytes:
    """All bytes up to the end of the connection."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def test_a_requests_time_begins_with_its_first_byte(engines: Engines) -> None:
    with serving(engines) as server:
        with connect(server) as connection:
            first, body = head("hello")
            connection.sendall(first[:10])
            # The server has them once it answers another client.
            assert server.health() == 200
            began = time.monotonic()
            time.sleep(0.2)
            sent_after = time.monotonic() - began
            connection.sendall(first[10:] + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            server.until(
                lambda: server.metrics().get(f"speech_first_audio_seconds_count{{route={SPEECH}}}") == 1
            )
            found = server.metrics()
        assert found[f"speech_first_audio_seconds_sum{{route={SPEECH}}}"] >= sent_after
        assert f"speech_first_audio_seconds_bucket{{le=0.005,route={SPEECH}}}" in found
        assert found["speech_queue_seconds_count"] == 1
        assert found["speech_stream_underruns_total"] == 0


def test_a_late_chunk_is_an_underrun(engines: Engines) -> None:
    """Chunks of 20 ms come 200 ms apart."""
    with serving(engines) as server:
        assert server.speak("[[chunks:3]] [[seconds:0.2]]", response_format="pcm").status_code == 200
        found = server.metrics()
        assert found["speech_stream_underruns_total"] == 2
        seconds = found["speech_stream_underrun_seconds_total"]
        assert seconds > 0.2
        server.server.served[0].on_underrun(0.25)
        assert server.metrics()["speech_stream_underrun_seconds_total"] == pytest.approx(seconds + 0.25)


def test_the_server_reopens_an_engine_that_is_killed_under_a_hundred_streams(
    engines: Engines, tmp_path: Path
) -> None:
    recording = tmp_path / "recording"
    with serving(engines, slots=100) as server, ExitStack() as stack:
        speaking = [stack.enter_context(asked(server, ENDLESS)) for _ in range(99)]
        for connection in speaking:
            assert connection.recv(12) == b"HTTP/1.1 200"
        silent = stack.enter_context(asked(server, f"[[encode:{recording}]]"))
        server.until(lambda: server.busy()[0] == 100 and server.busy()[2] == 99)
        engines.kill()
        # The status is out: the connection breaks off. Chunked answers that end well end in an empty chunk.
        assert not any(answer(connection).endswith(b"\r\n0\r\n\r\n") for connection in speaking)
        # What has sent nothing is said by the next engine.
        server.until(lambda: len(engines.opened) == 2 and server.health() == 200)
        recording.touch()
        said = HTTPResponse(silent)
        said.begin()
        assert said.status == 200
        assert said.read()
        assert server.metrics()["speech_requests_retried_total"] == 1
        server.until_idle()
        assert server.speak("hello", response_format="pcm").status_code == 200


def test_an_engine_that_is_frozen_is_replaced_and_its_clients_hear_of_it(engines: Engines) -> None:
    with serving(engines, stuck_seconds=2.0) as server, talk(server.url) as client:
        with (
            asked(server, LIVELY, stream_format="sse") as events,
            asked(server, "[[encode:/nowhere/at/all]]") as silent,
        ):
            client.say("c", LIVELY)
            server.until(lambda: server.busy()[0] == 3)
            os.kill(engines.pid, signal.SIGSTOP)
            data = b""
            while b"synth.aborted" not in data:
                data += silent.recv(1 << 16)
            assert data.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after" in data
            data = b""
            while b"synth.aborted" not in data:
                data += events.recv(1 << 16)
            assert b"speech.audio.done" not in data
            while (said := client.next("c"))["type"] == "chunk":
                continue
            assert (said["type"], said["error_code"], said["status_code"]) == ("error", "synth.aborted", 503)
        server.until(lambda: len(engines.opened) == 2 and server.health() == 200)
        assert server.speak("hello", response_format="pcm").status_code == 200
        server.until_idle()


def test_clients_that_come_and_leave_keep_no_frozen_engine(engines: Engines) -> None:
    with serving(engines, stuck_seconds=2.0) as server, asked(server, LIVELY) as listener:
        assert listener.recv(12) == b"HTTP/1.1 200"
        os.kill(engines.pid, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(engines.opened) < 2:
            assert time.monotonic() < deadline, "it is still there"
            with asked(server, LIVELY), asked(server, "hello", voice="nobody"):
                time.sleep(0.3)
        server.until(lambda: server.health() == 200)


def test_an_event_stream_says_why_it_broke(engines: Engines) -> None:
    with serving(engines) as server, asked(server, ENDLESS, stream_format="sse") as connection:
        server.until(lambda: server.busy()[2] == 1)
        data = b""
        while b"speech.audio.delta" not in data:
            data += connection.recv(1 << 16)
        engines.kill()
        while b"worker.crash" not in data:
            data += connection.recv(1 << 16)
        assert b"speech.audio.done" not in data


def test_while_the_engine_is_away_requests_are_told_when_to_come_back(engines: Engines) -> None:
    with serving(engines) as server:
        engines.kill()
        server.until(lambda: server.health() == 503)
        refused = server.speak("hello", response_format="pcm")
        if refused.status_code != 200:
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert error_of(refused)["code"] in ("engine_starting", "model.unreachable")
        server.until(lambda: server.health() == 200)
        assert server.speak("hello", response_format="pcm").status_code == 200


@pytest.mark.parametrize("text", [ENDLESS, "[[encode:/nowhere/at/all]]"])
def test_a_client_that_hangs_up_frees_its_slot_wherever_its_stream_is(engines: Engines, text: str) -> None:
    """Mid-stream, or while its recording is being encoded; the third waits for a slot."""
    with serving(engines, slots=2) as server:
        connections = [asked(server, text) for _ in range(3)]
        server.until(lambda: server.busy()[:2] == (2, 1))
        for connection in connections:
            connection.close()
        server.until_idle()


def test_a_client_that_reads_nothing_keeps_no_slot_and_can_hang_up(engines: Engines) -> None:
    """Its stream is longer than what sockets hold; the engine makes it, the server keeps it, and the slot
    is free."""
    with serving(engines, slots=1) as server, asked(server, "[[chunks:40000]]") as slow:
        server.until(lambda: server.metrics()["speech_engine_requests_total"] == 1)
        server.until_idle()
        assert server.speak("hello", response_format="pcm").status_code == 200
        assert slow.recv(12) == b"HTTP/1.1 200"
        slow.close()
        counted = f"speech_http_requests_total{{route={SPEECH},status=200}}"
        server.until(lambda: server.metrics().get(counted) == 2)


def test_a_stream_that_would_wait_for_long_is_refused_and_a_file_waits(engines: Engines) -> None:
    with serving(engines, slots=1, waiting_room=8, stream_queue_seconds=0.3) as server, ExitStack() as stack:
        speaking = stack.enter_context(asked(server, ENDLESS))
        assert speaking.recv(12) == b"HTTP/1.1 200"
        file = stack.enter_context(asked(server, "hello", response_format="wav", stream=False))
        server.until(lambda: server.busy()[1] == 1)
        # A slot is held for a second, as far as anyone knows.
        refused = server.speak("hello", response_format="pcm")
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        speaking.close()
        assert file.recv(12) == b"HTTP/1.1 200"


def test_a_stream_that_waited_for_long_is_refused(engines: Engines) -> None:
    with (
        serving(engines, slots=1, waiting_room=8, stream_queue_seconds=1.5) as server,
        asked(server, ENDLESS) as speaking,
    ):
        assert speaking.recv(12) == b"HTTP/1.1 200"
        began = time.monotonic()
        refused = server.speak("hello", response_format="pcm")
        assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
        assert time.monotonic() - began >= 1.5, "it was expected to wait for a second"
        assert server.busy()[1] == 0


def counts(engines: Engines) -> list[int]:
    """Threads and descriptors of the server's process and of its engine's."""
    pids = (os.getpid(), engines.opened[0].pid)
    return [len(os.listdir(f"/proc/{pid}/{kind}")) for pid in pids for kind in ("task", "fd")]


def test_streams_that_are_cancelled_at_any_moment_leave_nothing_behind(engines: Engines) -> None:
    """2,000 streams, 50 at a time; a third hang up after a random number of bytes."""
    drawn = random.Random(19)
    with serving(engines, slots=40, waiting_room=40) as server:
        text = "[[chunks:5]] [[seconds:0.002]]"
        for connection in [asked(server, text) for _ in range(50)]:
            with connection:
                connection.recv(100)
        server.until_idle()
        before = counts(engines)
        for _ in range(40):
            with ExitStack() as stack:
                crowd = [stack.enter_context(asked(server, text)) for _ in range(50)]
                for connection in crowd:
                    if drawn.random() < 1 / 3:
                        if wanted := drawn.choice((0, 0, 1, 300, 1500, 3000)):
                            connection.recv(wanted)
                        connection.close()
                for connection in crowd:
                    data = b""
                    while connection.fileno() >= 0 and not data.endswith(b"\r\n0\r\n\r\n"):
                        piece = connection.recv(1 << 16)
                        assert piece, data
                        data += piece
                    assert not data or data.startswith(b"HTTP/1.1 200"), data
        server.until_idle()
        # How many of its pools' threads a process has started depends on how busy the machine was; a leak is
        # one for each stream.
        more = (40, 1, 4, 1)
        server.until(
            lambda: all(
                now <= then + some for now, then, some in zip(counts(engines), before, more, strict=True)
            )
        )
        assert engines.opened[0].stats().state == "ready"
