"""How soon a server's streams begin and whether they ever run dry, under load.

    python -m benchmarks.stream http://127.0.0.1:8000 --parts open --rates 10 20 50
    python -m benchmarks.stream http://127.0.0.1:8000 --clients 1 8 32 64 --protocols http websocket
    python -m benchmarks.stream http://127.0.0.1:8000 --parts listen --listeners 384
    python -m benchmarks.stream --peer http://127.0.0.1:8091 --parts open --rates 10
    python -m benchmarks.stream --sizes 1b7 --parts client first closed open --minutes 9
    python -m benchmarks.stream --tiny --parts first closed --clients 2 --short

With an address, of a server that runs; with `--sizes`, of Qwen3-TTS at full size with random weights: each size gets a
checkpoint on disk and a server (`benchmarks.stream_server`) in a process of its own. The checkpoint never draws an end, so
a speech is as long as its request says. Rows are written as soon as they are there.

Clients run in processes of their own, on bare sockets. Time zero is just before the first byte of a request is written,
on a connection that stands already; the end is the first PCM byte. Requests are for 2 to 8 s of speech. Every stream has
a player that starts with its first chunk; an underrun is a moment at which it has nothing to play. Parts: `client` is
the clients' own delay, on a server that answers at once; `first` the first request after ready; `closed` clients back to
back; `open` Poisson arrivals at a rate, however many requests are under way, medians over seeds; `listen` listeners in
real time; `mixed` streams beside whole answers of the kinds `--whole`; `cancel` the time until a cancelled stream's slot
is free; `soak` many streams of which a third are cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.process_use import ProcessUse, family_memory_mib, listener_pid, thread_seconds
from benchmarks.report import ROOT, Result, Row, table
from benchmarks.stream_clients import BYTES_PER_SAMPLE, WHOLE, Plan, Player, request_body, text_of
from benchmarks.stream_sockets import CONNECTIONS, Address, fetch

PARTS = ("client", "first", "closed", "open", "listen", "mixed", "cancel", "soak")
GAUGES = (
    "speech_server_running",
    "speech_server_waiting",
    "speech_engine_batch_size",
    "speech_engine_waiting",
)
#: Length of a speech whose request does not say it; and seconds until everything is free again, at most.
LONGEST_SECONDS, IDLE_SECONDS = 8.0, 30.0
#: Time between the word to all processes of clients, which are connected, and the start. The load goes on for a while
#: after the span that counts, so that its last streams begin under it too; what is left then is broken off.
START_SECONDS, AFTER_SECONDS, DRAIN_SECONDS = 0.1, 1.0, 5.0
COLUMNS = (
    "system", "size", "mode", "rate", "clients", "protocol", "batch_clients", "first_pcm_ms.50", "first_pcm_ms.95",
    "first_pcm_ms.99", "underrun_share", "underrun_ms.95", "rtf", "audio_s_per_s", "batch_audio_s_per_s", "requests", "failures",
    "left_over", "cpu_cores",
)  # fmt: skip
#: Names threads for the kernel too, which /proc shows; Python does so itself from 3.14 on.
NAME_THREADS = """
import threading

_run = threading.Thread._bootstrap_inner


def _named(self):
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
            file.write(self.name[:15])
    except OSError:
        pass
    _run(self)


