"""Servers to measure streams of: `python -m benchmarks.stream_server FOLDER` serves a checkpoint of random weights, whose
speech counts as done where it did not end. Without a folder a server answers every speech with silence at once, to
measure the clients' own delay.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from asyncio import StreamReader, StreamWriter
from pathlib import Path

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


_CARD = {"id": "local", "owned_by": "nightjar", "sample_rate": RATE, "capabilities": {"voices": ["calm"]}}
_PAGES = {
    "/v1/models": json.dumps({"data": [_CARD]}).encode(),
    "/metrics": b"speech_server_running 0\nspeech_engine_batch_size 0\n",
}


async def answer_silence(reader: StreamReader, writer: StreamWriter) -> None:
    """Answers what `benchmarks.stream` asks for over HTTP, on one connection."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, path = head.split(maxsplit=2)[:2]
            pairs = (line.partition(":") for line in head.split("\r\n")[1:])
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if method != "POST":
                content = _PAGES.get(path, b'{"status": "ready"}')
                writer.write(b"HTTP/1.1 200 -\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
                continue
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: audio/pcm\r\n\r\n")
            for piece in chunks_of(json.loads(body)["max_seconds"]):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def serve_silence(port: int) -> None:
    server = await asyncio.start_server(answer_silence, "127.0.0.1", port, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    gc.disable()
    await server.serve_forever()


def main() -> None:
    """Prints its address, and serves until SIGTERM."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?")
    made.add_argument("--port", type=int, default=0, help="0 takes a free one")
    made.add_argument("--slots", type=int, default=256, help="requests in the engine at once")
    made.add_argument("--waiting-room", type=int, default=256, help="requests that may wait for a slot")
    made.add_argument("--option", action="append", default=[], metavar="NAME=NUMBER", help="of the pipeline")
    options = made.parse_args()
    if options.model is None:
        asyncio.run(serve_silence(options.port))
        return
    given = {name: int(value) for name, _, value in (one.partition("=") for one in options.option)}
    serve_random(options.model, options.port, options.slots, options.waiting_room, given)


if __name__ == "__main__":
    main()
