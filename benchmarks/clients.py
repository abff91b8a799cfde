"""Clients of a server on bare sockets, in one event loop of each process that `benchmarks.stream` starts."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.voices import recording, words_of

SPEECH, BYTES_PER_SAMPLE = "/v1/audio/speech", 2
#: The load continues after the span that counts, so that its last streams begin under load too; what is left later is
#: broken off.
AFTER_SECONDS, DRAIN_SECONDS = 1.0, 5.0
#: A client that was refused waits this long before it asks again.
_REFUSED_SECONDS = 0.1


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
    #: A WAV file that every request clones ("": none), with other samples in each one if it shall be `new`; its text, if
    #: requests have it.
    recording: str = ""
    new: bool = False
    spoken: str = ""
    #: Requests after which the clients end (0: at the end of the time), each of which clones a recording of its own, in
    #: context.
    clones: int = 0
    #: Further fields of every request, and a file of texts (`{"text": ...}` in each line) instead of ours.
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    texts: str = ""
    #: Whether answers say when their first audible sample plays.
    audible: bool = False
    #: Requests a second (open loop), or clients back to back.
    rate: float = 0.0
    clients: int = 0
    #: Clients play what they received before they ask again.
    listen: bool = False
    #: Seconds of the shortest and of the longest speech, and of the most frequent one (None: all are equally frequent).
    seconds: tuple[float, float] = (2.0, 8.0)
    usual: float | None = None
    #: Seconds before the span that counts, and its length: audio that comes in it and requests that are sent in it.
    warm_up: float = 0.0
    duration: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Answer:
    """What came of one request, and its listener's loudspeaker: it starts with the first audio and waits whenever there is
    none. Times in seconds."""

    sent: float
    asked_audio: float
    #: How much later than planned the request was written.
    late: float = 0.0
    first: float | None = None
    took: float = 0.0
    audio: float = 0.0
    #: Of each wait after the start.
    underruns: list[float] = field(default_factory=list[float])
    #: When the first audible sample plays, after the request was sent, and the silence before it in the audio.
    audible: float | None = None
    silence: float | None = None
    #: "" for an answer to its end, "cut off" at the end of the plan ("no audio in time" before any), or the code of a
    #: failure.
    failure: str = "cut off"

    def receive(self, at: float, seconds: float) -> None:
        """Takes audio that came at a time."""
        if self.first is None:
            self.first = at - self.sent
        elif (wait := at - self.silent_at) > 0:
            self.underruns.append(wait)
        self.audio += seconds

    @property
    def silent_at(self) -> float:
        """When everything that came has been played."""
        return self.sent + (self.first or 0.0) + self.audio + sum(self.underruns)


#: The least level of an audible frame, and how much of an answer is searched for one.
_AUDIBLE_DBFS, _SEARCHED_SECONDS = -45.0, 2.0


def first_audible(pieces: Sequence[tuple[float, bytes]], rate: int) -> tuple[float, float] | None:
    """When a player that starts with the first piece of PCM plays the first audible sample, and the silence before that
    sample, in seconds; None if there is none. `pieces`: with the time at which each came.

    Audible as Nari's `tts_bench` defines it: the first of two frames of 20 ms, 10 ms apart, whose level without their mean
    is -45 dBFS or more.
    """
    content = b"".join(piece for _, piece in pieces)
    samples = np.frombuffer(content[: len(content) // 2 * 2], "<i2").astype(np.float32) / 32768
    if len(samples) < rate // 50:
        return None
    frames = np.lib.stride_tricks.sliding_window_view(samples, rate // 50)[:: rate // 100]
    loud = frames.std(axis=1) >= 10 ** (_AUDIBLE_DBFS / 20)
    found = np.flatnonzero(loud[:-1] & loud[1:])
    if not len(found):
        return None
    silence, before, plays_at = int(found[0]) / 100, 0.0, pieces[0][0]
    for at, piece in pieces:
        plays_at, seconds = max(plays_at, at), len(piece) / BYTES_PER_SAMPLE / rate
        if silence < before + seconds:
            break
        plays_at, before = plays_at + seconds, before + seconds
    return plays_at + silence - before, silence


class HttpConnection:
    """A connection that is kept and has one request at a time. Libraries take up to 0.4 ms more until the first piece of an
    answer, which would count as the server's."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        lines = [f"POST {SPEECH} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines += [f"Authorization: Bearer {key}"] if key else []
        self._head = "\r\n".join([*lines, "Content-Type: application/json", "Content-Length: "])
        self._hung_up = self._last = False

    @property
    def closed(self) -> bool:
        """Whether it takes no further request."""
        return self._hung_up or self._last or self._reader.at_eof()

    async def open(self) -> HttpConnection:
        """Raises `OSError` where the server does not listen."""
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)
        return self

    def hang_up(self) -> None:
        """Closes the connection in the middle of an answer, which then has the failure "cut off"."""
        self._hung_up = True
        self._writer.transport.abort()

    async def ask(self, content: bytes, on_bytes: Callable[[float, bytes], None]) -> str:
        """Sends a request and reads its answer, whose audio goes to `on_bytes` with its time: "" after a whole one, else the
        code or the name of what went wrong."""
        try:
            failure = await self._ask(content, on_bytes)
        except (OSError, EOFError):
            failure, self._last = "connection lost", True
        except (ValueError, LookupError, asyncio.LimitOverrunError):
            failure, self._last = "no answer of this protocol", True
        return "cut off" if self._hung_up else failure

    async def _ask(self, content: bytes, on_bytes: Callable[[float, bytes], None]) -> str:
        self._writer.write(f"{self._head}{len(content)}\r\n\r\n".encode() + content)
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        status, error = int(first.split()[1]), b""
        async for piece in self._body(headers):
            if self._hung_up:
                raise EOFError
            if status == 200:
                on_bytes(time.monotonic(), piece)
            else:
                error += piece
        self._last |= headers.get("connection", "").lower() == "close"
        return "" if status == 200 else f"{status} {_code_of(error)}".strip()

    async def _body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The pieces of a body as they come: of chunks, or of a known length."""
        if "chunked" not in headers.get("transfer-encoding", ""):
            async for piece in self._pieces(int(headers["content-length"])):
                yield piece
            return
        while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            async for piece in self._pieces(size):
                yield piece
            await self._reader.readexactly(2)
        while await self._reader.readuntil(b"\r\n") != b"\r\n":  # trailers
            pass

    async def _pieces(self, left: int) -> AsyncIterator[bytes]:
        while left and (piece := await self._reader.read(min(left, 1 << 16))):
            left -= len(piece)
            yield piece
        if left:
            raise EOFError


def _code_of(error: bytes) -> str:
    """Such as `queue_full`; "" of an error of another form."""
    try:
        return str(json.loads(error)["error"]["code"] or "")
    except (ValueError, KeyError, TypeError):
        return ""


def text_of(seconds: float, number: int) -> str:
    """One sentence about as long as its speech: a server may speak each sentence by itself."""
    return words_of(seconds, number).replace(".", ",").rstrip(" ,") + "."


def request_body(
    plan: Plan, seconds: float, number: int, recording: bytes = b"", text: str = "", spoken: str = ""
) -> bytes:
    """What a request for a speech of a length says. `recording`: base64 of a file that is cloned, in which this is
    `spoken`."""
    text = text or text_of(seconds, number)
    body = {"model": plan.model, "input": text, "response_format": "pcm", "stream": True, **plan.fields}
    body |= {"voice": plan.voice} if plan.voice else {}
    body |= {"seed": number} if plan.own else {}
    body |= {"max_seconds": round(seconds, 3)} if plan.own and plan.sized else {}
    body |= {"reference_text": spoken} if spoken else {}
    content = json.dumps(body).encode()
    # Half a megabyte needs no JSON encoder.
    return content[:-1] + b', "reference_audio": "' + recording + b'"}' if recording else content


class Clients:
    """All clients of a process, on one event loop."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.chance = plan, random.Random(plan.seed + 1)
        self.answers: list[Answer] = []
        #: Seconds of audio in the span.
        self.audio_in_span = 0.0
        #: Open connections without a request.
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._number = plan.seed % 10_000 * 100_000
        self._recording = base64.b64encode(Path(plan.recording).read_bytes()) if plan.recording else b""
        #: Recordings that are left, each with its text.
        self._recordings = [self._new_recording(self._number + index) for index in range(plan.clones)]
        lines = Path(plan.texts).read_text(encoding="utf-8").splitlines() if plan.texts else []
        self._texts = [str(json.loads(line)["text"]) for line in lines]

    async def connect(self) -> None:
        """Opens the connections that the first streams need."""
        streams = self.plan.clients or max(round(self.plan.rate * 0.5), 1)
        tried = (HttpConnection(self.plan.url, self.plan.key).open() for _ in range(min(streams, 256)))
        found = await asyncio.gather(*tried, return_exceptions=True)
        self._idle += [one for one in found if isinstance(one, HttpConnection)]

    async def run(self, start: float) -> tuple[list[Answer], float]:
        """From a time until the plan's end: all answers, and the seconds of audio in the span."""
        plan, self._start = self.plan, start
        self._from = start + plan.warm_up
        self._until = self._from + plan.duration
        self._stop = self._until + AFTER_SECONDS
        tasks = [asyncio.create_task(self._client(index)) for index in range(plan.clients)]
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
            if one.failure == "cut off" and one.first is None:
                one.failure = "no audio in time"
        return self.answers, self.audio_in_span

    async def _arrivals(self) -> None:
        """The open loop: a request at each arrival of a Poisson process, however many are under way."""
        at, chance, under_way = self._start, random.Random(self.plan.seed), set[asyncio.Task[Any]]()
        while (at := at + chance.expovariate(self.plan.rate)) < self._stop:
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
        while self._recordings if plan.clones else time.monotonic() < self._stop:
            answer = await self._one(time.monotonic())
            if answer.failure:
                await asyncio.sleep(_REFUSED_SECONDS)
            elif plan.listen:
                await asyncio.sleep(answer.silent_at - time.monotonic())

    async def _one(self, planned: float) -> Answer:
        """One request from its first byte to its end."""
        plan, seconds, pieces = self.plan, self._length(), list[tuple[float, bytes]]()
        answer = Answer(time.monotonic(), seconds)
        self.answers.append(answer)
        cloned, spoken = self._recordings.pop() if plan.clones else (self._cloned(), plan.spoken)
        try:
            connection = await self._free_connection()
        except OSError as error:
            answer.failure = f"cannot connect ({type(error).__name__})"
            return answer
        self._number += 1
        text = self._texts[self._number % len(self._texts)] if self._texts else ""
        content = request_body(plan, seconds, self._number, cloned, text, spoken)

        def on_bytes(at: float, content: bytes) -> None:
            piece = len(content) / BYTES_PER_SAMPLE / plan.sample_rate
            if plan.audible and answer.audio < _SEARCHED_SECONDS:
                pieces.append((at, content))
            answer.receive(at, piece)
            if self._from <= at < self._until:
                self.audio_in_span += piece

        self._busy.add(connection)
        answer.sent = time.monotonic()
        answer.late = answer.sent - planned
        answer.failure = await connection.ask(content, on_bytes)
        answer.took = time.monotonic() - answer.sent
        self._busy.discard(connection)
        if answer.failure == "" and answer.first is None:
            answer.failure = "no audio"
        if pieces and (heard := first_audible(pieces, plan.sample_rate)):
            answer.audible, answer.silence = heard[0] - answer.sent, heard[1]
        if connection.closed:
            connection.hang_up()
        else:
            self._idle.append(connection)
        return answer

    def _length(self) -> float:
        """Seconds of a speech or a recording."""
        if self.plan.usual is None:
            return self.chance.uniform(*self.plan.seconds)
        return self.chance.triangular(*self.plan.seconds, self.plan.usual)

    def _new_recording(self, number: int) -> tuple[bytes, str]:
        """Base64 of a recording that is no other request's, and a text as long."""
        content, seconds = recording(number, max(self._length(), 1.0), 24_000)
        return base64.b64encode(content), text_of(seconds, number)

    def _cloned(self) -> bytes:
        """Base64 of the recording; three of the samples after the header of a new one are its own."""
        if not self.plan.new:
            return self._recording
        at = 48 // 3 * 4
        return self._recording[:at] + base64.b64encode(os.urandom(6)) + self._recording[at + 8 :]

    async def _free_connection(self) -> HttpConnection:
        while self._idle:
            if not (connection := self._idle.pop()).closed:
                return connection
        return await HttpConnection(self.plan.url, self.plan.key).open()


def client_process(plan: Plan, pipe: Connection) -> None:
    """One process of clients: connects and sends that it is ready; then it reads when to start, and sends
    what `Clients.run` gives. Times are those of `time.monotonic`, which all processes of a host share."""

    async def run() -> tuple[list[Answer], float]:
        made = Clients(plan)
        await made.connect()
        pipe.send("ready")
        return await made.run(pipe.recv())

    # A collection would be a pause for all clients; the process is short.
    gc.disable()
    pipe.send(asyncio.run(run()))