threading.Thread._bootstrap_inner = _named
"""


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a table: who asks, how often, for how long. Times in seconds."""

    mode: str
    protocol: str
    seeds: int
    warm_up: float
    duration: float
    seconds: tuple[float, float]
    processes: int
    rate: float = 0.0
    clients: int = 0
    batch_clients: int = 0
    whole: tuple[str, ...] = ("pcm",)
    listen: bool = False
    cancel: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server, its process where it is on this host, and what every request to it says, of no load."""

    address: Address
    plan: Plan
    pid: int | None


def target_of(options: argparse.Namespace, url: str, pid: int | None = None) -> Target:
    """Asks a server what it is. Raises `ConnectionError` where it does not answer."""
    address = Address(url.rstrip("/"), os.environ.get("SPEECH_SERVE__API_KEY", ""))
    status, body = asyncio.run(fetch(address, "/v1/models"))
    if status != 200:
        raise ConnectionError(f"{address.url}/v1/models was answered with {status}")
    card = json.loads(body)["data"][0]
    own = not options.peer and card.get("owned_by") == "nightjar"
    voices = (card.get("capabilities") or {}).get("voices") if own else None
    local = address.host in ("127.0.0.1", "localhost", "::1")
    fields = {name: json.loads(value) for name, _, value in (one.partition("=") for one in options.field)}
    plan = Plan(address.url, card["id"], key=address.key, own=own, sized=own and not options.text_lengths)
    plan = replace(plan, sample_rate=card.get("sample_rate", 24_000), fields=fields)
    plan = replace(plan, voice=options.voice or next(iter(voices or ()), None))
    return Target(address, plan, pid or (listener_pid(address.port) if local else None))


def measure(target: Target, load: Load) -> Row:
    """The row of a load: medians over its seeds."""
    seeds = load.seeds if load.mode == "open" else 1
    rows = [_one_seed(target, load, seed) for seed in range(seeds)]
    load_name = "rate" if load.mode == "open" else "clients"
    about: Row = {
        "mode": load.mode,
        load_name: getattr(load, load_name),
        "protocol": load.protocol,
        "seeds": seeds,
    }
    about |= {"warm_up_s": load.warm_up, "duration_s": load.duration, "seconds": load.seconds}
    about |= {name: value for name in ("listen", "batch_clients", "cancel") if (value := getattr(load, name))}
    return about | (rows[0] if seeds == 1 else _joined(rows))


def _one_seed(target: Target, load: Load, seed: int) -> Row:
    use = None if target.pid is None else ProcessUse([target.pid], 0.25)
    command = [sys.executable, "-m", "benchmarks.stream_clients"]
    plans = _plans(target, load, seed)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in plans]
    for worker, plan in zip(workers, plans, strict=True):
        _tell(worker, json.dumps(asdict(plan)))
    for worker in workers:
        assert worker.stdout.readline() == "ready\n", "a process of clients ended before it was connected"
    start = time.monotonic() + START_SECONDS
    for worker in workers:
        _tell(worker, repr(start))
    count_from = start + load.warm_up
    count_until = count_from + load.duration
    time.sleep(max(count_from - time.monotonic(), 0))
    since, before = time.time(), _threads(target)
    time.sleep(max(count_until - time.monotonic(), 0))
    until, after = time.time(), _threads(target)
    found = [json.loads(worker.communicate(timeout=DRAIN_SECONDS + 60)[0]) for worker in workers]
    row = row_of(found, count_from, count_until, target.plan.sized and load.protocol == "http")
    if use is not None:
        use.stop()
        row |= use.between(since, until)
        span = until - since
        row["threads"] = {name: (took - before.get(name, 0.0)) / span for name, took in after.items()}
    if target.plan.own:
        row["left_over"] = asyncio.run(left_over(target.address))
    return row


def _plans(target: Target, load: Load, seed: int) -> list[Plan]:
    """What each process of clients does, its times after the start."""
    asked = load.clients + load.batch_clients
    count = min(load.processes, asked) if load.mode == "closed" else load.processes
    until = load.warm_up + load.duration
    plan = replace(
        target.plan, protocol=load.protocol, listen=load.listen, cancel=load.cancel, rate=load.rate / count
    )
    plan = replace(plan, stop=until + AFTER_SECONDS, end=until + DRAIN_SECONDS, whole=list(load.whole))
    plan = replace(plan, count_from=load.warm_up, count_until=until)
    plan = replace(plan, shortest_s=load.seconds[0], longest_s=load.seconds[1])
    return [
        replace(
            plan,
            seed=1 + 1000 * seed + number,
            clients=(load.clients + number) // count,
            batch_clients=(load.batch_clients + number) // count,
        )
        for number in range(count)
    ]


def _tell(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()


def _threads(target: Target) -> dict[str, float]:
    return {} if target.pid is None else thread_seconds([target.pid])


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95, p99 and the maximum in milliseconds, as values that were measured."""
    ordered, shares = sorted(seconds), {"50": 0.5, "95": 0.95, "99": 0.99, "max": 1.0}
    if not ordered:
        return dict.fromkeys(shares)
    places = {name: max(math.ceil(share * len(ordered)) - 1, 0) for name, share in shares.items()}
    return {name: round(1000 * ordered[place], 2) for name, place in places.items()}


