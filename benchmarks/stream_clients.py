"""One process of clients of `benchmarks.stream`.

It reads its plan as a line of JSON, connects, and says `ready`; then it reads when to start, and writes what it heard as
JSON. Only the standard library is imported, so that it starts in a tenth of a second. Times are those of
`time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.stream_sockets import CHAT, CONNECTIONS, SPEECH, Address, Connection

BYTES_PER_SAMPLE, CHARACTERS_PER_SECOND = 2, 15.0
#: A client that was refused waits so long before it asks again.
_REFUSED_SECONDS = 0.1
#: Share of the cancelled streams that end before their first audio, within so many seconds.
_BEFORE_AUDIO, _BEFORE_AUDIO_SECONDS = 0.3, 0.1
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
_TEXT_DRAW = {"temperature": 0.6, "top_k": 20}
_AUDIO_DRAW = {
    "mode": "text_audio", "phase": "text", "text_temperature": 0.6, "audio_temperature": 0.8, "audio_topk": 20
}  # fmt: skip
#: What whole answers are asked for: the route, and what the request says. Those of a route of chats are asked of a
#: model that writes.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "pcm": (SPEECH, {"response_format": "pcm", "stream": False}),
    "wav": (SPEECH, {"response_format": "wav"}),
    "flac": (SPEECH, {"response_format": "flac"}),
    "text": (CHAT, _TEXT_DRAW),
    "text-stream": (CHAT, {**_TEXT_DRAW, "stream": True}),
    "audio": (CHAT, {"temperature": 0.8, "top_k": 20, "vllm_xargs": _AUDIO_DRAW}),
    "guided": (CHAT, {"temperature": 0.8, "top_k": 20, "vllm_xargs": {**_AUDIO_DRAW, "cfg": 3.0}}),
}


@dataclass(slots=True)
class Player:
    """A listener's loudspeaker: it starts with the first audio and waits whenever there is none, as long as it
    must."""

    began: float | None = None
    audio_seconds: float = 0.0
    #: Seconds of each wait after the start.
    underruns: list[float] = field(default_factory=list[float])
    _waited: float = 0.0

    def heard(self, at: float, seconds: float) -> None:
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
class Plan:
    """What the clients of one process do."""

    url: str
    model: str
    #: From when on, until when requests are sent, and when what is left is broken off. This and the span are after 0
    #: until `starting`.
    start: float = 0.0
    stop: float = 0.0
    end: float = 0.0
    #: The span that counts: audio that came in it, and requests that were sent in it.
    count_from: float = 0.0
    count_until: float = 0.0
    protocol: str = "http"
    key: str = ""
    voice: str | None = None
    #: Requests a second (open loop), or clients back to back.
    rate: float = 0.0
    clients: int = 0
    #: Clients that ask for whole answers, back to back, and of which kinds, in turn.
    batch_clients: int = 0
    whole: list[str] = field(default_factory=lambda: ["pcm"])
    listen: bool = False
    shortest_s: float = 2.0
    longest_s: float = 8.0
    #: Share of the streams that are cancelled at a random point.
    cancel: float = 0.0
    sample_rate: int = 24_000
    seed: int = 0
    #: Whether the server is ours, which takes the seed of a speech, and whether requests say its length in seconds
    #: too.
    own: bool = True
    sized: bool = True
    #: Further fields of every request.
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    def starting(self, at: float) -> Plan:
        """The plan with its times after `at`."""
        names = ("start", "stop", "end", "count_from", "count_until")
        return replace(self, **{name: getattr(self, name) + at for name in names})


@dataclass(slots=True)
class Heard:
    """What came of one request. Times in seconds."""

    sent: float
    #: How much later than planned the request was written.
    late: float
    #: What was asked for whole; "" for a stream.
    kind: str
    asked_audio: float
    first: float | None = None
    took: float = 0.0
    audio: float = 0.0
    underruns: list[float] = field(default_factory=list[float])
    #: "" for a whole answer, "cancelled", "cut off" at the end of the plan ("no audio in time" before any), or the
    #: code of a failure.
    failure: str = "cut off"


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


def request_body(plan: Plan, seconds: float, number: int, kind: str = "") -> dict[str, Any]:
    """What a request for a speech of a length says, in the plan's protocol; a whole answer of a kind is asked for over
    HTTP."""
    text, voice = text_of(seconds, number), plan.voice
    if plan.protocol == "websocket" and not kind:
        output = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": plan.sample_rate}
        body: dict[str, Any] = {"model_id": plan.model, "transcript": text, "output_format": output}
        body |= {"continue": False, "language": "en", "max_buffer_delay_ms": 0}
        body |= {"voice": {"mode": "id", "id": voice}} if voice else {}
    elif kind and WHOLE[kind][0] == CHAT:
        body = {"model": plan.model, "messages": [{"role": "user", "content": text}], **WHOLE[kind][1]}
    else:
        asked = WHOLE[kind][1] if kind else {"response_format": "pcm", "stream": True}
        body = {"model": plan.model, "input": text, **asked, **({"voice": voice} if voice else {})}
    if plan.own:
        body["seed"] = number
    if plan.own and plan.sized and not kind.startswith("text"):
        body["max_seconds"] = round(seconds, 3)
    return body | plan.fields


class Clients:
    """All clients of a process, on one event loop."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.chance = plan, random.Random(plan.seed + 1)
        self.heard: list[Heard] = []
        #: Seconds of audio in the span, of streams and of whole answers.
        self.audio_in_span = {False: 0.0, True: 0.0}
        self._address = Address(plan.url, plan.key)
        #: Open connections without a request, of streams and of whole answers.
        self._idle: dict[bool, list[Connection]] = {False: [], True: []}
        self._open: set[Connection] = set()
        self._number = plan.seed % 10_000 * 100_000

    async def connect(self) -> None:
        """Opens the connections that the first streams need."""
        streams = self.plan.clients or max(round(self.plan.rate * 0.5), 1)
        tried = (self._connect() for _ in range(min(streams, 256)))
        found = await asyncio.gather(*tried, return_exceptions=True)
        self._idle[False] += [one for one in found if isinstance(one, Connection)]

    async def run(self, start: float) -> dict[str, Any]:
        """From a time until the plan's end; everything that was heard."""
        plan = self.plan = self.plan.starting(start)
        tasks = [asyncio.create_task(self._client(index)) for index in range(plan.clients)]
        kinds = (plan.whole[index % len(plan.whole)] for index in range(plan.batch_clients))
        tasks += [asyncio.create_task(self._batch_client(kind)) for kind in kinds]
        if plan.rate:
            tasks.append(asyncio.create_task(self._arrivals()))
        if tasks:
            await asyncio.wait(tasks, timeout=plan.end - time.monotonic())
        for connection in list(self._open):
            connection.hang_up()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self.heard:
            if one.failure == "cut off" and one.first is None and not one.kind:
                one.failure = "no audio in time"
        streams, whole = self.audio_in_span[False], self.audio_in_span[True]
        heard = [asdict(one) for one in self.heard]
        return {"heard": heard, "stream_audio_s": streams, "batch_audio_s": whole}

    async def _arrivals(self) -> None:
        """The open loop: a request at each arrival, however many are under way."""
        under_way: set[asyncio.Task[Any]] = set()
        for at in arrivals(self.plan.rate, random.Random(self.plan.seed), self.plan.start, self.plan.stop):
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
        spread = (plan.shortest_s + plan.longest_s) / 2 if plan.listen else 0.0
        await asyncio.sleep(plan.start + spread * index / max(plan.clients, 1) - time.monotonic())
        while time.monotonic() < plan.stop:
            heard, player = await self._one(time.monotonic())
            if heard.failure not in ("", "cancelled"):
                await asyncio.sleep(_REFUSED_SECONDS)
            elif plan.listen:
                await asyncio.sleep(player.silent_at - time.monotonic())

    async def _batch_client(self, kind: str) -> None:
        await asyncio.sleep(self.plan.start - time.monotonic())
        while time.monotonic() < self.plan.stop:
            heard, _ = await self._one(time.monotonic(), kind)
            if heard.failure:
                await asyncio.sleep(_REFUSED_SECONDS)

    async def _one(self, planned: float, kind: str = "") -> tuple[Heard, Player]:
        """One request from its first byte to its end."""
        plan, player = self.plan, Player()
        seconds = self.chance.uniform(plan.shortest_s, plan.longest_s)
        cancelled = not kind and self.chance.random() < plan.cancel
        heard = Heard(time.monotonic(), 0.0, kind, seconds, underruns=player.underruns)
        self.heard.append(heard)
        try:
            connection = await self._free_connection(bool(kind))
        except OSError as error:
            heard.failure = f"cannot connect ({type(error).__name__})"
            return heard, player
        self._number += 1
        body, stop_at = request_body(plan, seconds, self._number, kind), self.chance.random() * seconds

        def on_bytes(at: float, count: int) -> None:
            if heard.first is None:
                heard.first = at - heard.sent
            if kind not in ("", "pcm"):
                return
            piece = count / BYTES_PER_SAMPLE / plan.sample_rate
            player.heard(at, piece)
            heard.audio += piece
            if plan.count_from <= at < plan.count_until:
                self.audio_in_span[bool(kind)] += piece
            if cancelled and player.audio_seconds >= stop_at:
                self._cancel(connection)

        self._open.add(connection)
        heard.sent = time.monotonic()
        heard.late = heard.sent - planned
        answer = connection.start(body, on_bytes, WHOLE[kind][0] if kind else SPEECH)
        timer = None
        if cancelled and self.chance.random() < _BEFORE_AUDIO:
            later = self.chance.random() * _BEFORE_AUDIO_SECONDS
            timer = asyncio.get_running_loop().call_later(later, self._cancel, connection)
        heard.failure = await answer
        if timer is not None:
            timer.cancel()
        self._open.discard(connection)
        if heard.failure == "cancelled" and not cancelled:
            heard.failure = "cut off"
        heard.took = time.monotonic() - heard.sent
        if heard.failure == "" and heard.first is None:
            heard.failure = "no audio"
        if connection.closed:
            connection.hang_up()
        else:
            self._idle[bool(kind)].append(connection)
        return heard, player

    def _cancel(self, connection: Connection) -> None:
        """Hangs up; of two WebSocket clients one says so instead and keeps its connection."""
        if self.chance.random() < 0.5:
            connection.cancel()
        else:
            connection.hang_up()

    async def _free_connection(self, whole: bool) -> Connection:
        idle = self._idle[whole]
        while idle:
            if not (connection := idle.pop()).closed:
                return connection
        return await self._connect(whole)

    async def _connect(self, whole: bool = False) -> Connection:
        connection = CONNECTIONS["http" if whole else self.plan.protocol](self._address)
        await connection.open()
        return connection


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
