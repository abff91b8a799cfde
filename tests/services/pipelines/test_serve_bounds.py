"""What an attacker or a stuck model can take from a server: connections, descriptors, threads, its end,
and a part for the whole."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import numpy as np
import psutil
import pytest

from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import AudioChunk, Capabilities, EngineInfo, EngineStats, Speech, SynthesisRequest
from pipelines.serving.connections import Connections
from pipelines.serving.model import SUBMIT_THREADS
from tests.support.called import CalledPipeline
from tests.support.serving_kit import PATIENCE_SECONDS, Running, b64, error_of, wait_until, wav

SPEECH = "/v1/audio/speech"
SILENT = 24
#: None of the server's own times ends what these tests hold.
LONG = 3000.0
#: How long a test waits for what the server does by itself.
SOON_SECONDS = 30.0


class Voice(CalledPipeline):
    """Speaks a short tone. In the text: `hold` blocks `submit` until `let_go`, `break` fails a stream in
    its middle, `stop` halts it."""

    name = "tone"
    sample_rate = 16_000
    capabilities = Capabilities(streaming=True)
    info = EngineInfo()

    def __init__(self) -> None:
        #: Ids of requests that were submitted, and that were aborted.
        self.seen: list[str] = []
        self.aborted: list[str] = []
        self.held = 0
        self._free = threading.Event()
        self._lock = threading.Lock()

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        self.seen.append(request.request_id)
        if "hold" in str(request.messages[0].content):
            with self._lock:
                self.held += 1
            self._free.wait()
        future: Future[Speech] = Future()
        future.set_result(Speech(self._tone(), self.sample_rate))
        return future

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        text = str(request.messages[0].content)
        yield AudioChunk(self._tone(), self.sample_rate)
        if "break" in text:
            raise SynthesisError(ErrorCode.SYNTH_ENGINE, "The engine broke.")
        if "stop" in text:
            self._free.wait()
        yield AudioChunk(self._tone(), self.sample_rate)

    def let_go(self) -> None:
        self._free.set()

    def let_go_of(self, seconds: float) -> None:
        """Waits until `let_go`, at the longest so many seconds."""
        self._free.wait(seconds)

    def abort(self, request_id: str) -> None:
        """Notes it, as a pipeline that does not hear it."""
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        """Nothing to free."""

    def _tone(self) -> np.ndarray:
        return (0.3 * np.sin(np.arange(1600) / 20)).astype(np.float32)


@pytest.fixture
def voice() -> Iterator[Voice]:
    voice = Voice()
    yield voice
    voice.let_go()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)


def request_bytes(text: str, path: str = SPEECH, **fields: Any) -> bytes:
    data = json.dumps({"model": "tone", "input": text, **fields}).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )


def is_healthy(connection: socket.socket) -> bool:
    """Whether `/health` is 200, over a connection that is kept."""
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    data = b""
    while not data.endswith(b"}") and (part := connection.recv(4000)):
        data += part
    return data.startswith(b"HTTP/1.1 200 ")


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection on which it said nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.setblocking(True)
        connection.settimeout(PATIENCE_SECONDS)


def answer_of(connection: socket.socket) -> tuple[bytes, bytes]:
    """The head and the body, as sent, of an answer after which the server closes."""
    data = b""
    try:
        while part := connection.recv(65_536):
            data += part
    except ConnectionError:
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


class TestConnections:
    def test_those_without_a_request_make_room_for_those_who_come(self, voice: Voice) -> None:
        with Running(voice, connections=8, header_seconds=LONG) as server, ExitStack() as stack:
            silent = [stack.enter_context(connect(server.url)) for _ in range(SILENT)]
            half = stack.enter_context(connect(server.url))
            half.sendall(request_bytes("Half.")[:40])
            assert server.speak("Good morning.").status_code == 200
            server.until(lambda: sum(map(is_closed, silent)) >= SILENT - 8, SOON_SECONDS)
            assert is_closed(silent[0])

    def test_those_whose_body_does_not_come_make_room_too(self, voice: Voice) -> None:
        with Running(voice, connections=8, body_seconds=LONG) as server, ExitStack() as stack:
            slow: list[socket.socket] = []
            for _ in range(SILENT):
                slow.append(stack.enter_context(connect(server.url)))
                slow[-1].sendall(request_bytes("Hello.")[:-1])
                assert server.speak("Good morning.").status_code == 200
            server.until(lambda: sum(map(is_closed, slow)) >= SILENT - 8, SOON_SECONDS)
            slow[-1].sendall(b"}")
            assert slow[-1].recv(4000).startswith(b"HTTP/1.1 200 ")

    def test_one_with_a_request_is_never_ended_for_another(self, voice: Voice) -> None:
        with Running(voice, connections=2, header_seconds=LONG, slots=8, wait=False) as server:
            server.until(lambda: server.health() == 200)
            server.http.close()
            with connect(server.url) as first, connect(server.url) as second:
                for connection in (first, second):
                    connection.sendall(request_bytes("hold").replace(b"Host:", b"Connection: close\r\nHost:"))
                wait_until(lambda: voice.held == 2)
                with connect(server.url) as late:
                    head, body = answer_of(late)
                assert b" 503 " in head.splitlines()[0]
                assert json.loads(body)["error"]["code"] == "too_many_connections"
                voice.let_go()
                assert [answer_of(connection)[0].split()[1] for connection in (first, second)] == [
                    b"200",
                    b"200",
                ]

    def test_send_small_pieces_at_once(self, voice: Voice) -> None:
        """With Nagle's algorithm the second piece of a stream waits 40 ms for an acknowledgement of the first."""
        with Running(voice) as server, connect(server.url) as client:
            client.sendall(request_bytes("Hello."))
            assert client.recv(4000).startswith(b"HTTP/1.1 200 ")
            accepted = next(
                connection.fd
                for connection in psutil.Process().net_connections("tcp4")
                if connection.raddr == client.getsockname()
            )
            with socket.socket(fileno=os.dup(accepted)) as ours:
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_headers_that_do_not_come_in_time_end_the_connection(self, voice: Voice) -> None:
        with Running(voice, header_seconds=1.0) as server, ExitStack() as stack:
            silent, slow, kept = (stack.enter_context(connect(server.url)) for _ in range(3))
            for connection in (silent, slow, kept):
                connection.settimeout(SOON_SECONDS)
            slow.sendall(b"GET /health HTTP/1.1\r\nX: ")
            assert is_healthy(kept)
            assert silent.recv(1) == b""
            assert answer_of(slow) == (b"", b"")
            # Kept alive after its first request, it has all the time of `timeout_keep_alive` ...
            assert is_healthy(kept)
            # ... but not for half a header.
            kept.sendall(b"GET /health HTTP/1.1\r\n")
            assert kept.recv(1) == b""

    def test_a_server_without_descriptors_answers_and_says_so_once(self, log: Path) -> None:
        with process(log, "connections=100_000, header_seconds=3000.0") as (running, url):
            assert httpx2.get(f"{url}/health", timeout=PATIENCE_SECONDS, trust_env=False).status_code == 200
            used = len(os.listdir(f"/proc/{running.pid}/fd"))
            hard = resource.prlimit(running.pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (used + 4, hard))
            with ExitStack() as stack:
                for _ in range(SILENT):
                    stack.enter_context(connect(url))
                answered = httpx2.get(f"{url}/health", timeout=PATIENCE_SECONDS, trust_env=False)
            assert answered.status_code == 200
            running.send_signal(signal.SIGTERM)
            assert running.wait(PATIENCE_SECONDS) == 0
            said = log.read_text()
        lines = [line for line in said.splitlines() if "No connection can be accepted" in line]
        assert 1 <= len(lines) <= 3, said[:2000]
        assert len(said.splitlines()) < 20, said[:2000]

    def test_an_accept_that_is_tried_again_after_the_end_says_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """asyncio tries one that failed again after a second; the server may have stopped by then."""

        async def run() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(Connections(8, header_seconds=1.0).on_loop_error)
            closed = socket.socket()
            closed.close()
            loop.call_soon(loop._start_serving, asyncio.Protocol, closed)  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            assert not caplog.messages
            loop.call_soon(int, "no number")
            await asyncio.sleep(0)

        asyncio.run(run())
        assert [record.levelname for record in caplog.records] == ["ERROR"]

    def test_the_limit_of_descriptors_is_raised_for_the_connections_that_may_be(self, log: Path) -> None:
        with process(log, "connections=700", descriptors=(400, 1000)) as (running, url):
            assert resource.prlimit(running.pid, resource.RLIMIT_NOFILE)[0] == 700 + 256
            assert httpx2.get(f"{url}/health", timeout=PATIENCE_SECONDS, trust_env=False).status_code == 200