def row_of(found: Sequence[dict[str, Any]], count_from: float, count_until: float, sized: bool = True) -> Row:
    """The figures of one load: what its processes of clients heard of the requests that were sent in the span."""
    sent = [one for process in found for one in process["heard"] if count_from <= one["sent"] < count_until]
    streams, whole = [one for one in sent if not one["kind"]], [one for one in sent if one["kind"]]
    begun = [one for one in streams if one["first"] is not None]
    done = [one for one in streams if one["failure"] == ""]
    seconds, ended = count_until - count_from, Counter(one["failure"] for one in sent)
    waits = [wait for one in begun for wait in one["underruns"]]
    rtf = [one["took"] / one["audio"] for one in done if one["audio"]]
    short = sum(one["audio"] < 0.8 * one["asked_audio"] for one in done) if sized else 0
    row: Row = {
        "first_pcm_ms": percentiles_ms([one["first"] for one in begun]),
        "rtf": statistics.median(rtf) if rtf else None,
        "underrun_share": sum(1 for one in begun if one["underruns"]) / len(begun) if begun else None,
        "underruns": len(waits),
        "underrun_ms": percentiles_ms(waits),
        "audio_s_per_s": sum(process["stream_audio_s"] for process in found) / seconds,
        "requests": len(sent),
        "requests_per_s": len(streams) / seconds,
        "failures": {
            name: count for name, count in ended.items() if name not in ("", "cancelled", "cut off")
        },
        "cancelled": ended["cancelled"],
        "cut_off": ended["cut off"],
        "too_short": short,
        "client_late_ms": percentiles_ms([one["late"] for one in streams]),
    }
    if whole:
        row["batch_audio_s_per_s"] = sum(process["batch_audio_s"] for process in found) / seconds
        row["batch_requests"] = len(whole)
        kinds = dict.fromkeys(one["kind"] for one in whole)
        row["whole"] = {kind: _whole([one for one in whole if one["kind"] == kind]) for kind in kinds}
    return row


def _whole(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """First bytes and whole answers of one kind."""
    done = [one for one in answers if one["failure"] == ""]
    first, took = ([one[name] for one in done] for name in ("first", "took"))
    return {"ok": len(done), "first_ms": percentiles_ms(first), "whole_ms": percentiles_ms(took)}


def _joined(values: list[Any]) -> Any:
    """One value of several seeds': the median of each figure, the sum of each count."""
    values = [value for value in values if value is not None]
    if values and isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _joined([value.get(name) for value in values]) for name in names}
    if not values or isinstance(values[0], bool | str | list):
        return values[0] if values else None
    return sum(values) if isinstance(values[0], int) else statistics.median(values)


async def gauges(address: Address) -> dict[str, float]:
    """What holds a place in the server and its engine now."""
    _, page = await fetch(address, "/metrics")
    found = ((name, re.search(rf"^{name} (\S+)$", page.decode(), re.MULTILINE)) for name in GAUGES)
    return {name: float(match[1]) for name, match in found if match}


async def left_over(address: Address) -> int:
    """Waits until nothing holds a place any more; how much does after a while."""
    until = time.monotonic() + IDLE_SECONDS
    while (left := round(sum((await gauges(address)).values()))) and time.monotonic() < until:
        await asyncio.sleep(0.02)
    return left


async def one_stream(
    plan: Plan, seconds: float, number: int = 0, stop_at: float | None = None
) -> float | None:
    """The first PCM byte, in seconds, of one stream on a connection of its own, which is broken off when `stop_at`
    seconds of audio came."""
    connection, player = CONNECTIONS[plan.protocol](Address(plan.url, plan.key)), Player()
    await connection.open()

    def on_audio(at: float, count: int) -> None:
        player.heard(at, count / BYTES_PER_SAMPLE / plan.sample_rate)
        if stop_at is not None and player.audio_seconds >= stop_at:
            connection.hang_up()

    try:
        sent = time.monotonic()
        await connection.start(request_body(plan, seconds, number), on_audio)
    finally:
        connection.hang_up()
    return None if player.began is None else player.began - sent


