"""How soon a server's streams begin and whether they ever run dry, under load.

    python -m benchmarks.stream http://127.0.0.1:8000 --parts open --rates 10 20 50
    python -m benchmarks.stream http://127.0.0.1:8000 --clients 1 8 32 64
    python -m benchmarks.stream http://127.0.0.1:8000 --parts listen --listeners 384
    python -m benchmarks.stream --peer http://127.0.0.1:8091 --parts open --rates 10
    python -m benchmarks.stream --sizes 1b7 --parts client closed open --minutes 9
    python -m benchmarks.stream --sizes 1b7 --parts cloning --clients 1 32
    python -m benchmarks.stream --tiny --parts closed --clients 2 --short

With an address, of a server that runs (`--peer`: any OpenAI-style one, which gets OpenAI's fields only); with `--sizes`, of
Qwen3-TTS at full size with random weights: each size gets a checkpoint on disk and a server (`serve`, with the words of
`--server`) in a process of its own. The checkpoint never draws an end, so a speech is as long as its request says. Rows are
written as soon as they are there.

Clients run in processes of their own, on bare sockets. Time zero is just before the first
byte of a request is written, on an open connection; the end is the first PCM byte. Requests are for 2 to 8 s of speech
(`--seconds`; with `--text-lengths` only the text says how long). Every stream has a player that starts with its first chunk;
an underrun is a moment at which it has nothing to play. Parts: `client` is the clients' own delay, on a server that answers at
once; `closed` clients back to back; `open` Poisson arrivals at a rate, however many requests are under way, medians over
`--seeds`; `listen` listeners in real time; `cloning` clients back
to back whose requests have a recording of 8 s, by speaker vector and in context, the same one in each or a new one in each (the
size's Base checkpoint gets a server of its own). A closed point counts
`--duration` seconds after `--warm-up`, an open one twice as long; `--short` is for a first look. `--field NAME=JSON` is a further
field of every request. What does not fit into `--minutes` is left out and named.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import math
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from benchmarks.report import (
    ROOT,
    ProcessUse,
    Result,
    Row,
    device_name,
    listener_pid,
    parser,
    read,
    table,
    write_random_checkpoint,
)
from benchmarks.voices import recording, words_of

PARTS = ("client", "closed", "open", "listen", "cloning")
GAUGES = tuple(
    f"speech_{name}" for name in ("server_running", "server_waiting", "engine_batch_size", "engine_waiting")
)
SERVER = "--slots 256 --waiting-room 1024 --option slots=256 --option streams=128"
#: Length of a speech whose request does not say it; and the longest wait until everything is free again.
LONGEST_SECONDS, IDLE_SECONDS = 8.0, 30.0
#: Length of the recordings that are cloned.
RECORDING_SECONDS = 8.0
#: Time between the word to all processes of clients, which are connected, and the start.
START_SECONDS = 0.1
COLUMNS = (
    "system", "size", "mode", "cloning", "recording", "rate", "clients", "protocol", "first_pcm_ms.50", "first_pcm_ms.95",
    "first_pcm_ms.99", "underrun_share", "underrun_ms.95", "rtf", "audio_s_per_s", "requests", "failures",
    "left_over", "cpu_cores",
)  # fmt: skip
BYTES_PER_SAMPLE = 2
#: The load continues after the span that counts, so that its last streams begin under load too; what is left later is
#: broken off.
AFTER_SECONDS, DRAIN_SECONDS = 1.0, 5.0
#: A client that was refused waits this long before it asks again.
_REFUSED_SECONDS = 0.1
SPEECH = "/v1/audio/speech"
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
    #: Requests a second (open loop), or clients back to back.
    rate: float = 0.0
    clients: int = 0
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

    async def ask(self, content: bytes, on_bytes: OnBytes) -> str:
        """Sends a request and reads its answer: "" after a whole one, else the code or the name of what went wrong."""

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


def arrivals(rate: float, chance: random.Random, start: float, stop: float) -> Iterator[float]:
    """Times of a Poisson process of `rate` a second."""
    at = start + chance.expovariate(rate)
    while at < stop:
        yield at
        at += chance.expovariate(rate)


def text_of(seconds: float, number: int) -> str:
    """One sentence about as long as its speech: a server may speak each sentence by itself."""
    return words_of(seconds, number).replace(".", ",").rstrip(" ,") + "."


def request_body(plan: Plan, seconds: float, number: int, recording: bytes = b"") -> bytes:
    """What a request for a speech of a length says. `recording`: base64 of a file that is cloned."""
    body = {"model": plan.model, "input": text_of(seconds, number), "response_format": "pcm", "stream": True}
    body |= {"voice": plan.voice} if plan.voice else {}
    if plan.own:
        body["seed"] = number
    if plan.own and plan.sized:
        body["max_seconds"] = round(seconds, 3)
    content = json.dumps(body | plan.fields).encode()
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

    async def connect(self) -> None:
        """Opens the connections that the first streams need."""
        streams = self.plan.clients or max(round(self.plan.rate * 0.5), 1)
        tried = (self._connect() for _ in range(min(streams, 256)))
        found = await asyncio.gather(*tried, return_exceptions=True)
        self._idle += [one for one in found if isinstance(one, HttpConnection)]

    async def run(self, start: float) -> dict[str, Any]:
        """From a time until the plan's end; everything that was received."""
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
        return {"heard": [asdict(one) for one in self.answers], "audio_s": self.audio_in_span}

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

    async def _one(self, planned: float) -> tuple[Answer, Player]:
        """One request from its first byte to its end."""
        plan, player = self.plan, Player()
        seconds = self.chance.uniform(*plan.seconds)
        answer = Answer(time.monotonic(), 0.0, seconds, underruns=player.underruns)
        self.answers.append(answer)
        try:
            connection = await self._free_connection()
        except OSError as error:
            answer.failure = f"cannot connect ({type(error).__name__})"
            return answer, player
        self._number += 1
        content = request_body(plan, seconds, self._number, self._cloned())

        def on_bytes(at: float, count: int) -> None:
            if answer.first is None:
                answer.first = at - answer.sent
            piece = count / BYTES_PER_SAMPLE / plan.sample_rate
            player.receive(at, piece)
            answer.audio += piece
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
        if connection.closed:
            connection.hang_up()
        else:
            self._idle.append(connection)
        return answer, player

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
        return await self._connect()

    async def _connect(self) -> HttpConnection:
        connection = HttpConnection(self.plan.url, self.plan.key)
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


