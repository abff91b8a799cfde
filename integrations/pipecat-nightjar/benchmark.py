"""The latency that the Pipecat service adds to the bare WebSocket: the time to the first audio of one
sentence.

`make bench` starts `nightjar serve --model hibari` and writes benchmarks/results/pipecat.json of the
checkout. A round makes one request over a bare WebSocket, one through `NightjarTTSService` and one through
Pipecat's `CartesiaTTSService`, each over an open connection to the same server. The time starts just before
the text is sent, or is passed to the pipeline, and ends when the listener gets the first audio frame.

The time that a service adds is measured within one request, so that it does not contain the model's time:
from the text to the message that the service sends, and from the first message with audio to its frame.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loguru import logger
from pipecat.frames.frames import TTSAudioRawFrame, TTSSpeakFrame, TTSStoppedFrame
from pipecat.services.cartesia.tts import CartesiaTTSService
from pipecat.services.tts_service import WebsocketTTSService
from pipecat_nightjar import NightjarTTSService
from websockets.asyncio.client import ClientConnection, connect

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
sys.path[:0] = [str(_HERE / "tests"), str(_ROOT / "examples/voice_agent")]
from conftest import NightjarServer  # noqa: E402
from conversation import Conversation, converse  # noqa: E402

_RESULT = _ROOT / "benchmarks/results/pipecat.json"
_SENTENCE = "The library opens in the morning."
_RATE = 24_000
_BARE = "bare WebSocket"
_WARM_UP = 5


class TimedConnection:
    """Records when a service sends the first message of a request, and when the first message with audio
    arrives."""

    def __init__(self, service: WebsocketTTSService) -> None:
        connection: Any = service._websocket
        self._send, self._recv = connection.send, connection.recv
        connection.send, connection.recv = self.send, self.recv
        # A service may also iterate over its connection.
        connection.__class__ = type("Timed", (type(connection),), {"__aiter__": lambda _: self.messages()})
        self.sent = self.received = 0.0

    async def send(self, message: str) -> None:
        self.sent = self.sent or time.perf_counter()
        await self._send(message)

    async def recv(self) -> Any:
        message = await self._recv()
        if not self.received and '"chunk"' in message[:40]:
            self.received = time.perf_counter()
        return message

    async def messages(self) -> AsyncIterator[Any]:
        while True:
            yield await self.recv()


async def bare(connection: ClientConnection, number: int) -> float:
    """Seconds to the first audio over an open WebSocket, decoded."""
    output = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": _RATE}
    message = {
        "context_id": f"bare-{number}",
        "transcript": _SENTENCE,
        "continue": False,
        "model_id": "hibari",
        "output_format": output,
    }
    begin = time.perf_counter()
    await connection.send(json.dumps(message))
    first = 0.0
    while not (answer := json.loads(await connection.recv()))["done"]:
        if answer["type"] == "chunk" and not first:
            base64.b64decode(answer["data"])
            first = time.perf_counter() - begin
    return first


async def through_pipecat(conversation: Conversation, wire: TimedConnection) -> tuple[float, float]:
    """Seconds from the text, which a running pipeline gets, to its first audio frame after the service; and
    the seconds that the service adds."""
    below = conversation.below
    below.frames.clear()
    wire.sent = wire.received = 0.0
    begin = time.perf_counter()
    await conversation.send(TTSSpeakFrame(_SENTENCE))
    await below.until(lambda: bool(below.of(TTSAudioRawFrame)))
    end = time.perf_counter()
    await below.until(lambda: bool(below.of(TTSStoppedFrame)))
    return end - begin, wire.sent - begin + end - wire.received


async def measure(server: NightjarServer, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Returns for each way the (milliseconds to the first audio, milliseconds added) of every round."""
    settings = CartesiaTTSService.Settings(model="hibari", voice="heart")
    services: dict[str, WebsocketTTSService] = {
        "NightjarTTSService": NightjarTTSService(
            base_url=server.url, settings=NightjarTTSService.Settings(model="hibari")
        ),
        "CartesiaTTSService": CartesiaTTSService(api_key="any", url=server.websocket_url, settings=settings),
    }
    opened: dict[str, Conversation] = {}
    ready, over = asyncio.Event(), asyncio.Event()

    async def hold(name: str) -> None:
        async def script(conversation: Conversation) -> None:
            opened[name] = conversation
            if len(opened) == len(services):
                ready.set()
            await over.wait()

        await converse(services[name], script, rate=_RATE)

    held = [asyncio.create_task(hold(name)) for name in services]
    await ready.wait()
    wires = {name: TimedConnection(service) for name, service in services.items()}
    found: dict[str, list[tuple[float, float]]] = {}
    async with connect(server.websocket_url, compression=None) as connection:
        for number in range(_WARM_UP + rounds):
            took = {_BARE: (await bare(connection, number), 0.0)}
            for name, wire in wires.items():
                took[name] = await through_pipecat(opened[name], wire)
            if number >= _WARM_UP:
                for name, (first, added) in took.items():
                    found.setdefault(name, []).append((1000 * first, 1000 * added))
    over.set()
    await asyncio.gather(*held)
    return found


def figures(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """The median and the 95th percentile of the time to the first audio and of the added time, for each
    way."""
    table: dict[str, Any] = {}
    for name, times in found.items():
        row: dict[str, float] = {}
        for column, values in zip(("first_audio_ms", "added_ms"), zip(*times, strict=True), strict=True):
            row[f"{column}_p50"] = round(statistics.median(values), 2)
            row[f"{column}_p95"] = round(statistics.quantiles(values, n=20)[-1], 2)
        table[name] = row
    return table


def rows(table: dict[str, Any]) -> str:
    """The table of docs/voice-agents.md."""
    lines = ["| way | first audio, median | 95 % | added, median |", "|---|---|---|---|"]
    for name, row in table.items():
        way = f"the {name}" if name == _BARE else f"`{name}` of Pipecat"
        added = "" if name == _BARE else f"{row['added_ms_p50']:.1f} ms"
        lines.append(
            f"| {way} | {row['first_audio_ms_p50']:.1f} ms | {row['first_audio_ms_p95']:.1f} ms | {added} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--to", type=Path, default=_RESULT, help="the result file")
    options = parser.parse_args()
    logger.remove()
    with tempfile.TemporaryDirectory() as folder:
        server = NightjarServer(Path(folder))
        server.start()
        try:
            table = figures(asyncio.run(measure(server, options.rounds)))
        finally:
            server.stop()
    result = {
        "what": "first audio of a sentence, through Pipecat and over the bare WebSocket; nightjar serve --model hibari, one client",
        "aim_added_ms": 2,
        "must_added_ms": 5,
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "load_of_the_machine": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "pipecat_ai": version("pipecat-ai"),
        "ways": table,
    }
    options.to.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"`hibari` on {result['cores']} CPU cores (load {result['load_of_the_machine']}), one client, {options.rounds} rounds\n"
    )
    print(rows(table))


if __name__ == "__main__":
    main()
