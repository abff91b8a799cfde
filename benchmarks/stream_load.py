"""`python -m benchmarks.stream_load URL`: how soon a server's streams begin and whether they ever run dry,
under load.

    python -m benchmarks.stream_load http://127.0.0.1:8000 --mode open --rate 10 20 50
    python -m benchmarks.stream_load http://127.0.0.1:8000 --mode closed --clients 1 8 32 64 --protocol websocket
    python -m benchmarks.stream_load http://127.0.0.1:8000 --mode closed --clients 384 --listen
    python -m benchmarks.stream_load --peer http://127.0.0.1:8091 --mode open --rate 10

Clients run in processes of their own, on bare sockets. Time zero is just before the first byte of a
request is written, on a connection that stands already; the end is the first PCM byte. Open loop: Poisson
arrivals at a rate, however many requests are under way; one run for each seed, and medians over them.
Closed loop: clients back to back; with `--listen` each waits until it has played what it heard. Requests
are for 2 to 8 s of speech, as Seed-TTS's English sentences have. Every stream has a player that starts
with its first chunk; an underrun is a moment at which it has nothing to play. `--own-delay` measures the
clients alone, on a server that answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import commit
from benchmarks.process_use import ProcessUse, listener_pid, thread_seconds
from benchmarks.stream_client import Address, fetch
from benchmarks.stream_figures import Row, over_seeds, plot, row_of, table, thread_lines
from benchmarks.stream_probe import cancel_times, first_requests, left_over
from benchmarks.stream_worker import Plan

REPOSITORY = Path(__file__).resolve().parents[1]
#: Time between the word to all processes of clients, which are connected, and the start.
_START_SECONDS = 0.1
#: The load goes on for so long after the span that counts, so that its last streams begin under it too.
_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a table: who asks, how often, for how long. Times in seconds."""

    mode: str
    protocol: str = "http"
    rate: float = 0.0
    clients: int = 0
    batch_clients: int = 0
    listen: bool = False
    cancel: float = 0.0
    seeds: int = 3
    warm_up: float = 30.0
    duration: float = 30.0
    #: After the span that counts, before what is left is broken off.
    drain: float = 5.0
    seconds: tuple[float, float] = (2.0, 8.0)
    processes: int = 4


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what requests to it say."""

    address: Address
    model: str
    sample_rate: int
    voice: str | None
    own: bool
    sized: bool
    pid: int | None
    fields: dict[str, Any]

    def plan(self, protocol: str = "http") -> Plan:
        """What every request to it says; of no load."""
        plan = Plan(
            self.address.url, self.model, 0.0, 0.0, 0.0, 0.0, 0.0, protocol, self.address.key, self.voice
        )
        return replace(plan, sample_rate=self.sample_rate, own=self.own, sized=self.sized, fields=self.fields)


def target_of(
    url: str,
    *,
    peer: bool = False,
    sized: bool = True,
    voice: str | None = None,
    pid: int | None = None,
    fields: dict[str, Any] | None = None,
) -> Target:
    """Asks a server what it is. Raises `ConnectionError` where it does not answer."""
    address = Address(url.rstrip("/"), os.environ.get("SPEECH_SERVE__API_KEY", ""))
    status, body = asyncio.run(fetch(address, "/v1/models"))
    if status != 200:
        raise ConnectionError(f"{address.url}/v1/models was answered with {status}")
    card = json.loads(body)["data"][0]
    own = not peer and card.get("owned_by") == "nightjar"
    voices = (card.get("capabilities") or {}).get("voices") if own else None
    local = address.host in ("127.0.0.1", "localhost", "::1")
    found = pid or (listener_pid(address.port) if local else None)
    voice = voice or next(iter(voices or ()), None)
    return Target(
        address, card["id"], card.get("sample_rate", 24_000), voice, own, own and sized, found, fields or {}
    )


def measure(target: Target, load: Load) -> Row:
    """The row of a load: medians over its seeds."""
    seeds = load.seeds if load.mode == "open" else 1
    rows = [_one_seed(target, load, seed) for seed in range(seeds)]
    about: Row = {
        "mode": load.mode,
        "rate" if load.mode == "open" else "clients": load.rate if load.mode == "open" else load.clients,
    }
    about |= {
        "protocol": load.protocol,
        "seeds": seeds,
        "warm_up_s": load.warm_up,
        "duration_s": load.duration,
        "seconds": load.seconds,
    }
    about |= {name: value for name in ("listen", "batch_clients", "cancel") if (value := getattr(load, name))}
    return about | over_seeds(rows)


def _one_seed(target: Target, load: Load, seed: int) -> Row:
    use = None if target.pid is None else ProcessUse([target.pid], 0.25)
    command = [sys.executable, "-m", "benchmarks.stream_worker"]
    plans = _plans(target, load, seed)
    workers = [
        subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in plans
    ]
    for worker, plan in zip(workers, plans, strict=True):
        _tell(worker, json.dumps(asdict(plan)))
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n", "a process of clients ended before it was connected"
    start = time.monotonic() + _START_SECONDS
    for worker in workers:
        _tell(worker, repr(start))
    count_from = start + load.warm_up
    count_until = count_from + load.duration
    time.sleep(max(count_from - time.monotonic(), 0))
    since, before = time.time(), _threads(target)
    time.sleep(max(count_until - time.monotonic(), 0))
    until, after = time.time(), _threads(target)
    found = [json.loads(worker.communicate(timeout=load.drain + 60)[0]) for worker in workers]
    row = row_of(found, count_from, count_until, target.sized and load.protocol == "http")
    if use is not None:
        use.stop()
        row |= use.between(since, until)
        row["threads"] = {
            name: (seconds - before.get(name, 0.0)) / (until - since) for name, seconds in after.items()
        }
    if target.own:
        row["left_over"] = asyncio.run(left_over(target.address))
    return row


def _plans(target: Target, load: Load, seed: int) -> list[Plan]:
    """What each process of clients does, its times after the start."""
    count = (
        min(load.processes, load.clients + load.batch_clients) if load.mode == "closed" else load.processes
    )
    until = load.warm_up + load.duration
    plan = replace(target.plan(load.protocol), stop=until + _AFTER_SECONDS, end=until + load.drain)
    plan = replace(
        plan,
        count_from=load.warm_up,
        count_until=until,
        listen=load.listen,
        cancel=load.cancel,
        rate=load.rate / count,
    )
    plan = replace(plan, shortest_s=load.seconds[0], longest_s=load.seconds[1])
    shares = [
        [(total + number) // count for total in (load.clients, load.batch_clients)] for number in range(count)
    ]
    return [
        replace(plan, seed=1 + 1000 * seed + number, clients=clients, batch_clients=batch)
        for number, (clients, batch) in enumerate(shares)
    ]


def _tell(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line + "\n")
    worker.stdin.flush()


def _threads(target: Target) -> dict[str, float]:
    return {} if target.pid is None else thread_seconds([target.pid])


def own_delay(load: Load) -> Row:
    """The same load on a server that answers at once: what remains is the clients' own delay."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stream_local"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        target = target_of(server.stdout.readline().strip(), pid=server.pid)
        return {"system": "clients alone", **measure(target, load)}
    finally:
        server.kill()
        server.communicate()