async def first_requests(plan: Plan, seconds: float, count: int = 6) -> dict[str, Any]:
    """The first request of all, and the ones after it, one after the other: first PCM bytes in milliseconds."""
    found = [await one_stream(plan, seconds, number) for number in range(count)]
    first, *behind = (None if one is None else round(1000 * one, 2) for one in found)
    return {"first_request_ms": first, "next_requests_ms": behind}


async def cancel_times(plan: Plan, count: int, seconds: float) -> dict[str, Any]:
    """Streams that hang up at random points, a third of them before any audio: milliseconds until the gauges of the
    server and of its engine are 0 again, as a client can see it; `poll_ms` is what one look takes."""
    chance, address, stuck = random.Random(1), Address(plan.url, plan.key), 0
    took: dict[str, list[float]] = {"server": [], "engine": [], "poll": []}
    for number in range(count):
        task = asyncio.create_task(one_stream(plan, seconds, number, chance.uniform(0.0, 0.7) * seconds))
        if number % 3 == 0:
            await asyncio.sleep(chance.uniform(0.002, 0.05))
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        begin, free = time.monotonic(), dict[str, float]()
        while len(free) < 2 and time.monotonic() < begin + IDLE_SECONDS:
            look = time.monotonic()
            now = await gauges(address)
            took["poll"].append(time.monotonic() - look)
            for name, gauge in (("server", GAUGES[0]), ("engine", GAUGES[2])):
                if not now.get(gauge):
                    free.setdefault(name, time.monotonic() - begin)
        stuck += len(free) < 2
        for name, seconds_until in free.items():
            took[name].append(seconds_until)
    return {"streams": count, "stuck": stuck} | {
        f"{name}_ms": percentiles_ms(one) for name, one in took.items()
    }


