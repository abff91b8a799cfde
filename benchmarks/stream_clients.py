"""One process of clients of `benchmarks.stream`, on bare sockets: HTTP/1.1 and Cartesia's WebSocket.

It reads its plan as a line of JSON, connects, and prints `ready`; then it reads when to start, and prints what it
received as JSON. Only the standard library is imported, so that it starts in a tenth of a second. Times are those of
`time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import random
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BYTES_PER_SAMPLE, CHARACTERS_PER_SECOND = 2, 15.0
#: The load continues after the span that counts, so that its last streams begin under load too; what is left later is
#: broken off.
AFTER_SECONDS, DRAIN_SECONDS = 1.0, 5.0
#: A client that was refused waits this long before it asks again.
_REFUSED_SECONDS = 0.1
#: Harvard sentences, lists 1 and 2.
SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It's easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "The hogs were fed chopped corn and garbage.",
    "Four hours of steady work faced us.",
    "A large size in stockings is hard to sell.",
    "The boy was there when the sun rose.",
    "A rod is used to catch pink salmon.",
    "The source of the huge river is the clear spring.",
    "Kick the ball straight and follow through.",
    "Help the woman get back to her feet.",
    "A pot of tea helps to pass the evening.",
    "Smoky fires lack flame and heat.",
    "The soft cushion broke the man's fall.",
    "The salt breeze came across from the sea.",
    "The girl at the booth sold fifty bonds.",
)
SPEECH = "/v1/audio/speech"
_CARTESIA_VERSION = "2025-04-16"
_TEXT, _CLOSE, _PING, _PONG = 1, 8, 9, 10
#: Takes the time and the number of bytes of audio that came.
OnBytes = Callable[[float, int], None]


@dataclass(slots=True)
class Plan:
    """A server, and what the clients of one process ask of it. Times in seconds."""

    url: str
    model: str
    key: str = ""
    voice: str | None = None
    sample_rate: int = 24_000
    #: Whether the server is ours, which takes the seed of a speech, and whether requests say its length in seconds
    #: too.
    own: bool = True
    sized: bool = True
    #: A WAV file that every request clones ("": none), with other samples in each one if it shall be `new`.
    recording: str = ""
    new: bool = False
    #: Further fields of every request.
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    protocol: str = "http"
    #: Requests a second (open loop), or clients back to back.
    rate: float = 0.0
    clients: int = 0
    #: Clients that ask for whole answers, back to back.
    batch_clients: int = 0
    #: Clients play what they received before they ask again.
    listen: bool = False
    #: Seconds of the shortest and of the longest speech.
    seconds: tuple[float, float] = (2.0, 8.0)
    #: Seconds before the span that counts, and its length: audio that comes in it and requests that are sent in it.
    warm_up: float = 0.0
    duration: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Player:
    """A listener's loudspeaker: it starts with the first audio and waits whenever there is none."""

    began: float | None = None
    audio_seconds: float = 0.0
    #: Seconds of each wait after the start.
    underruns: list[float] = field(default_factory=list[float])
    _waited: float = 0.0

    def receive(self, at: float, seconds: float) -> None:
        """Takes audio that came at a time."""
        if self.began is None:
            self.began = at
        late = at - self.silent_at
        if late > 0:
            self.underruns.append(late)
            self._waited += late
        self.audio_seconds += seconds

    @property
    def silent_at(self) -> float:
        """When everything that came has been played."""
        return (self.began or 0.0) + self.audio_seconds + self._waited


@dataclass(slots=True)
class Answer:
    """What came of one request. Times in seconds."""

    sent: float
    #: How much later than planned the request was written.
    late: float
    #: Whether it was a whole answer, no stream.
    whole: bool
    asked_audio: float
    first: float | None = None
    took: float = 0.0
    audio: float = 0.0
    underruns: list[float] = field(default_factory=list[float])
    #: "" for an answer to its end, "cut off" at the end of the plan ("no audio in time" before any), or the code of a
    #: failure.
    failure: str = "cut off"