def write(path: Path, found: dict[str, Any]) -> None:
    """The result as JSON, and a plot beside it for each mode that it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for mode in ("open", "closed"):
        if any(row["mode"] == mode for row in found["rows"]):
            try:
                drawn = plot(found, mode)
            except ValueError:
                continue
            path.with_name(f"{path.stem}_{mode}.svg").write_text(drawn, encoding="utf-8")


def loads_of(options: argparse.Namespace) -> list[Load]:
    """A load for each rate or number of clients, in each protocol."""
    common: dict[str, Any] = {
        "batch_clients": options.batch_clients, "listen": options.listen, "cancel": options.cancel, "seeds": options.seeds,
        "warm_up": options.warm_up, "duration": options.duration, "drain": options.drain, "seconds": tuple(options.seconds),
        "processes": options.processes,
    }  # fmt: skip
    open_loop = options.mode == "open"
    sizes = (
        [{"rate": rate} for rate in options.rate]
        if open_loop
        else [{"clients": count} for count in options.clients]
    )
    return [Load(options.mode, protocol, **size, **common) for protocol in options.protocol for size in sizes]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("url", nargs="?", help="address of a server of ours")
    made.add_argument(
        "--peer", metavar="URL", help="address of any OpenAI-style server, which gets OpenAI's fields only"
    )
    made.add_argument(
        "--field", action="append", default=[], metavar="NAME=JSON", help="a further field of every request"
    )
    made.add_argument("--voice", help="default: the first that the server names")
    made.add_argument(
        "--text-lengths",
        action="store_true",
        help="the text alone says how long a speech is, not `max_seconds`",
    )
    made.add_argument(
        "--pid",
        type=int,
        help="the server's process, for its CPU; default: what listens at the port on this host",
    )
    made.add_argument("--protocol", nargs="+", choices=("http", "websocket"), default=["http"])
    made.add_argument("--mode", choices=("open", "closed"), default="closed")
    made.add_argument(
        "--rate", nargs="+", type=float, default=[1, 10, 20, 50, 100], help="open loop: requests a second"
    )
    made.add_argument(
        "--clients", nargs="+", type=int, default=[1, 8, 32, 64, 128], help="closed loop: clients"
    )
    made.add_argument(
        "--batch-clients",
        type=int,
        default=0,
        help="clients beside them that ask for whole utterances, back to back",
    )
    made.add_argument(
        "--listen", action="store_true", help="closed loop: each client plays what it heard before it goes on"
    )
    made.add_argument(
        "--cancel",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of streams that hang up at a random point",
    )
    made.add_argument(
        "--seconds",
        nargs=2,
        type=float,
        default=[2.0, 8.0],
        metavar=("FROM", "TO"),
        help="lengths of the speeches",
    )
    made.add_argument("--seeds", type=int, default=3, help="open loop: runs, each with arrivals of its own")
    made.add_argument("--warm-up", type=float, default=30.0, help="seconds that do not count")
    made.add_argument("--duration", type=float, default=30.0, help="seconds that count")
    made.add_argument(
        "--drain",
        type=float,
        default=5.0,
        help="seconds after which what is under way at the end is broken off",
    )
    made.add_argument(
        "--processes",
        type=int,
        default=max(min((os.cpu_count() or 1) // 3, 6), 1),
        help="processes of clients",
    )
    made.add_argument(
        "--own-delay", action="store_true", help="also the same load on a server that answers at once"
    )
    made.add_argument("--size", default="", help="what the rows say of the model")
    made.add_argument("--device", default="", help="what the result says of the device")
    made.add_argument("--json", type=Path, help="file of the result; plots are written beside it")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    if not (options.url or options.peer):
        made.error("give the address of a server")
    fields = {name: json.loads(value) for name, _, value in (one.partition("=") for one in options.field)}
    try:
        about = {
            "sized": not options.text_lengths,
            "voice": options.voice,
            "pid": options.pid,
            "fields": fields,
        }
        target = target_of(options.peer or options.url, peer=options.peer is not None, **about)
    except OSError as error:
        print(f"The server does not answer ({error}). Start it, or give another address.", file=sys.stderr)
        return 2
    found: dict[str, Any] = {
        "commit": os.environ.get("NIGHTJAR_COMMIT") or commit(),
        "device": options.device,
        "rows": [],
    }
    rows: list[Row] = found["rows"]

    def keep(row: Row) -> None:
        rows.append({"size": options.size, **row} if options.size and "system" not in row else row)
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if options.json:
            write(options.json, found)

    found |= asyncio.run(first_requests(target.plan(options.protocol[0]), options.seconds[1]))
    for load in loads_of(options):
        keep(measure(target, load))
        if options.own_delay:
            keep(own_delay(replace(load, warm_up=1.0, duration=min(load.duration, 5.0), seeds=1)))
    print("\n" + table(rows), *thread_lines(rows[-1]), sep="\n")
    if options.cancel and target.own:
        found["cancel"] = asyncio.run(cancel_times(target.plan(options.protocol[0])))
        print(f"cancelled: {json.dumps(found['cancel'])}")
        if options.json:
            write(options.json, found)
    return 1 if any(row["failures"] or row.get("left_over") for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