#: A server of `Voice` in a process of its own, for what would take its descriptors or its end from the tests'
#: process.
PROCESS = """
import logging, sys
from pipelines.serving import ServeOptions
from pipelines.serving.model import ServedModel
from pipelines.serving.server import Server
from tests.services.pipelines.test_serve_bounds import Voice
from tests.support.serving_kit import card_of

logging.basicConfig(level=logging.WARNING)
voice = Voice()
server = Server([ServedModel(card_of(voice), lambda: voice, ServeOptions((voice.name,), OPTIONS))], "127.0.0.1", 0)
print(server.url, flush=True)
server.run()
"""


@contextmanager
def process(
    log: Path, options: str, descriptors: tuple[int, int] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", PROCESS.replace("OPTIONS", options)]
    if descriptors is not None:
        soft, hard = descriptors
        command = ["sh", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "sh", *command]
    with log.open("w") as file:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert running.stdout is not None
        url = running.stdout.readline().strip()
        wait_until(
            lambda: httpx2.get(f"{url}/health", timeout=PATIENCE_SECONDS, trust_env=False).status_code == 200
        )
        yield running, url
    finally:
        running.kill()
        running.wait()


class TestStuckModels:
    def test_health_is_503_while_nothing_comes_of_requests(self, voice: Voice) -> None:
        with Running(voice, stuck_seconds=0.3, slots=40) as server, ExitStack() as stack:
            held = [stack.enter_context(connect(server.url)) for _ in range(SUBMIT_THREADS + 1)]
            for connection in held:
                connection.sendall(request_bytes("hold"))
            server.until(lambda: voice.held == SUBMIT_THREADS)
            server.until(lambda: server.health() == 503, SOON_SECONDS)
            voice.let_go()
            server.until(lambda: server.health() == 200)
            assert all(b" 200 " in connection.recv(4000).splitlines()[0] for connection in held)

    def test_sigterm_ends_a_server_whose_threads_never_come_back(self, log: Path) -> None:
        with process(log, "drain_seconds=0.3") as (running, url), ExitStack() as stack:
            held = [stack.enter_context(connect(url)) for _ in range(SUBMIT_THREADS + 4)]
            for connection in held:
                connection.sendall(request_bytes("hold"))
            metrics = f"speech_server_running {len(held)}.0"
            wait_until(
                lambda: (
                    metrics in httpx2.get(f"{url}/metrics", timeout=PATIENCE_SECONDS, trust_env=False).text
                )
            )
            running.send_signal(signal.SIGTERM)
            assert running.wait(SOON_SECONDS) == 0
            for connection in held:
                head, body = answer_of(connection)
                assert (head.split()[1], json.loads(body)["error"]["code"]) == (b"503", "shutting_down")
        assert "Traceback" not in log.read_text()

    def test_a_request_whose_client_leaves_while_the_pipeline_takes_it_gives_its_slot_back(
        self, voice: Voice
    ) -> None:
        with Running(voice) as server:
            with connect(server.url) as connection:
                connection.sendall(request_bytes("hold"))
                server.until(lambda: len(voice.seen) == 1)
            voice.let_go()
            server.until_idle()

    def test_a_model_that_does_not_close_is_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Deaf(Voice):
            """Closes once it is let go."""

            def close(self) -> None:
                self.let_go_of(SOON_SECONDS)

        voice = Deaf()
        monkeypatch.setattr("pipelines.serving.model.CLOSE_SECONDS", 0.2)
        with Running(voice) as server:
            assert server.speak("Good morning.").status_code == 200
        assert server.server.hangs
        voice.let_go()


class TestReferences:
    @pytest.mark.parametrize(
        ("seconds", "rate", "code"),
        [(60, 8_000, None), (61, 8_000, "input.too_long"), (1, 200_000, "input.audio_unreadable")],
    )
    def test_a_voice_to_clone_is_bounded_by_its_header(
        self, voice: Voice, seconds: int, rate: int, code: str | None
    ) -> None:
        with Running(voice) as server:
            answer = server.speak("Good morning.", reference_audio=b64(wav(seconds, rate)))
            assert answer.status_code == (200 if code is None else 400)
            assert code is None or (error_of(answer)["code"], voice.seen) == (code, [])


class TestPaths:
    @pytest.mark.parametrize(
        "path",
        [
            f"{SPEECH}%0a",
            "/v1/chat/completions%0A",
            f"{SPEECH}%0d",
            f"{SPEECH}%00",
            "/health%0a",
            f"{SPEECH}%0a%0a",
        ],
    )
    def test_a_path_with_control_characters_is_unknown(self, voice: Voice, path: str) -> None:
        with Running(voice) as server:
            refused = server.http.post(path, json={"model": "tone", "input": "Hello."})
            assert (refused.status_code, error_of(refused)["code"]) == (404, "not_found")
            server.until_idle()

    def test_nobody_is_sent_to_where_the_host_header_says(self, voice: Voice) -> None:
        with Running(voice) as server:
            for path in (f"{SPEECH}/", "/v1/models/", "/health/"):
                answer = server.http.get(path, headers={"host": "localhost:1"}, follow_redirects=False)
                assert answer.status_code == 404, path
                assert "location" not in answer.headers


class TestBrokenStreams:
    """A client can tell an answer that broke off from a whole one: its last chunk, which has no bytes,
    never comes."""

    @pytest.mark.parametrize("text", ["break", "stop"])
    @pytest.mark.parametrize("kind", ["pcm", "wav", "flac"])
    def test_what_breaks_off_is_not_terminated(self, voice: Voice, kind: str, text: str) -> None:
        with Running(voice, request_seconds=LONG if text == "break" else 0.5) as server:
            with connect(server.url) as connection:
                asked = request_bytes(text, response_format=kind, stream=True)
                connection.sendall(asked.replace(b"Host:", b"Connection: close\r\nHost:"))
                head, body = answer_of(connection)
            assert b" 200 " in head.splitlines()[0]
            assert b"transfer-encoding: chunked" in head.lower()
            assert len(body) > 10
            assert not body.endswith(b"0\r\n\r\n")
            with pytest.raises(httpx2.RemoteProtocolError):
                server.speak(text, response_format=kind, stream=True)
            voice.let_go()
            server.until_idle()

    def test_what_is_whole_is_terminated(self, voice: Voice) -> None:
        with Running(voice) as server, connect(server.url) as connection:
            connection.sendall(
                request_bytes("All.", response_format="pcm").replace(b"Host:", b"Connection: close\r\nHost:")
            )
            _, body = answer_of(connection)
            assert body.endswith(b"0\r\n\r\n")
            assert len(server.speak("All.", response_format="pcm").content) == 2 * 2 * 1600


class TestOtherSites:
    """Any page may have its browser send what needs no leave, to any name that leads here."""

    HOSTS: ClassVar = {
        "localhost": 200,
        "LOCALHOST:80": 200,
        "127.0.0.1:1": 200,
        "127.8.8.8": 200,
        "[::1]": 200,
        "[::1]:8000": 200,
        "speech.example:8000": 200,
        "evil.example": 403,
        "localhost.evil.example": 403,
        "127.0.0.1.evil.example:8000": 403,
        "evil.example:127": 403,
        "10.0.0.1": 403,
        "[::2]:1": 403,
        "localhost:80:80": 403,
        "": 403,
    }

    def test_a_server_without_a_key_answers_to_names_of_this_machine_alone(self, voice: Voice) -> None:
        with Running(voice, allowed_hosts=("Speech.example",)) as server:
            body = {"model": "tone", "input": "Hello."}
            for host, status in self.HOSTS.items():
                for answer in (
                    server.http.get("/health", headers={"host": host}),
                    server.http.post(SPEECH, json=body, headers={"host": host}),
                ):
                    assert answer.status_code == status, host
                    assert status == 200 or error_of(answer)["code"] == "host_forbidden"
            for host, status in (("localhost:1", 101), ("evil.example", 403)):
                with connect(server.url) as connection:
                    connection.sendall(
                        f"GET /tts/websocket HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nUpgrade: websocket\r\n"
                        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
                    )
                    assert connection.recv(4000).split()[1] == str(status).encode(), host
        assert len(voice.seen) == sum(status == 200 for status in self.HOSTS.values())

    def test_a_server_with_a_key_answers_to_every_name(self, voice: Voice) -> None:
        with Running(voice, keys=("k",), wait=False) as server:
            server.until(lambda: server.health() == 200)
            body = {"model": "tone", "input": "Hello."}
            asked = server.http.post(SPEECH, json=body, headers={"host": "speech.example", "x-api-key": "k"})
            assert asked.status_code == 200

    @pytest.mark.parametrize(
        "kind",
        [
            "text/plain",
            "text/plain; a=application/json",
            "application/x-www-form-urlencoded",
            "jsonx",
            "",
            None,
        ],
    )
    def test_routes_of_json_take_no_type_that_every_page_may_send(
        self, voice: Voice, kind: str | None
    ) -> None:
        with Running(voice) as server:
            headers = {} if kind is None else {"content-type": kind}
            for path in (SPEECH, "/v1/chat/completions", "/tts/bytes", "/v1/audio/voices"):
                refused = server.http.post(
                    path,
                    content=b'{"model": "tone", "input": "Hello.", "transcript": "Hello."}',
                    headers=headers,
                )
                assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_media_type"), (
                    path
                )
        assert voice.seen == []

    @pytest.mark.parametrize(
        "kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json;a=b"]
    )
    def test_all_types_of_json_are_json(self, voice: Voice, kind: str) -> None:
        with Running(voice) as server:
            body = json.dumps({"model": "tone", "input": "Hello."}).encode()
            assert server.http.post(SPEECH, content=body, headers={"content-type": kind}).status_code == 200