class HttpConnection:
    """A connection that is kept and has one request at a time."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        self.host, self.port, self.key = parts.hostname or "127.0.0.1", parts.port or 80, key
        self._hung_up = self._last = False

    @property
    def closed(self) -> bool:
        """Whether it takes no further request."""
        return self._hung_up or self._last or self._reader.at_eof()

    async def open(self) -> None:
        """Raises `OSError` where the server does not listen."""
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)

    def hang_up(self) -> None:
        """Closes the connection in the middle of an answer, which then has the failure "cut off"."""
        self._hung_up = True
        self._writer.transport.abort()

    def message(self, body: dict[str, Any], recording: bytes = b"") -> bytes:
        """What is sent for a request. `recording`: base64 of a file that is cloned."""
        content = json.dumps(body).encode()
        return content[:-1] + b', "reference_audio": "' + recording + b'"}' if recording else content

    async def ask(self, content: bytes, on_bytes: OnBytes) -> str:
        """Sends a message and reads its answer: "" after a whole one, else the code or the name of what went wrong."""

        def on_piece(count: int) -> None:
            if self._hung_up:
                raise EOFError
            on_bytes(time.monotonic(), count)

        try:
            failure = await self._ask(content, on_piece)
        except (OSError, EOFError):
            failure, self._last = "connection lost", True
        except (ValueError, IndexError, asyncio.LimitOverrunError):
            failure, self._last = "no answer of this protocol", True
        return "cut off" if self._hung_up else failure

    async def _ask(self, content: bytes, on_piece: Callable[[int], None]) -> str:
        error = b""
        lines = "Content-Type: application/json", f"Content-Length: {len(content)}"
        self._writer.write(self._head(f"POST {SPEECH} HTTP/1.1", *lines) + content)
        status, headers = await self._read_head()
        async for piece in self._body(headers):
            if status == 200:
                on_piece(len(piece))
            else:
                error += piece
        self._last |= headers.get("connection", "").lower() == "close"
        return "" if status == 200 else f"{status} {_code_of(error)}".strip()

    def _head(self, first: str, *lines: str) -> bytes:
        allowed = [f"Authorization: Bearer {self.key}"] if self.key else []
        return "\r\n".join([first, f"Host: {self.host}:{self.port}", *lines, *allowed, "", ""]).encode()

    async def _read_head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of an answer."""
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def _body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The pieces of a body as they come: of chunks, of a known length, or up to the connection's end."""
        if "chunked" not in headers.get("transfer-encoding", ""):
            known = "content-length" in headers
            async for piece in self._pieces(int(headers["content-length"]) if known else sys.maxsize, known):
                yield piece
            self._last |= not known
            return
        while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            async for piece in self._pieces(size, True):
                yield piece
            await self._reader.readexactly(2)
        while await self._reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass

    async def _pieces(self, left: int, whole: bool) -> AsyncIterator[bytes]:
        while left and (piece := await self._reader.read(min(left, 1 << 16))):
            left -= len(piece)
            yield piece
        if left and whole:
            raise EOFError


def _code_of(error: bytes) -> str:
    """Such as `queue_full`; "" of an error of another form."""
    try:
        return str(json.loads(error)["error"]["code"] or "")
    except (ValueError, KeyError, TypeError):
        return ""


class CartesiaConnection(HttpConnection):
    """Cartesia's `/tts/websocket`: one context at a time. `body` is what the message says beside its context."""

    _contexts = 0

    async def open(self) -> None:
        """Connects and shakes hands. Raises `OSError` where there is no such route."""
        await super().open()
        query = f"cartesia_version={_CARTESIA_VERSION}" + (f"&api_key={self.key}" if self.key else "")
        key = base64.b64encode(os.urandom(16)).decode()
        upgrade = "Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {key}"
        first = f"GET /tts/websocket?{query} HTTP/1.1"
        self._writer.write(self._head(first, *upgrade, "Sec-WebSocket-Version: 13"))
        status, _ = await self._read_head()
        if status != 101:
            raise ConnectionError(f"the WebSocket was answered with {status}")

    def message(self, body: dict[str, Any], recording: bytes = b"") -> bytes:
        self._contexts += 1
        return super().message({**body, "context_id": f"c{self._contexts}"})

    async def _ask(self, content: bytes, on_piece: Callable[[int], None]) -> str:
        context = f"c{self._contexts}"
        self._send(content)
        while True:
            opcode, payload = await self._message()
            if opcode == _PING:
                self._send(payload, _PONG)
            elif opcode == _CLOSE:
                raise EOFError
            if opcode != _TEXT or (message := json.loads(payload)).get("context_id") != context:
                continue
            if message.get("type") == "chunk" and (data := message.get("data")):
                on_piece(len(data) * 3 // 4 - data[-2:].count("="))
            elif message.get("type") == "error":
                return f"error {message.get('error_code') or message.get('title') or ''}".strip()
            if message.get("done"):
                return ""

    def _send(self, payload: bytes, opcode: int = _TEXT) -> None:
        """Writes a message, masked as the protocol asks of a client; a mask of zeros is one."""
        count = len(payload)
        size = bytes([128 | count]) if count < 126 else bytes([254]) + count.to_bytes(2, "big")
        if count >= 1 << 16:
            size = bytes([255]) + count.to_bytes(8, "big")
        self._writer.write(bytes([128 | opcode]) + size + bytes(4) + payload)

    async def _message(self) -> tuple[int, bytes]:
        """Opcode and payload of the next message, its fragments joined."""
        opcode, payload, final = 0, b"", False
        while not final:
            first, size = await self._reader.readexactly(2)
            if size >= 126:  # servers do not mask
                size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8), "big")
            payload += await self._reader.readexactly(size)
            opcode, final = first & 15 or opcode, bool(first & 128)
        return opcode, payload


