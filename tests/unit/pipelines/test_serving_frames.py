"""Frames of a WebSocket and chunks of a body are read in turn with what other clients send, and no faster than
their rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from pipelines.serving.connections import (
    MAX_FRAMES,
    PIECES_PER_SECOND,
    Connections,
    HttpProtocol,
    WebSocketProtocol,
)
from tests.support.fakes import FakeClock
from tests.support.rounds import turn_until

UPGRADE = (
    b"GET /tts/websocket HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
#: Frames with an empty mask: a ping, and pieces of a text without any.
PING, FIRST, NEXT, LAST = (bytes((kind, 0x80, 0, 0, 0, 0)) for kind in (0x89, 0x01, 0x00, 0x80))
TEXT = b"\x81\x82\x00\x00\x00\x00{}"


class Loop:
    """The event loop of one connection; its clock and its timers are turned by hand."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.time = self.clock.monotonic
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        self.timers.append((seconds, call))
        return asyncio.TimerHandle(0, call, (), asyncio.get_running_loop())

    def create_task(self, app: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(app)


class Transport(asyncio.Transport):
    """Counts what is written; knows whether more may arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads = True

    def write(self, data: Any) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def is_closing(self) -> bool:
        return False

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        """The test ends it."""


async def app(_scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await asyncio.Event().wait()


async def opened() -> tuple[WebSocketProtocol, Transport, Loop]:
    """A connection whose app takes no message."""
    loop, transport = Loop(), Transport()
    config = Config(app, log_config=None, ws_per_message_deflate=False, ws_ping_interval=None)
    config.load()
    given: dict[str, Any] = {"config": config, "server_state": ServerState(), "app_state": {}, "_loop": loop}
    protocol = WebSocketProtocol(Connections(8, header_seconds=1.0), **given)
    protocol.connection_made(transport)
    protocol.data_received(UPGRADE)
    async with asyncio.timeout(30):
        while not transport.written:
            await asyncio.sleep(0)
    transport.written = b""
    return protocol, transport, loop


def test_a_part_is_read_at_once_and_the_rest_in_turns_as_fast_as_its_rate() -> None:
    async def play() -> None:
        protocol, transport, loop = await opened()
        begin = loop.time()
        protocol.data_received(PING * 5000)
        turns: list[int] = []
        while loop.timers:
            assert not transport.reads
            turns.append(transport.written.count(b"\x8a"))
            ((seconds, call),) = loop.timers
            loop.timers.clear()
            loop.clock.advance(seconds)
            call()
        assert max(after - before for before, after in zip([0, *turns], [*turns, 5000], strict=True)) < 400
        assert transport.written == b"\x8a\x00" * 5000
        # Those of the first second come at once.
        assert loop.time() - begin == pytest.approx(5000 / PIECES_PER_SECOND - 1, abs=0.5)
        assert transport.reads

    asyncio.run(play())


def test_what_the_app_has_not_taken_holds_the_rest_up() -> None:
    async def play() -> None:
        protocol, transport, loop = await opened()
        protocol.data_received(TEXT * 1000)
        queued = protocol.queue.qsize()
        assert (0 < queued < 1000, transport.reads, loop.timers) == (True, False, [])
        for _ in range(queued):
            assert (await protocol.receive())["type"] == "websocket.receive"
        assert (transport.reads, len(loop.timers)) == (False, 1)

    asyncio.run(play())


@pytest.mark.parametrize("pieces", [MAX_FRAMES - 2, 2 * MAX_FRAMES])
def test_a_message_has_a_maximum_of_frames(pieces: int) -> None:
    async def play() -> None:
        protocol, transport, loop = await opened()
        protocol.data_received(FIRST + NEXT * pieces + LAST)
        turn_until(
            lambda: not loop.timers or protocol.close_sent or not protocol.queue.empty(),
            lambda: loop.timers.pop()[1](),
        )
        if pieces < MAX_FRAMES:
            assert protocol.queue.get_nowait() == {"type": "websocket.receive", "text": ""}
        else:
            assert (transport.written[:1], transport.written[2:4]) == (b"\x88", b"\x03\xf1")

    asyncio.run(play())


def test_a_client_that_pauses_behind_more_chunks_than_its_rate_has_not_ended() -> None:
    async def play() -> None:
        bodies: list[bytes] = []

        async def reading(_scope: Any, receive: Any, send: Any) -> None:
            more = True
            while more:
                message = await receive()
                bodies.append(message["body"])
                more = message["more_body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        loop, transport = Loop(), Transport()
        config = Config(reading, log_config=None)
        config.load()
        given: dict[str, Any] = {
            "config": config,
            "server_state": ServerState(),
            "app_state": {},
            "_loop": loop,
        }
        protocol = HttpProtocol(Connections(8, header_seconds=1.0), **given)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        loop.timers.clear()
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        protocol.data_received(b"1\r\na\r\n" * 3000)
        while loop.timers:
            ((seconds, call),) = loop.timers
            loop.timers.clear()
            loop.clock.advance(seconds)
            call()
            await asyncio.sleep(0)
        assert transport.reads
        assert not transport.written
        protocol.data_received(b"0\r\n\r\n")
        async with asyncio.timeout(30):
            while not transport.written:
                await asyncio.sleep(0)
        assert transport.written.startswith(b"HTTP/1.1 200")
        assert b"".join(bodies) == b"a" * 3000

    asyncio.run(play())