class TestBodies:
    def test_a_body_that_is_not_whole_or_not_valid_takes_no_slot(self, voice: Voice) -> None:
        with Running(voice, slots=2, waiting_room=0, body_seconds=LONG) as server, ExitStack() as stack:
            for path in (SPEECH, "/tts/bytes", "/v1/chat/completions", "/v1/audio/voices") * 3:
                slow = stack.enter_context(connect(server.url))
                slow.sendall(request_bytes("Hello.", path)[:-1])
                assert server.speak("Good morning.").status_code == 200
            held = [stack.enter_context(connect(server.url)) for _ in range(2)]
            for connection in held:
                connection.sendall(request_bytes("hold"))
            server.until(lambda: voice.held == 2)
            # Both slots are taken, and nobody may wait: what is wrong is said all the same.
            assert server.speak("Good morning.").status_code == 429
            assert server.http.post(SPEECH, json={"model": "tone"}).status_code == 400
            assert server.http.post("/tts/bytes", json=[]).status_code == 400
            for text in ("", " ", 50_001 * "a"):
                assert error_of(server.speak(text))["param"] == "input"
                for path in ("/tts/bytes", "/tts/sse"):
                    assert (
                        error_of(server.http.post(path, json={"transcript": text}))["param"] == "transcript"
                    )
            wav_events = {"transcript": "Hello.", "output_format": {"container": "wav"}}
            assert (
                error_of(server.http.post("/tts/sse", json=wav_events))["param"] == "output_format.container"
            )
            voice.let_go()

    def test_a_voice_is_added_in_a_slot(self, voice: Voice, tmp_path: Path) -> None:
        with (
            Running(voice, slots=1, waiting_room=0, voices_folder=tmp_path) as server,
            connect(server.url) as held,
        ):
            held.sendall(request_bytes("hold"))
            server.until(lambda: voice.held == 1)
            body = {"name": "anna", "recording": b64(wav(1))}
            assert server.http.post("/v1/audio/voices", json=body).status_code == 429
            voice.let_go()
            server.until_idle()
            refused = server.http.post("/v1/audio/voices", json=body)
            assert error_of(refused)["code"] == "input.unsupported"

    @pytest.mark.parametrize("path", [SPEECH, "/v1/chat/completions", "/tts/bytes", "/v1/audio/voices"])
    def test_json_with_too_many_values_is_refused_on_every_route(self, voice: Voice, path: str) -> None:
        with Running(voice) as server:
            wide = json.dumps({f"field{number}": number for number in range(20_000)})
            for body in (wide, "[" * 50 + "]" * 50):
                refused = server.http.post(path, content=body, headers={"content-type": "application/json"})
                assert (refused.status_code, error_of(refused)["code"]) == (400, "input.bad_json")
                assert "too many values" in error_of(refused)["message"]