CONNECTIONS: dict[str, type[HttpConnection]] = {"http": HttpConnection, "websocket": CartesiaConnection}


def arrivals(rate: float, chance: random.Random, start: float, stop: float) -> Iterator[float]:
    """Times of a Poisson process of `rate` a second."""
    at = start + chance.expovariate(rate)
    while at < stop:
        yield at
        at += chance.expovariate(rate)


def words_of(seconds: float, number: int, first: str = "") -> str:
    """Words about as long as their speech; equal arguments give equal ones."""
    room = round(seconds * CHARACTERS_PER_SECOND)
    text = first
    while len(text) < room:
        text, number = f"{text} {SENTENCES[number % len(SENTENCES)]}".strip(), number + 1
    return text[:room].rstrip(" ,")


def text_of(seconds: float, number: int) -> str:
    """One sentence about as long as its speech: a server may speak each sentence by itself."""
    return words_of(seconds, number).replace(".", ",").rstrip(" ,") + "."


def request_body(plan: Plan, seconds: float, number: int, whole: bool = False) -> dict[str, Any]:
    """What a request for a speech of a length says, in the plan's protocol; a whole answer is asked for over HTTP."""
    text, voice = text_of(seconds, number), plan.voice
    if plan.protocol == "websocket" and not whole:
        output = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": plan.sample_rate}
        body: dict[str, Any] = {"model_id": plan.model, "transcript": text, "output_format": output}
        body |= {"continue": False, "language": "en", "max_buffer_delay_ms": 0}
        body |= {"voice": {"mode": "id", "id": voice}} if voice else {}
    else:
        body = {"model": plan.model, "input": text, "response_format": "pcm", "stream": not whole}
        body |= {"voice": voice} if voice else {}
    if plan.own:
        body["seed"] = number
    if plan.own and plan.sized:
        body["max_seconds"] = round(seconds, 3)
    return body | plan.fields