async def _clients(clients: Clients) -> dict[str, Any]:
    await clients.connect()
    print("ready", flush=True)
    return await clients.run(float(sys.stdin.readline()))


def clients() -> None:
    """One process of clients: reads its plan as a line of JSON, connects, and prints `ready`; then it reads when to start,
    and prints what it received as JSON. Times are those of `time.monotonic`, which all processes of a host share."""
    made = Clients(Plan(**json.loads(sys.stdin.readline())))
    # A collection would be a pause for all clients; the process is short.
    gc.disable()
    json.dump(asyncio.run(_clients(made)), sys.stdout)


def fetch(url: str, path: str, key: str = "") -> tuple[int, str]:
    """A small page of a server: status and body. Raises `OSError` where it does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(url + path, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""


def plan_of(options: argparse.Namespace, url: str) -> Plan:
    """Asks a server what it is: what every request to it says. Raises `OSError` where it does not answer."""
    url, key = url.rstrip("/"), os.environ.get("SPEECH_SERVE__API_KEY", "")
    status, body = fetch(url, "/v1/models", key)
    if status != 200:
        raise ConnectionError(f"{url}/v1/models was answered with {status}")
    card = json.loads(body)["data"][0]
    own = not options.peer and card.get("owned_by") == "nightjar"
    voices = (card.get("capabilities") or {}).get("voices") if own else None
    fields = {name: json.loads(value) for name, _, value in (one.partition("=") for one in options.field)}
    voice = options.voice or next(iter(voices or ()), None)
    rate, sized = card.get("sample_rate", 24_000), own and not options.text_lengths
    return Plan(url, card["id"], key, voice, rate, own, sized, fields)


def local_pid(url: str) -> int | None:
    """The process of a server on this host."""
    parts = urlsplit(url)
    return listener_pid(parts.port or 80) if parts.hostname in ("127.0.0.1", "localhost", "::1") else None


def measure(plan: Plan, pid: int | None, processes: int, seeds: int = 1) -> Row:
    """The row of a load: medians over its seeds. `pid`: the server's process."""
    rows = [_one_seed(plan, pid, processes, seed) for seed in range(seeds)]
    mode, load = ("open", "rate") if plan.rate else ("closed", "clients")
    about: Row = {"mode": mode, load: getattr(plan, load), "protocol": "http", "seeds": seeds}
    about |= {"warm_up_s": plan.warm_up, "duration_s": plan.duration, "seconds": plan.seconds}
    about |= {"listen": True} if plan.listen else {}
    return about | (rows[0] if seeds == 1 else _joined(rows))


