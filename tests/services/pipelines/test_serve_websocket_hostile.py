"""Wrong messages over a WebSocket: a clear error for each, no slot is lost, and no other client is
disturbed."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.services.pipelines.test_serve_bounds import connect
from tests.support.serving_kit import Running
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import PATH, Talk, talk

UPGRADE = (
    f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
).encode()


@pytest.fixture(scope="module")
def voice() -> StreamVoice:
    return StreamVoice()


@pytest.fixture(scope="module")
def server(voice: StreamVoice) -> Iterator[Running]:
    with Running(voice, slots=4, waiting_room=4, header_seconds=1.0, context_characters=5000) as running:
        yield running


@pytest.fixture(scope="module")
def bystander(server: Running) -> Iterator[Talk]:
    with talk(server.url) as client:
        yield client


@pytest.fixture(autouse=True)
def _nobody_is_disturbed(server: Running, bystander: Talk) -> Iterator[None]:
    settings = {"generation_config": {"seed": 1}}
    bystander.say("before", "All is well. ", more=True, **settings)
    yield
    bystander.say("before", "It still is.", **settings)
    bystander.say("after", "All is well. It still is.", **settings)
    assert bystander.hear("before") == bystander.hear("after")
    server.until_idle()


def of(name: object = "c", **fields: Any) -> str:
    return json.dumps({"context_id": name, "transcript": "Hello.", **fields})


def shaped(**fields: Any) -> str:
    return of(output_format={"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000, **fields})


def drawn(**fields: Any) -> str:
    return of(generation_config=fields)


JSON, VALUE = "input.bad_json", "invalid_value"
WRONG: dict[str, tuple[str | bytes, str | None, str, str]] = {
    # name: message, context of the error, code, a word of the sentence
    "nothing": ("", None, JSON, "JSON"),
    "half an object": ("{", None, JSON, "JSON"),
    "prose": ("Please say hello.", None, JSON, "JSON"),
    "two objects": (of() + of(), None, JSON, "JSON"),
    "a list": ("[]", None, JSON, "object"),
    "a string": ('"hello"', None, JSON, "object"),
    "a number": ("5", None, JSON, "object"),
    "null": ("null", None, JSON, "object"),
    "true": ("true", None, JSON, "object"),
    "deep lists": ("[" * 100_000, None, JSON, "deep"),
    "deep objects": ('{"a":' * 100_000, None, JSON, "deep"),
    "deep and closed": (
        '{"context_id": "c", "voice": ' + "[" * 50_000 + "]" * 50_000 + "}",
        None,
        JSON,
        "deep",
    ),
    "infinity": ('{"context_id": "c", "seed": 1e999}', None, JSON, "range"),
    "a number of 4,000 digits": (
        '{"context_id": "c", "generation_config": {"seed": ' + "9" * 4000 + "}}",
        "c",
        VALUE,
        "seed",
    ),
    "not a number": ('{"context_id": "c", "seed": NaN}', None, JSON, "JSON"),
    "half a surrogate": ('{"context_id": "c", "transcript": "\\ud800"}', None, JSON, "JSON"),
    "binary": (b"\x00\x01\x02", None, VALUE, "binary"),
    "binary JSON": (of().encode(), None, VALUE, "binary"),
    "binary nothing": (b"", None, VALUE, "binary"),
    "no context": ("{}", None, VALUE, "context_id"),
    "null as context": (of(None), None, VALUE, "context_id"),
    "a number as context": (of(5), None, VALUE, "context_id"),
    "a list as context": (of([]), None, VALUE, "context_id"),
    "an empty context": (of(""), "", VALUE, "context_id"),
    "a long context": (of("c" * 201), None, VALUE, "context_id"),
    "a number as transcript": (of(transcript=5), "c", VALUE, "transcript"),
    "a list as transcript": (of(transcript=["Hello."]), "c", VALUE, "transcript"),
    "words as continue": (of(**{"continue": "yes"}), "c", VALUE, "continue"),
    "a number as flush": (of(flush=1), "c", VALUE, "flush"),
    "words as cancel": (of(cancel="true"), "c", VALUE, "cancel"),
    "cancel of what never began": (of("never", cancel=True), "never", "context_not_found", "not open"),
    "a list as voice": (of(voice=["ada"]), "c", VALUE, "voice"),
    "a voice by embedding": (of(voice={"mode": "embedding", "embedding": [0.1]}), "c", VALUE, "voice.mode"),
    "a number as voice": (of(voice={"mode": "id", "id": 7}), "c", VALUE, "voice.id"),
    "a voice that nobody has": (
        of(voice={"mode": "id", "id": "nobody"}),
        "c",
        "input.unknown_voice",
        "nobody",
    ),
    "a path as voice": (
        of(voice={"mode": "id", "id": "../../etc/passwd"}),
        "c",
        "input.unknown_voice",
        "Unknown voice",
    ),
    "a number as language": (of(language=5), "c", VALUE, "language"),
    "a language of nobody": (of(language="tlh"), "c", "input.unknown_language", "tlh"),
    "a string as format": (of(output_format="wav"), "c", VALUE, "output_format"),
    "MP3": (shaped(container="mp3"), "c", VALUE, "container"),
    "a file": (shaped(container="wav"), "c", VALUE, "container"),
    "an unknown encoding": (shaped(encoding="opus"), "c", VALUE, "encoding"),
    "a rate below": (shaped(sample_rate=7999), "c", VALUE, "sample_rate"),
    "a rate above": (shaped(sample_rate=48_001), "c", VALUE, "sample_rate"),
    "a rate below 0": (shaped(sample_rate=-24_000), "c", VALUE, "sample_rate"),
    "a huge rate": (shaped(sample_rate=2**63), "c", VALUE, "sample_rate"),
    "a rate with a fraction": (shaped(sample_rate=24_000.5), "c", VALUE, "sample_rate"),
    "a rate in quotes": (shaped(sample_rate="24000"), "c", VALUE, "sample_rate"),
    "another model": (of(model_id="sonic-3"), "c", "model_not_found", "not served"),
    "a number as model": (of(model_id=3), "c", VALUE, "model_id"),
    "a delay below 0": (of(max_buffer_delay_ms=-1), "c", VALUE, "max_buffer_delay_ms"),
    "a delay of a year": (of(max_buffer_delay_ms=3e10), "c", VALUE, "max_buffer_delay_ms"),
    "a delay in words": (of(max_buffer_delay_ms="soon"), "c", VALUE, "max_buffer_delay_ms"),
    "a seed below 0": (drawn(seed=-1), "c", VALUE, "seed"),
    "a seed of 64 bits": (drawn(seed=2**63), "c", VALUE, "seed"),
    "a temperature in words": (drawn(temperature="hot"), "c", VALUE, "temperature"),
    "a temperature below 0": (drawn(temperature=-1), "c", "input.bad_generation", "temperature"),
    "guidance below 0": (drawn(cfg=-1.0), "c", "input.bad_generation", "cfg"),
    "no seconds": (drawn(max_seconds=0), "c", "input.bad_generation", "max_seconds"),
    "too much text": (of(transcript="word " * 1001), "c", "input.too_long", "5,000"),
    "text that nobody can say": (of(transcript="I refuse."), "c", "input.unpronounceable", "cannot read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_answered_with_an_error(server: Running, name: str) -> None:
    message, context_id, code, word = WRONG[name]
    with talk(server.url) as client:
        for _ in range(2):
            client.send(message)
            error = client.error(context_id)
            assert error["error_code"] == code
            assert word in error["message"], error
            assert error["status_code"] in (400, 404)
        client.say("d", "Good morning.")
        assert len(client.hear("d")) > 1000


def test_an_error_ends_the_context_it_names(server: Running, voice: StreamVoice) -> None:
    with talk(server.url) as client:
        for wrong in (
            {"transcript": "More.", "voice": {"mode": "id", "id": "bob"}},
            {"transcript": "More.", "output_format": {"sample_rate": 8000}},
            {"transcript": "More.", "language": "english"},
            {"transcript": "More.", "model_id": "tone"},
            {"transcript": "More.", "generation_config": {"seed": 8}},
            {"transcript": 5},
            {"transcript": "x" * 5001},
        ):
            client.say(
                "c", "Please hold.", more=True, max_buffer_delay_ms=1, voice={"mode": "id", "id": "ada"}
            )
            assert client.next("c")["type"] == "chunk"
            client.send({"context_id": "c", **wrong})
            assert client.error("c")["status_code"] == 400
            server.until(lambda: voice.running == 0)
            client.cancel("c")
            assert client.error("c")["error_code"] == "context_not_found"
        client.say("c", "Please hold.")
        assert client.next("c")["type"] == "chunk"
        client.say("c", " ")
        client.say("c", "More.")
        assert client.error("c")["error_code"] == "context_ended"


def test_a_cancel_is_answered_once(server: Running) -> None:
    with talk(server.url) as client:
        client.say("c", "Please hold.")
        client.next("c")
        for _ in range(3):
            client.cancel("c")
        client.hear("c")
        for _ in range(2):
            assert client.error("c")["error_code"] == "context_not_found"


def test_a_thousand_contexts_are_32(server: Running) -> None:
    with talk(server.url) as client:
        for number in range(1000):
            client.say(f"c{number}", "", more=True)
        for number in range(32, 1000):
            error = client.error(f"c{number}")
            assert (error["status_code"], error["error_code"]) == (429, "too_many_contexts")
        client.say("c31", "Hello.")
        assert client.hear("c31")


def test_contexts_of_all_connections_are_bounded() -> None:
    with Running(StreamVoice(), contexts=3) as server, talk(server.url) as one, talk(server.url) as other:
        one.say("a", "", more=True)
        one.say("b", "", more=True)
        other.say("a", "Hello. ", more=True)
        assert other.next("a")["type"] == "chunk"
        other.say("b", "Hello.")
        assert other.error("b")["error_code"] == "too_many_contexts"
        one.cancel("b")
        one.hear("b")
        # One that is refused takes no place.
        other.say("b", "Hello.", add_phoneme_timestamps=True)
        assert other.error("b")["error_code"] == "input.unsupported"
        one.say("b", "", more=True)
        one.cancel("b")
        assert one.next("b")["type"] == "done"
        one.cancel("a")
        one.hear("a")
        other.say("b", "Hello.")
        assert other.hear("b")


def test_flushes_without_end_are_bounded_like_text(server: Running) -> None:
    with talk(server.url) as client:
        client.say("c", "Please hold.", more=True)
        for _ in range(5001):
            client.say("c", "", more=True, flush=True)
        client.next("c")
        assert client.error("c")["error_code"] == "input.too_long"


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([(0x81, b"x" * 10_000_000)], 1009),
        ([(0x01, b"x" * 600_000), (0x00, b"x" * 600_000)], 1009),
        ([(0x81, b'{"context_id": "\xff\xfe"}')], 1007),
        ([(0x83, b"reserved")], 1002),
        ([(0xC1, b"compressed")], 1002),
        ([(0x80, b"continued")], 1002),
        ([(0x89, b"p" * 126)], 1002),
        ([(0x88, b"\x03")], 1002),
        ([(0x01, b""), *[(0x00, b"")] * 2000], 1009),
    ],
    ids=[
        "10 MB",
        "pieces of 1.2 MB",
        "no UTF-8",
        "reserved",
        "compressed",
        "no beginning",
        "long ping",
        "bad close",
        "empty pieces",
    ],
)
def test_frames_that_break_the_protocol_close_the_connection_with_a_code(
    server: Running, frames: list[tuple[int, bytes]], code: int
) -> None:
    with connect(server.url) as wire:
        wire.sendall(UPGRADE)
        assert wire.recv(4096).startswith(b"HTTP/1.1 101 ")
        wire.sendall(b"".join(frame(kind, payload) for kind, payload in frames))
        answer = received(wire, 4)
        assert answer[0] == 0x88
        assert struct.unpack("!H", answer[2:4])[0] == code


def test_a_client_that_broke_the_protocol_hears_the_end_at_once_and_may_still_send_the_rest(
    server: Running,
) -> None:
    with connect(server.url) as wire:
        wire.sendall(UPGRADE)
        assert wire.recv(4096).startswith(b"HTTP/1.1 101 ")
        wire.sendall(frame(0x83, b"reserved"))
        while wire.recv(4096):
            continue
        # Closed, the second one would fail.
        wire.sendall(b"rest")
        wire.sendall(b"rest")


def test_a_frame_without_a_mask_closes_the_connection(server: Running) -> None:
    with connect(server.url) as wire:
        wire.sendall(UPGRADE)
        assert wire.recv(4096).startswith(b"HTTP/1.1 101 ")
        wire.sendall(b"\x81\x02{}")
        assert received(wire, 4)[2:4] == struct.pack("!H", 1002)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ((b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Version: 8"), b"400"),
        ((b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b""), b"400"),
        ((b"dGhlIHNhbXBsZSBub25jZQ==", b"short"), b"400"),
        ((b"Upgrade: websocket\r\n", b""), b"404"),
        ((PATH.encode(), b"/tts/websocket%0a"), b"404"),
        ((PATH.encode(), b"/v1/models"), b"404"),
    ],
)
def test_a_wrong_handshake_is_refused(server: Running, change: tuple[bytes, bytes], status: bytes) -> None:
    with connect(server.url) as wire:
        wire.sendall(UPGRADE.replace(*change))
        assert wire.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_sockets_that_are_half_open_hold_nothing(server: Running, voice: StreamVoice) -> None:
    """Clients that stop in the handshake, behind it, in a frame, and that vanish while they listen."""
    wires = [connect(server.url) for _ in range(20)]
    for number, wire in enumerate(wires):
        wire.sendall(UPGRADE[:60] if number % 4 == 0 else UPGRADE)
        if number % 4 >= 2:
            wire.recv(4096)
            wire.sendall(
                frame(0x81, of(f"c{number}", transcript="Please hold.").encode())[
                    : None if number % 4 == 3 else 20
                ]
            )
    server.until(lambda: server.busy()[:2] == (4, 1))
    for number, wire in enumerate(wires):
        if number % 8 == 3:
            # A reset, as of a host that is gone.
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if number % 8 == 7:
            wire.shutdown(socket.SHUT_WR)
        else:
            wire.close()
    server.until(lambda: voice.running == 0)
    server.until_idle()
    for wire in wires:
        wire.close()


def test_a_listener_who_reads_nothing_is_let_go() -> None:
    with (
        Running(StreamVoice(), request_seconds=1.0) as server,
        connect(server.url) as wire,
        talk(server.url) as other,
    ):
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.sendall(UPGRADE)
        text = "This is a long sentence for somebody who does not listen. " * 800
        wire.sendall(frame(0x81, json.dumps({"context_id": "c", "transcript": text}).encode()))
        other.say("d", "Hello.")
        assert other.hear("d")
        server.until_idle()


def test_a_connection_ends_in_the_midst_of_a_close(server: Running) -> None:
    with pytest.raises(ConnectionClosed), talk(server.url) as client:
        client.say("c", "Please hold.")
        client.next("c")
        client.socket.socket.shutdown(socket.SHUT_RDWR)
        client.say("c", "More.")
        client.next("c")


def frame(kind: int, payload: bytes) -> bytes:
    """A frame of a client."""
    mask = os.urandom(4)
    length = len(payload)
    head = (
        bytes([kind, 0x80 | length])
        if length < 126
        else bytes([kind, 0x80 | 127]) + struct.pack("!Q", length)
    )
    masked = (
        bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload)) if length < 2_000_000 else payload
    )
    return head + mask + masked


def received(wire: socket.socket, size: int) -> bytes:
    """At least so many bytes."""
    data = b""
    while len(data) < size and (part := wire.recv(4096)):
        data += part
    return data
