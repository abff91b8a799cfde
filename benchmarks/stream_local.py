"""`python -m benchmarks.stream_local`: a server that answers every speech with silence at once, to measure
the clients' own delay.

It speaks what `benchmarks.stream_load` asks for: `POST /v1/audio/speech`, Cartesia's `/tts/websocket`,
`/v1/models`, `/health`, `/metrics`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import hashlib
import json
from asyncio import StreamReader, StreamWriter
from typing import Any

RATE = 24_000
_FRAME_SECONDS = 0.08
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
#: Frames of the first chunks, and of all that follow.
_RAMP = (1, 2, 4, 8, 12)


def chunks_of(seconds: float) -> list[bytes]:
    """Silence of a length, cut as a server cuts a stream."""
    left, found = max(round(seconds / _FRAME_SECONDS), 1), list[bytes]()
    while left:
        frames = min(_RAMP[min(len(found), len(_RAMP) - 1)], left)
        found.append(bytes(round(frames * _FRAME_SECONDS * RATE) * 2))
        left -= frames
    return found


class LocalServer:
    """Answers on one event loop. `first_seconds` is the time to the first chunk, `slots` how many streams
    are taken at once."""

    def __init__(self, first_seconds: float = 0.0, chunk_seconds: float = 0.0, slots: int = 10_000) -> None:
        self.first_seconds, self.chunk_seconds, self.slots = first_seconds, chunk_seconds, slots
        self.running = 0
        self.answered = 0

    async def start(self, port: int = 0) -> asyncio.Server:
        """Listens on the loopback address; 0 takes a free port."""
        return await asyncio.start_server(self._client, "127.0.0.1", port, backlog=2048)

    async def _client(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path = head.split(maxsplit=2)[:2]
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if path.startswith("/tts/websocket"):
                    await self._websocket(headers, reader, writer)
                elif method == "POST":
                    await self._speech(json.loads(body), writer)
                else:
                    self._page(path, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _page(self, path: str, writer: StreamWriter) -> None:
        card = {
            "id": "local",
            "owned_by": "nightjar",
            "sample_rate": RATE,
            "capabilities": {"voices": ["calm"]},
        }
        gauges = f"speech_server_running {self.running}\nspeech_server_waiting 0\nspeech_engine_batch_size {self.running}\n"
        pages = {
            "/v1/models": json.dumps({"data": [card]}),
            "/metrics": gauges,
            "/health": '{"status": "ready"}',
        }
        content = pages.get(path, "").encode()
        writer.write(
            f"HTTP/1.1 {200 if content else 404} -\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )

    async def _speech(self, body: dict[str, Any], writer: StreamWriter) -> None:
        if self.running >= self.slots:
            content = json.dumps({"error": {"message": "", "code": "queue_full"}}).encode()
            writer.write(f"HTTP/1.1 429 -\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
            return
        self.running += 1
        try:
            pieces = chunks_of(body["max_seconds"])
            if body.get("stream"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: audio/pcm\r\n\r\n"
                )
                for number, piece in enumerate(pieces):
                    await self._pause(number)
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
            else:
                content = b"".join(pieces)
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
            self.answered += 1
        finally:
            self.running -= 1

    async def _pause(self, number: int) -> None:
        seconds = self.chunk_seconds if number else self.first_seconds
        if seconds:
            await asyncio.sleep(seconds)

    async def _websocket(self, headers: dict[str, str], reader: StreamReader, writer: StreamWriter) -> None:
        accept = base64.b64encode(
            hashlib.sha1(headers["sec-websocket-key"].encode() + _MAGIC).digest()
        ).decode()
        lines = (
            "HTTP/1.1 101 -",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {accept}",
            "",
            "",
        )
        writer.write("\r\n".join(lines).encode())
        speaking: asyncio.Task[None] | None = None
        try:
            while True:
                message = json.loads(await _message(reader))
                if message.get("cancel") and speaking is not None:
                    speaking.cancel()
                elif not message.get("cancel"):
                    speaking = asyncio.create_task(self._context(message, writer))
        finally:
            if speaking is not None:
                speaking.cancel()

    async def _context(self, message: dict[str, Any], writer: StreamWriter) -> None:
        self.running += 1
        try:
            about = {"context_id": message["context_id"], "status_code": 206}
            for number, piece in enumerate(chunks_of(message["max_seconds"])):
                await self._pause(number)
                writer.write(
                    _frame(
                        {"type": "chunk", "data": base64.b64encode(piece).decode(), "done": False, **about}
                    )
                )
                await writer.drain()
            writer.write(_frame({"type": "done", "done": True, **about}))
            self.answered += 1
        finally:
            self.running -= 1


async def _message(reader: StreamReader) -> bytes:
    """A client's next message. Raises `IncompleteReadError` at the end."""
    first, size = await reader.readexactly(2)
    length = size & 127
    if length >= 126:
        length = int.from_bytes(await reader.readexactly(2 if length == 126 else 8), "big")
    mask = await reader.readexactly(4)
    data = await reader.readexactly(length)
    if first & 15 == 8:
        raise asyncio.IncompleteReadError(b"", None)
    return bytes(byte ^ mask[at % 4] for at, byte in enumerate(data)) if any(mask) else data


def _frame(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    count = len(data)
    size = (
        bytes([count])
        if count < 126
        else b"\x7e" + count.to_bytes(2, "big")
        if count < 65536
        else b"\x7f" + count.to_bytes(8, "big")
    )
    return b"\x81" + size + data


async def _serve(options: argparse.Namespace) -> None:
    server = await LocalServer(options.first_ms / 1000, options.chunk_ms / 1000, options.slots).start(
        options.port
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    gc.disable()
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=0.0, help="time to the first chunk")
    parser.add_argument("--chunk-ms", type=float, default=0.0, help="time to each further chunk")
    parser.add_argument("--slots", type=int, default=10_000, help="streams at once; others get 429")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