def _one_seed(plan: Plan, pid: int | None, processes: int, seed: int) -> Row:
    roots = [] if pid is None else [pid]
    use = ProcessUse(roots, 0.25)
    command = [sys.executable, "-m", "benchmarks.stream", "clients"]
    plans = _plans(plan, processes, seed)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in plans]
    for worker, one in zip(workers, plans, strict=True):
        _send(worker, json.dumps(asdict(one)))
    for worker in workers:
        assert worker.stdout.readline() == "ready\n", "a process of clients ended before it was connected"
    start = time.monotonic() + START_SECONDS
    for worker in workers:
        _send(worker, repr(start))
    count_from = start + plan.warm_up
    count_until = count_from + plan.duration
    time.sleep(max(count_from - time.monotonic(), 0))
    since = time.time()
    time.sleep(max(count_until - time.monotonic(), 0))
    until = time.time()
    found = [json.loads(worker.communicate(timeout=DRAIN_SECONDS + 60)[0]) for worker in workers]
    row = row_of(found, count_from, count_until, plan.sized)
    use.stop()
    if roots:
        row |= use.between(since, until)
    if plan.own:
        row["left_over"] = left_over(plan)
    return row


def _plans(plan: Plan, processes: int, seed: int) -> list[Plan]:
    """The part of each process of clients."""
    count = processes if plan.rate else min(processes, plan.clients)
    return [
        replace(
            plan,
            seed=1 + 1000 * seed + number,
            rate=plan.rate / count,
            clients=(plan.clients + number) // count,
        )
        for number in range(count)
    ]


def _send(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95, p99 and the maximum in milliseconds, as values that were measured."""
    ordered, shares = sorted(seconds), {"50": 0.5, "95": 0.95, "99": 0.99, "max": 1.0}
    if not ordered:
        return dict.fromkeys(shares)
    places = {name: max(math.ceil(share * len(ordered)) - 1, 0) for name, share in shares.items()}
    return {name: round(1000 * ordered[place], 2) for name, place in places.items()}


def row_of(found: Sequence[dict[str, Any]], count_from: float, count_until: float, sized: bool = True) -> Row:
    """The figures of one load: what its processes of clients received of the requests that were sent in the span."""
    sent = [one for process in found for one in process["heard"] if count_from <= one["sent"] < count_until]
    begun = [one for one in sent if one["first"] is not None]
    done = [one for one in sent if one["failure"] == ""]
    seconds, ended = count_until - count_from, Counter(one["failure"] for one in sent)
    waits = [wait for one in begun for wait in one["underruns"]]
    rtf = [one["took"] / one["audio"] for one in done if one["audio"]]
    return {
        "first_pcm_ms": percentiles_ms([one["first"] for one in begun]),
        "rtf": statistics.median(rtf) if rtf else None,
        "underrun_share": sum(1 for one in begun if one["underruns"]) / len(begun) if begun else None,
        "underruns": len(waits),
        "underrun_ms": percentiles_ms(waits),
        "audio_s_per_s": sum(process["audio_s"] for process in found) / seconds,
        "requests": len(sent),
        "requests_per_s": len(sent) / seconds,
        "failures": {name: count for name, count in ended.items() if name not in ("", "cut off")},
        "cut_off": ended["cut off"],
        "too_short": sum(one["audio"] < 0.8 * one["asked_audio"] for one in done) if sized else 0,
        "client_late_ms": percentiles_ms([one["late"] for one in sent]),
    }


def _joined(values: list[Any]) -> Any:
    """One value of several seeds': the median of each figure, the sum of each count."""
    values = [value for value in values if value is not None]
    if values and isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _joined([value.get(name) for value in values]) for name in names}
    if not values or isinstance(values[0], bool | str | list):
        return values[0] if values else None
    return sum(values) if isinstance(values[0], int) else statistics.median(values)


def left_over(plan: Plan) -> int:
    """Waits until nothing holds a place in the server and its engine any more; how much does after `IDLE_SECONDS`."""
    until = time.monotonic() + IDLE_SECONDS
    while True:
        page = fetch(plan.url, "/metrics", plan.key)[1]
        found = (re.search(rf"^{name} (\S+)$", page, re.MULTILINE) for name in GAUGES)
        left = round(sum(float(match[1]) for match in found if match))
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.02)