def gpu_facts() -> tuple[str, float | None]:
    """The name of the first GPU and the MiB of its memory that are taken; the processor's name where there is none."""
    program = shutil.which("nvidia-smi")
    words = [program or "", "--query-gpu=name,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, check=False) if program else None
    if done is None or done.returncode or not done.stdout:
        return platform.processor() or platform.machine(), None
    name, _, used = done.stdout.splitlines()[0].rpartition(", ")
    return name, float(used)


@contextmanager
def served(words: Sequence[str], tree: Path = ROOT, seconds: float = 60.0) -> Iterator[tuple[int, str, Path]]:
    """`benchmarks.stream_server` of a tree with these words, once it is ready: its process, its address, its log."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="nightjar-server-") as name:
        probe.bind(("127.0.0.1", 0))
        port, folder = probe.getsockname()[1], Path(name)
        probe.close()
        (folder / "sitecustomize.py").write_text(NAME_THREADS, encoding="utf-8")
        path = [name, str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "benchmarks.stream_server", *words, "--port", str(port)]
        log = folder / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        try:
            asyncio.run(_ready(process, f"http://127.0.0.1:{port}", log, seconds))
            yield process.pid, f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _ready(process: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError):
            if (await fetch(Address(url), "/health"))[0] == 200:
                return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"The server did not become ready: {log.read_text(errors='replace')[-3000:]}")


class StreamBench(Result):
    """One run: its rows, and what is left of its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("stream_h200", options, gpu_facts()[0], server=options.server)
        self.until, self.size = time.monotonic() + 60 * options.minutes, ""

    def add(self, row: Row) -> None:
        """Prints and writes a row."""
        self.rows.append({"size": self.size, **row})
        lines = table(self.rows[-1:], COLUMNS)
        print(f"{lines}  [{self.until - time.monotonic():.0f} s left]", flush=True)
        self.write()

    def note(self, **facts: Any) -> None:
        """Prints and writes facts of this size."""
        of = self.found.setdefault(f"facts_{self.size}", {}) if self.size else self.found
        of.update(facts)
        print(json.dumps(facts), flush=True)
        self.write()

    def part(self, name: str, work: Callable[[], None], needs_s: float = 0.0) -> None:
        """Runs a part; its failure or the lack of time is noted, and the others go on."""
        name = f"{self.size} {name}".strip()
        if self.until - time.monotonic() < needs_s:
            self.faults[name] = "no time is left"
        else:
            self.attempt(name, work)

    def measure_size(self, size: str) -> None:
        """A checkpoint of random weights, and a server of it."""
        options, self.size = self.options, size
        with tempfile.TemporaryDirectory(prefix="nightjar-stream-", dir=options.folder) as name:
            texts, began = Path(name, "texts"), time.monotonic()
            texts.write_text("\n".join(text_of(5.0, number) for number in range(400)), encoding="utf-8")
            checkpoint = str(Path(name, size))
            words = [sys.executable, "-m", "benchmarks.checkpoint", size, checkpoint, "--texts", str(texts)]
            words += ["--device", options.device, "--seconds", str(LONGEST_SECONDS)]
            subprocess.run(words, cwd=ROOT, check=True)
            self.note(checkpoint_s=round(time.monotonic() - began, 1))
            began, given = time.monotonic(), [checkpoint, *shlex.split(options.server)]
            with served(given, options.tree.resolve(), options.ready_seconds) as (pid, url, log):
                target = target_of(options, url, pid)
                self.note(ready_s=round(time.monotonic() - began, 1), **self._memory(target))
                self.measure(target)
                kept = self.path.with_name(f"{self.path.stem}-server-{size}.log")
                kept.write_text(log.read_text(errors="replace")[-200_000:], encoding="utf-8")

    def measure(self, target: Target) -> None:
        for part in self.options.parts:
            if part != "client":
                self.part(part, lambda part=part: getattr(self, f"_{part}")(target), needs_s=5.0)

    def client(self) -> None:
        """The clients' own delay, on a server that answers at once."""
        with served([]) as (pid, url, _):
            rate = max(self.options.rates)
            row = measure(target_of(self.options, url, pid), self._load("open", "http", rate=rate, seeds=1))
            self.add({"system": "clients alone", **row})

    def _memory(self, target: Target) -> dict[str, float | None]:
        return {"host_mib": round(family_memory_mib([target.pid or 0])), "device_mib": gpu_facts()[1]}

    def _load(self, mode: str, protocol: str, **more: Any) -> Load:
        """Open points take twice as long as closed ones."""
        options, times = self.options, 1 + (mode == "open")
        spans = times * options.warm_up, times * options.duration
        load = Load(mode, protocol, options.seeds, *spans, tuple(options.seconds), options.processes)
        return replace(load, whole=tuple(options.whole), **more)

    def _points(self, target: Target, mode: str, each: str, values: Sequence[float], **more: Any) -> None:
        for protocol in self.options.protocols:
            for value in values:
                load = self._load(mode, protocol, **{"cancel": self.options.cancel, each: value, **more})
                seconds = (load.seeds if mode == "open" else 1) * (load.warm_up + load.duration + 4)
                point = lambda load=load: self.add(measure(target, load))  # noqa: E731
                self.part(f"{mode} {value:g} {protocol}", point, needs_s=seconds)

    def _first(self, target: Target) -> None:
        self.note(**asyncio.run(first_requests(target.plan, self.options.seconds[1])))

    def _closed(self, target: Target) -> None:
        self._points(target, "closed", "clients", self.options.clients)

    def _open(self, target: Target) -> None:
        self._points(target, "open", "rate", self.options.rates)

    def _listen(self, target: Target) -> None:
        # Their beginnings are spread over the mean length of a speech, so the warm-up is longer.
        warm_up = max(self.options.warm_up, sum(self.options.seconds) / 2 + 1)
        more = {"listen": True, "warm_up": warm_up, "duration": 1.5 * self.options.duration}
        self._points(target, "closed", "clients", self.options.listeners, **more)

    def _mixed(self, target: Target) -> None:
        streams, whole = self.options.mixed
        self._points(target, "closed", "clients", sorted({0, streams}), batch_clients=whole)
        alone, beside = self.rows[-min(len(self.rows), 2)], self.rows[-1]
        if alone.get("batch_audio_s_per_s") and beside.get("batch_audio_s_per_s"):
            share = beside["batch_audio_s_per_s"] / alone["batch_audio_s_per_s"]
            self.note(batch_share=round(share, 3))

    def _cancel(self, target: Target) -> None:
        plan, count = target.plan, self.options.cancels
        self.note(cancel=asyncio.run(cancel_times(plan, count, self.options.seconds[1])))

    def _soak(self, target: Target) -> None:
        """Streams in stretches of some seconds until there were enough; memory after each."""
        options, streams, memory = self.options, 0, list[dict[str, float | None]]()
        load = self._load("closed", "http", clients=options.soak_clients, cancel=1 / 3)
        load = replace(load, seconds=(0.5, 3.0), warm_up=0.0)
        while streams < options.soak and self.until - time.monotonic() > options.duration + 15:
            row = measure(target, load)
            streams += row["requests"]
            memory.append(self._memory(target))
            self.add(row)
        left = asyncio.run(left_over(target.address))
        self.note(soak={"streams": streams, "memory": memory, "left_over": left})


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("url", nargs="?", default="", help="address of a server of ours")
    add(
        "--peer",
        default="",
        metavar="URL",
        help="address of any OpenAI-style server, which gets OpenAI's fields only",
    )
    add("--sizes", nargs="+", default=[], choices=("0b6", "1b7", "tiny"), help="servers of random weights")
    add("--tiny", action="store_true", help="a server of a tiny model on a CPU; the figures mean nothing")
    add("--parts", nargs="+", default=["first", "closed"], choices=PARTS)
    add("--protocols", nargs="+", choices=("http", "websocket"), default=["http"])
    add("--clients", nargs="+", type=int, default=[1, 8, 32, 64, 128], help="of `closed`")
    add("--rates", nargs="+", type=float, default=[1, 10, 20, 50, 100], help="of `open`: requests a second")
    add("--listeners", nargs="+", type=int, default=[384, 1000], help="of `listen`")
    add(
        "--mixed",
        nargs=2,
        type=int,
        default=[32, 192],
        metavar=("STREAMS", "WHOLE"),
        help="clients of each kind",
    )
    add("--whole", nargs="+", choices=tuple(WHOLE), default=["pcm"], help="what those ask for, in turn")
    add(
        "--cancel",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of streams that hang up at a random point",
    )
    add("--cancels", type=int, default=30, help="streams of `cancel`")
    add("--soak", type=int, default=10_000, help="streams of `soak`")
    add("--soak-clients", type=int, default=64)
    add(
        "--seconds",
        nargs=2,
        type=float,
        default=[2.0, LONGEST_SECONDS],
        metavar=("FROM", "TO"),
        help="of speeches",
    )
    add("--seeds", type=int, default=3, help="runs of an open point, each with arrivals of its own")
    add(
        "--warm-up",
        type=float,
        default=5.0,
        help="seconds of a closed point that do not count; open: twice that",
    )
    add("--duration", type=float, default=15.0, help="seconds of a closed point that count; open: twice that")
    add("--short", action="store_true", help="points of 6 s, open ones of one seed")
    add("--field", action="append", default=[], metavar="NAME=JSON", help="a further field of every request")
    add("--voice", help="default: the first that the server names")
    add(
        "--text-lengths",
        action="store_true",
        help="the text alone says how long a speech is, not `max_seconds`",
    )
    add("--pid", type=int, help="the server's process; default: what listens at the port on this host")
    add(
        "--processes",
        type=int,
        default=max(min((os.cpu_count() or 1) // 3, 6), 1),
        help="processes of clients",
    )
    add("--minutes", type=float, default=60.0, help="for everything; what does not fit is left out and named")
    add(
        "--device",
        default="cuda",
        help="where checkpoints are made; a server takes the best device by itself",
    )
    add("--tree", type=Path, default=ROOT, help="checkout whose packages serve")
    server = "--slots 256 --waiting-room 1024 --option slots=256 --option streams=128"
    add("--server", default=server, help="options of benchmarks.stream_server")
    add("--ready-seconds", type=float, default=240.0, help="time that a server gets to become ready")
    add("--json", type=Path, help="the result; default: stream_h200.json in $OUT, or here")
    add("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    return made


def main(given: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(given)
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
            target = target_of(options, url, options.pid)
        except OSError as error:
            print(
                f"The server does not answer ({error}). Start it, or give another address.", file=sys.stderr
            )
            return 2
        bench.measure(target)
    for size in options.sizes:
        bench.part(size, lambda size=size: bench.measure_size(size))
    for name, share in sorted(
        (bench.rows[-1].get("threads") or {}).items() if bench.rows else (), key=lambda one: -one[1]
    )[:8]:
        print(f"  {share:6.1%} of a core  {name}")
    bad = any(row["failures"] or row.get("left_over") for row in bench.rows)
    return bench.end(*COLUMNS) or int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
