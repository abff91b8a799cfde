"""Servers to measure streams of: `python -m benchmarks.stream_server FOLDER` has a checkpoint of random weights, which end
when they like: what did not end counts as done. Without a folder one answers every speech with silence at once, to
measure the clients' own delay.

That one knows what `benchmarks.stream` asks for over HTTP: `POST /v1/audio/speech`, `/v1/models`, `/health`, `/metrics`.
"""

from __future__ import annotations

import asyncio
import gc
import json
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from typing import Any

import click

RATE = 24_000
_FRAME_SECONDS = 0.08
#: Frames of the first chunks, and of all that follow.
_RAMP = (1, 2, 4, 8, 12)


def serve_random(model: str, port: int, slots: int, waiting_room: int, given: dict[str, int]) -> None:
    """Serves as `nightjar serve` does, until SIGTERM; prints its address first."""
    from jobs.engine_process import engine_options, open_model
    from jobs.settings import load_settings
    from pipelines.interpreter import serve_threads
    from pipelines.registry import describe
    from pipelines.serving import ServeOptions
    from pipelines.serving.server import Server

    card, settings = describe(model), load_settings()
    options = engine_options(settings, card) | given
    if card.engine != "cpu":
        options["keep_unfinished"] = True
    serve = ServeOptions((Path(card.name).name,), slots=slots, waiting_room=waiting_room)
    server = Server(card, lambda: open_model(model, card, settings, options), serve, "127.0.0.1", port)
    print(server.url, flush=True)
    serve_threads()
    server.run()


def chunks_of(seconds: float) -> list[bytes]:
    """Silence of a length, cut as a server cuts a stream."""
    left, found = max(round(seconds / _FRAME_SECONDS), 1), list[bytes]()
    while left:
        frames = min(_RAMP[min(len(found), len(_RAMP) - 1)], left)
        found.append(bytes(round(frames * _FRAME_SECONDS * RATE) * 2))
        left -= frames
    return found


class Silence:
    """Answers on one event loop."""

    def __init__(self) -> None:
        self.running = 0

    async def client(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path = head.split(maxsplit=2)[:2]
                pairs = (line.partition(":") for line in head.split("\r\n")[1:])
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "POST":
                    await self._speech(json.loads(body), writer)
                else:
                    self._whole(writer, self._page(path).encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _page(self, path: str) -> str:
        card = {
            "id": "local",
            "owned_by": "nightjar",
            "sample_rate": RATE,
            "capabilities": {"voices": ["calm"]},
        }
        gauges = "".join(
            f"{name} {self.running}\n" for name in ("speech_server_running", "speech_engine_batch_size")
        )
        pages = {"/v1/models": json.dumps({"data": [card]}), "/metrics": gauges}
        return pages.get(path, '{"status": "ready"}')

    def _whole(self, writer: StreamWriter, content: bytes) -> None:
        writer.write(f"HTTP/1.1 200 -\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)

    async def _speech(self, body: dict[str, Any], writer: StreamWriter) -> None:
        self.running += 1
        try:
            pieces = chunks_of(body["max_seconds"])
            if not body.get("stream"):
                self._whole(writer, b"".join(pieces))
                return
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: audio/pcm\r\n\r\n")
            for piece in pieces:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            self.running -= 1


async def serve_silence(port: int) -> None:
    server = await asyncio.start_server(Silence().client, "127.0.0.1", port, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    gc.disable()
    await server.serve_forever()


@click.command()
@click.argument("model", default="")
@click.option("--port", default=0, help="0 takes a free one.")
@click.option("--slots", default=256, show_default=True, help="Requests in the engine at once.")
@click.option("--waiting-room", default=256, show_default=True, help="Requests behind them.")
@click.option("--option", "given", multiple=True, metavar="NAME=NUMBER", help="Option of the pipeline.")
def main(model: str, port: int, slots: int, waiting_room: int, given: tuple[str, ...]) -> None:
    """Prints its address, and serves until SIGTERM."""
    if not model:
        asyncio.run(serve_silence(port))
        return
    options = {name: int(value) for name, _, value in (one.partition("=") for one in given)}
    serve_random(model, port, slots, waiting_room, options)


if __name__ == "__main__":
    main()
