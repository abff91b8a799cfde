"""Single requests to a streaming server: the first one after ready, and cancelled streams with the time
until their slot is free."""

from __future__ import annotations

import asyncio
import random
import re
import time
from typing import Any

from benchmarks.stream_client import CONNECTIONS, Address, fetch
from benchmarks.stream_figures import percentiles_ms
from benchmarks.stream_worker import BYTES_PER_SAMPLE, Plan, Player, request_body

GAUGES = (
    "speech_server_running",
    "speech_server_waiting",
    "speech_engine_batch_size",
    "speech_engine_waiting",
)
_IDLE_SECONDS = 10.0


async def gauges(address: Address) -> dict[str, float]:
    """What holds a place in the server and its engine now."""
    _, page = await fetch(address, "/metrics")
    found = ((name, re.search(rf"^{name} (\S+)$", page.decode(), re.MULTILINE)) for name in GAUGES)
    return {name: float(match[1]) for name, match in found if match}


async def left_over(address: Address, seconds: float = _IDLE_SECONDS) -> int:
    """Waits until nothing holds a place any more; how much does after so many seconds."""
    until = time.monotonic() + seconds
    while True:
        left = round(sum((await gauges(address)).values()))
        if not left or time.monotonic() > until:
            return left
        await asyncio.sleep(0.02)


async def one_stream(
    plan: Plan, seconds: float, number: int = 0, stop_at: float | None = None
) -> tuple[float | None, Player, str]:
    """One stream on a connection of its own, broken off when `stop_at` seconds of audio came; its first
    PCM byte in seconds."""
    connection, player = CONNECTIONS[plan.protocol](Address(plan.url, plan.key)), Player()
    await connection.open()

    def on_audio(at: float, count: int) -> None:
        player.heard(at, count / BYTES_PER_SAMPLE / plan.sample_rate)
        if stop_at is not None and player.audio_seconds >= stop_at:
            connection.hang_up()

    try:
        sent = time.monotonic()
        failure = await connection.start(request_body(plan, seconds, number), on_audio)
    finally:
        connection.hang_up()
    return None if player.began is None else player.began - sent, player, failure


async def first_requests(plan: Plan, seconds: float, count: int = 6) -> dict[str, Any]:
    """The first request of all, and the ones after it, one after the other: first PCM bytes in
    milliseconds."""
    found: list[float | None] = []
    for number in range(count):
        first, _, _ = await one_stream(plan, seconds, number)
        found.append(None if first is None else round(1000 * first, 2))
    return {"first_request_ms": found[0], "next_requests_ms": found[1:]}


async def cancel_times(plan: Plan, count: int = 30, seconds: float = 8.0, seed: int = 1) -> dict[str, Any]:
    """Streams that hang up at random points, a third of them before any audio: milliseconds until the
    gauges of the server and of its engine are 0 again, as a client can see it; `poll_ms` is what one look
    takes."""
    chance, address = random.Random(seed), Address(plan.url, plan.key)
    server: list[float] = []
    engine: list[float] = []
    looks: list[float] = []
    stuck = 0
    for number in range(count):
        task = asyncio.create_task(one_stream(plan, seconds, number, chance.uniform(0.0, 0.7) * seconds))
        if number % 3 == 0:
            await asyncio.sleep(chance.uniform(0.002, 0.05))
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        begin, free = time.monotonic(), dict[str, float]()
        while len(free) < 2 and time.monotonic() < begin + _IDLE_SECONDS:
            look = time.monotonic()
            now = await gauges(address)
            looks.append(time.monotonic() - look)
            for name, value in (("server", now.get(GAUGES[0], 0.0)), ("engine", now.get(GAUGES[2], 0.0))):
                if not value:
                    free.setdefault(name, time.monotonic() - begin)
        stuck += len(free) < 2
        server += [free["server"]] if "server" in free else []
        engine += [free["engine"]] if "engine" in free else []
    return {
        "streams": count,
        "stuck": stuck,
        "server_ms": percentiles_ms(server),
        "engine_ms": percentiles_ms(engine),
        "poll_ms": percentiles_ms(looks),
    }