class Clients:
    """All clients of a process, on one event loop."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.chance = plan, random.Random(plan.seed + 1)
        self.answers: list[Answer] = []
        #: Seconds of audio in the span, of streams and of whole answers.
        self.audio_in_span = {False: 0.0, True: 0.0}
        #: Open connections without a request, of streams and of whole answers.
        self._idle: dict[bool, list[HttpConnection]] = {False: [], True: []}
        self._busy: set[HttpConnection] = set()
        self._number = plan.seed % 10_000 * 100_000
        self._recording = base64.b64encode(Path(plan.recording).read_bytes()) if plan.recording else b""

    async def connect(self) -> None:
        """Opens the connections that the first streams need."""
        streams = self.plan.clients or max(round(self.plan.rate * 0.5), 1)
        tried = (self._connect(False) for _ in range(min(streams, 256)))
        found = await asyncio.gather(*tried, return_exceptions=True)
        self._idle[False] += [one for one in found if isinstance(one, HttpConnection)]

    async def run(self, start: float) -> dict[str, Any]:
        """From a time until the plan's end; everything that was received."""
        plan, self._start = self.plan, start
        self._from = start + plan.warm_up
        self._until = self._from + plan.duration
        self._stop = self._until + AFTER_SECONDS
        tasks = [asyncio.create_task(self._client(index)) for index in range(plan.clients)]
        tasks += [asyncio.create_task(self._batch_client()) for _ in range(plan.batch_clients)]
        if plan.rate:
            tasks.append(asyncio.create_task(self._arrivals()))
        if tasks:
            await asyncio.wait(tasks, timeout=self._until + DRAIN_SECONDS - time.monotonic())
        for connection in list(self._busy):
            connection.hang_up()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self.answers:
            if one.failure == "cut off" and one.first is None and not one.whole:
                one.failure = "no audio in time"
        audio = self.audio_in_span
        heard = [asdict(one) for one in self.answers]
        return {"heard": heard, "stream_audio_s": audio[False], "batch_audio_s": audio[True]}

    async def _arrivals(self) -> None:
        """The open loop: a request at each arrival, however many are under way."""
        under_way: set[asyncio.Task[Any]] = set()
        for at in arrivals(self.plan.rate, random.Random(self.plan.seed), self._start, self._stop):
            await asyncio.sleep(at - time.monotonic())
            task = asyncio.create_task(self._one(at))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        if under_way:
            await asyncio.wait(under_way)

    async def _client(self, index: int) -> None:
        """The closed loop of one client; a listener waits until it has played what it got."""
        plan = self.plan
        # Listeners do not all begin at once: their beginnings are spread over the mean length of a speech.
        spread = sum(plan.seconds) / 2 if plan.listen else 0.0
        await asyncio.sleep(self._start + spread * index / max(plan.clients, 1) - time.monotonic())
        while time.monotonic() < self._stop:
            answer, player = await self._one(time.monotonic())
            if answer.failure:
                await asyncio.sleep(_REFUSED_SECONDS)
            elif plan.listen:
                await asyncio.sleep(player.silent_at - time.monotonic())

    async def _batch_client(self) -> None:
        await asyncio.sleep(self._start - time.monotonic())
        while time.monotonic() < self._stop:
            answer, _ = await self._one(time.monotonic(), True)
            if answer.failure:
                await asyncio.sleep(_REFUSED_SECONDS)

    async def _one(self, planned: float, whole: bool = False) -> tuple[Answer, Player]:
        """One request from its first byte to its end."""
        plan, player = self.plan, Player()
        seconds = self.chance.uniform(*plan.seconds)
        answer = Answer(time.monotonic(), 0.0, whole, seconds, underruns=player.underruns)
        self.answers.append(answer)
        try:
            connection = await self._free_connection(whole)
        except OSError as error:
            answer.failure = f"cannot connect ({type(error).__name__})"
            return answer, player
        self._number += 1
        content = connection.message(request_body(plan, seconds, self._number, whole), self._cloned())

        def on_bytes(at: float, count: int) -> None:
            if answer.first is None:
                answer.first = at - answer.sent
            piece = count / BYTES_PER_SAMPLE / plan.sample_rate
            player.receive(at, piece)
            answer.audio += piece
            if self._from <= at < self._until:
                self.audio_in_span[whole] += piece

        self._busy.add(connection)
        answer.sent = time.monotonic()
        answer.late = answer.sent - planned
        answer.failure = await connection.ask(content, on_bytes)
        answer.took = time.monotonic() - answer.sent
        self._busy.discard(connection)
        if answer.failure == "" and answer.first is None:
            answer.failure = "no audio"
        if connection.closed:
            connection.hang_up()
        else:
            self._idle[whole].append(connection)
        return answer, player

    def _cloned(self) -> bytes:
        """Base64 of the recording; three of the samples after the header of a new one are its own."""
        if not self.plan.new:
            return self._recording
        at = 48 // 3 * 4
        return self._recording[:at] + base64.b64encode(os.urandom(6)) + self._recording[at + 8 :]

    async def _free_connection(self, whole: bool) -> HttpConnection:
        idle = self._idle[whole]
        while idle:
            if not (connection := idle.pop()).closed:
                return connection
        return await self._connect(whole)

    async def _connect(self, whole: bool) -> HttpConnection:
        connection = CONNECTIONS["http" if whole else self.plan.protocol](self.plan.url, self.plan.key)
        await connection.open()
        return connection


#: Of the server that answers with silence: samples a second, and frames of the first chunks and of all that follow.
_RATE, _FRAME_SECONDS, _RAMP = 24_000, 0.08, (1, 2, 4, 8, 12)


def chunks_of(seconds: float) -> list[bytes]:
    """Silence of a length, cut as a server cuts a stream."""
    left, found = max(round(seconds / _FRAME_SECONDS), 1), list[bytes]()
    while left:
        frames = min(_RAMP[min(len(found), len(_RAMP) - 1)], left)
        found.append(bytes(round(frames * _FRAME_SECONDS * _RATE) * 2))
        left -= frames
    return found


_CARD = {"id": "local", "owned_by": "nightjar", "sample_rate": _RATE, "capabilities": {"voices": ["calm"]}}
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


async def _run(clients: Clients) -> dict[str, Any]:
    await clients.connect()
    print("ready", flush=True)
    return await clients.run(float(sys.stdin.readline()))


def main() -> None:
    clients = Clients(Plan(**json.loads(sys.stdin.readline())))
    # A collection would be a pause for all clients; the process is short.
    gc.disable()
    json.dump(asyncio.run(_run(clients)), sys.stdout)


if __name__ == "__main__":
    main()