@contextmanager
def served(words: Sequence[str], seconds: float = 60.0) -> Iterator[tuple[int, str, Path]]:
    """A server with these words of `serve`, once it is ready: its process, its address, its log."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="nightjar-server-") as name:
        probe.bind(("127.0.0.1", 0))
        port, folder = probe.getsockname()[1], Path(name)
        probe.close()
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "benchmarks.stream", "serve", *words, "--port", str(port)]
        log = folder / "server.log"
        with log.open("wb") as file:
            out: dict[str, Any] = {"stdout": file, "stderr": file, "start_new_session": True}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, **out)
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}", log, seconds)
            yield process.pid, f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError):
            if fetch(url, "/health")[0] == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"The server did not become ready: {log.read_text(errors='replace')[-3000:]}")


class StreamBench(Result):
    """One run: its rows, and what is left of its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("stream_h200", options, device_name(), server=options.server)
        self.size, self.about = "", Row()

    def add(self, row: Row) -> None:
        """Prints and writes a row."""
        self.rows.append({"size": self.size, **self.about, **row})
        lines = table(self.rows[-1:], COLUMNS)
        print(f"{lines}  [{self.seconds_left:.0f} s left]", flush=True)
        self.write()

    def note(self, **facts: Any) -> None:
        """Prints and writes facts of this size."""
        of = self.found.setdefault(f"facts_{self.size}", {}) if self.size else self.found
        of.update(facts)
        print(json.dumps(facts), flush=True)
        self.write()

    def part(self, name: str, work: Callable[..., None], *given: Any, needs_s: float = 0.0) -> None:
        self.attempt_in_time(f"{self.size} {name}".strip(), needs_s, work, *given)

    def measure_size(self, size: str) -> None:
        """The parts of a size, each on a checkpoint of the kind that it needs."""
        self.size, parts = size, self.options.parts
        for kind in ("custom_voice", "base"):
            if chosen := [
                part for part in parts if (part == "cloning") == (kind == "base") and part != "client"
            ]:
                self._measure_checkpoint(size, kind, chosen)

    def _measure_checkpoint(self, size: str, kind: str, parts: Sequence[str]) -> None:
        """A checkpoint of random weights, and a server of it."""
        options = self.options
        with tempfile.TemporaryDirectory(prefix="nightjar-stream-", dir=options.folder) as name:
            checkpoint, texts = Path(name, size), (text_of(5.0, number) for number in range(400))
            length = "--kind", kind, "--seconds", str(LONGEST_SECONDS)
            seconds = write_random_checkpoint(size, checkpoint, texts, options.device, *length)
            self.note(checkpoint_s=round(seconds, 1))
            began, given = time.monotonic(), [str(checkpoint), *shlex.split(options.server)]
            with served(given, options.ready_seconds) as (pid, url, log):
                plan = plan_of(options, url)
                self.note(ready_s=round(time.monotonic() - began, 1))
                self.measure(plan, pid, parts)
                kept = self.path.with_name(f"{self.path.stem}-server-{size}-{kind}.log")
                kept.write_text(log.read_text(errors="replace")[-200_000:], encoding="utf-8")

    def measure(self, plan: Plan, pid: int | None, parts: Sequence[str]) -> None:
        """The parts on a server."""
        options = self.options
        plan = replace(plan, seconds=tuple(options.seconds))
        # The beginnings of listeners are spread over the mean length of a speech, so the warm-up is longer.
        listen = max(options.warm_up, sum(options.seconds) / 2 + 1), 1.5 * options.duration
        for part in parts:
            if part == "closed":
                self._points(plan, pid, "clients", options.clients)
            elif part == "open":
                self._points(plan, pid, "rate", options.rates, 2 * options.warm_up, 2 * options.duration)
            elif part == "listen":
                self._points(replace(plan, listen=True), pid, "clients", options.listeners, *listen)
            elif part == "cloning":
                self._cloning(plan, pid)

    def client(self) -> None:
        """The clients' own delay, on a server that answers at once."""
        options = self.options
        with served([]) as (pid, url, _):
            plan = replace(plan_of(options, url), seconds=tuple(options.seconds), rate=max(options.rates))
            plan = replace(plan, warm_up=2 * options.warm_up, duration=2 * options.duration)
            self.add({"system": "clients alone", **measure(plan, pid, options.processes)})

    def _points(
        self, plan: Plan, pid: int | None, each: str, values: Sequence[float], *span: float
    ) -> None:  # fmt: skip
        """A row for each value. `span`: seconds of the warm-up and of what counts, other than a closed point's."""
        options = self.options
        warm_up, duration = span or (options.warm_up, options.duration)
        plan = replace(plan, warm_up=warm_up, duration=duration)
        seeds, mode = (options.seeds, "open") if each == "rate" else (1, "closed")
        for value in values:
            load = replace(plan, **{each: value})
            needs = seeds * (warm_up + duration + 4)
            self.part(f"{mode} {value:g}", self._point, load, pid, seeds, needs_s=needs)

    def _point(self, load: Plan, pid: int | None, seeds: int) -> None:
        self.add(measure(load, pid, self.options.processes, seeds))

    def _cloning(self, plan: Plan, pid: int | None) -> None:
        """Rows of kept and of new recordings, by speaker vector and in context."""
        with tempfile.TemporaryDirectory(prefix="nightjar-recording-") as name:
            path = Path(name, "recording.wav")
            path.write_bytes(recording(0, RECORDING_SECONDS)[0])
            for cloning, spoken in (
                ("vector", {}),
                ("context", {"reference_text": text_of(RECORDING_SECONDS, 0)}),
            ):
                load = replace(plan, recording=str(path), fields={**plan.fields, **spoken})
                for new in (False, True):
                    self.about = {"cloning": cloning, "recording": "new" if new else "kept"}
                    self._points(replace(load, new=new), pid, "clients", self.options.clients)
        self.about = {}


def serve(given: Sequence[str]) -> None:
    """`serve FOLDER` serves a checkpoint of random weights as `nightjar serve` does, whose speech counts as done where it did
    not end. Without a folder a server answers every speech with silence at once. Prints its address; until SIGTERM."""
    made = argparse.ArgumentParser(description=serve.__doc__)
    made.add_argument("model", nargs="?")
    made.add_argument("--option", action="append", default=[], metavar="NAME=NUMBER", help="of the pipeline")
    options = read(made, given, port=0, slots=256, waiting_room=256)
    if options.model is None:
        asyncio.run(_serve_silence(options.port))
        return
    from jobs.engine_process import engine_options, open_model
    from jobs.settings import load_settings
    from pipelines.interpreter import serve_threads
    from pipelines.registry import describe
    from pipelines.serving import ServeOptions
    from pipelines.serving.server import Server

    card, settings = describe(options.model), load_settings()
    asked = engine_options(settings, card)
    asked |= {name: int(value) for name, _, value in (one.partition("=") for one in options.option)}
    if card.engine != "cpu":
        asked["keep_unfinished"] = True
    room = ServeOptions((Path(card.name).name,), slots=options.slots, waiting_room=options.waiting_room)
    model = lambda: open_model(options.model, card, settings, asked)  # noqa: E731
    server = Server(card, model, room, "127.0.0.1", options.port)
    print(server.url, flush=True)
    serve_threads()
    server.run()


async def _serve_silence(port: int) -> None:
    server = await asyncio.start_server(answer_silence, "127.0.0.1", port, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    gc.disable()
    await server.serve_forever()


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["clients"]:
        clients()
        return 0
    made = parser(__doc__)
    made.add_argument("url", nargs="?", default="", help="address of a server of ours")
    made.add_argument("--field", action="append", default=[], metavar="NAME=JSON")
    options = read(
        made, peer="", sizes=str, parts=["closed"], clients=[1, 8, 32, 64, 128],
        rates=[1.0, 10.0, 20.0, 50.0, 100.0], listeners=[384, 1000], seconds=[2.0, LONGEST_SECONDS], seeds=3,
        warm_up=5.0, duration=15.0, short=False, voice=None, text_lengths=False,
        processes=max(min((os.cpu_count() or 1) // 3, 6), 1), minutes=60.0, server=SERVER, ready_seconds=240.0, folder=None,
        known={"parts": PARTS, "sizes": ("0b6", "1b7", "tiny")},
    )  # fmt: skip
    if options.tiny:
        options.sizes, options.device, options.seconds = ["tiny"], "cpu", [0.3, 0.6]
        options.server = "--slots 4 --waiting-room 8 --option slots=4"
    if options.short:
        options.seeds, options.warm_up, options.duration = 1, 2.0, 6.0
    url = options.peer or options.url
    if not (url or options.sizes):
        made.error("give the address of a server, or --sizes")
    bench = StreamBench(options)
    if "client" in options.parts:
        bench.part("client", bench.client)
    if url:
        try:
            plan = plan_of(options, url)
        except OSError as error:
            print(
                f"The server does not answer ({error}). Start it, or give another address.", file=sys.stderr
            )
            return 2
        bench.measure(plan, local_pid(url), options.parts)
    for size in options.sizes:
        bench.part(size, bench.measure_size, size)
    bad = any(row["failures"] or row.get("left_over") for row in bench.rows)
    return bench.end(*COLUMNS) or int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
