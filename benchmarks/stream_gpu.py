"""Streams of Qwen3-TTS at full size with random weights on one GPU: every row of the streaming goals, by
`benchmarks.stream_load`.

    python -m benchmarks.stream_gpu --sizes 1b7 --parts first closed open websocket listen mixed cancel --minutes 9
    python -m benchmarks.stream_gpu --sizes 0b6 --parts first closed open --tree ../nightjar-before     # another version of the packages
    python -m benchmarks.stream_gpu --device cpu --sizes tiny --short --clients 1 4 --rates 2

Each size gets a checkpoint on disk and a server (`benchmarks.random_server` of the tree) in a process of
its own. The checkpoint never draws an end, so a speech is as long as its request says. Rows are written as
soon as they are there. Parts: `client` is the clients' own delay, `first` the first request after ready,
`listen` listeners in real time, `mixed` 32 streams beside as many whole utterances as keep the engine
full, `cancel` the time until a cancelled stream's slot is free, `soak` many streams of which a third are
cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.figures import commit
from benchmarks.process_use import family_memory_mib
from benchmarks.stream_client import Address, fetch
from benchmarks.stream_figures import Row, table, thread_lines
from benchmarks.stream_load import REPOSITORY, Load, Target, measure, own_delay, target_of, write
from benchmarks.stream_probe import cancel_times, first_requests, left_over
from benchmarks.stream_worker import text_of

PARTS = ("client", "first", "closed", "open", "websocket", "listen", "mixed", "cancel", "soak")
#: Length of a speech whose request does not say it.
_LONGEST_SECONDS = 8.0
#: Names threads for the kernel too, which /proc shows; Python does so itself from 3.14 on.
_NAME_THREADS = """
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


def gpu_facts() -> tuple[str, float | None]:
    """The name of the first GPU and the MiB of its memory that are taken; the processor's name where there
    is none."""
    program = shutil.which("nvidia-smi")
    words = [program or "", "--query-gpu=name,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, check=False) if program else None
    if done is None or done.returncode or not done.stdout:
        return platform.processor() or platform.machine(), None
    name, _, used = done.stdout.splitlines()[0].rpartition(", ")
    return name, float(used)


class StreamServer:
    """A server of random weights, until `stop`."""

    def __init__(self, checkpoint: Path, options: argparse.Namespace, folder: Path) -> None:
        names = folder / "named-threads"
        names.mkdir(exist_ok=True)
        (names / "sitecustomize.py").write_text(_NAME_THREADS, encoding="utf-8")
        tree: Path = options.tree.resolve()
        path = [str(names), str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [
            sys.executable,
            "-m",
            "benchmarks.random_server",
            str(checkpoint),
            "--port",
            str(port),
            *shlex.split(options.server),
        ]
        self.log = folder / f"server-{checkpoint.name}.log"
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                words, cwd=tree, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        self.url = f"http://127.0.0.1:{port}"
        try:
            asyncio.run(self._ready(options.ready_seconds))
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - began

    async def _ready(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"The server did not become ready: {self.log.read_text(errors='replace')[-3000:]}"
                )
            try:
                if (await fetch(Address(self.url), "/health"))[0] == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        """Ends the server and what it started."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class StreamBench:
    """One run: its rows, and what is left of its time."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.until = time.monotonic() + 60 * options.minutes
        self.path: Path = options.json or Path(os.environ.get("OUT", ".")) / "stream_h200.json"
        measured = options.commit or os.environ.get("NIGHTJAR_COMMIT") or commit()
        self.found: dict[str, Any] = {
            "commit": measured,
            "device": gpu_facts()[0],
            "server": options.server,
            "faults": {},
            "rows": [],
        }
        self.rows: list[Row] = self.found["rows"]
        self.size = ""

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def keep(self, row: Row) -> None:
        """Prints and writes a row."""
        about = {"system": self.options.name} if self.options.name else {}
        self.rows.append({"size": self.size, **about, **row})
        lines = table(self.rows[-1:]).splitlines()
        print(
            "\n".join(lines if len(self.rows) == 1 else lines[-1:]),
            f"  [{self.left_s:.0f} s left]",
            flush=True,
        )
        write(self.path, self.found)

    def note(self, **facts: Any) -> None:
        """Prints and writes facts of this size."""
        self.found.setdefault(f"facts_{self.size}", {}).update(facts)
        print(json.dumps(facts), flush=True)
        write(self.path, self.found)

    def attempt(self, part: str, work: Callable[[], None], needs_s: float = 0.0) -> None:
        """Runs a part; its failure or the lack of time is noted, and the others go on."""
        name = f"{self.size} {part}".strip()
        if self.left_s < needs_s:
            self.found["faults"][name] = "no time is left"
            return
        try:
            work()
        except Exception:  # noqa: BLE001 - a part that fails must not take the others' results along
            self.found["faults"][name] = traceback.format_exc()
            print(f"{name}: {traceback.format_exc()}", flush=True)
            write(self.path, self.found)

    def run(self) -> int:
        options = self.options
        if "client" in options.parts:
            self.attempt(
                "client", lambda: self.keep(own_delay(self._load("open", rate=max(options.rates), seeds=1)))
            )
        for size in options.sizes:
            self.size = size
            self.attempt("checkpoint", self._checkpoint)
            self.attempt("server", self._measure_size)
            shutil.rmtree(self.folder / size, ignore_errors=True)
        print("\n" + table(self.rows))
        print(f"faults: {', '.join(self.found['faults']) or 'none'}")
        return 1 if self.found["faults"] else 0

    def _checkpoint(self) -> None:
        texts, began = self.folder / "texts", time.monotonic()
        texts.write_text("\n".join(text_of(5.0, number) for number in range(400)), encoding="utf-8")
        words = [
            sys.executable,
            "-m",
            "benchmarks.random_checkpoint",
            self.size,
            str(self.folder / self.size),
            "--texts",
            str(texts),
        ]
        subprocess.run(
            [*words, "--device", self.options.device, "--seconds", str(_LONGEST_SECONDS)],
            cwd=REPOSITORY,
            check=True,
        )
        self.note(checkpoint_s=round(time.monotonic() - began, 1))

    def _measure_size(self) -> None:
        server = StreamServer(self.folder / self.size, self.options, self.folder)
        try:
            target = target_of(server.url, pid=server.process.pid)
            self.note(ready_s=round(server.ready_s, 1), **self._memory(target))
            for part in self.options.parts:
                if part != "client":
                    self.attempt(part, lambda part=part: getattr(self, f"_{part}")(target), needs_s=5.0)
                if server.process.poll() is not None:
                    raise RuntimeError(f"The server ended with {server.process.returncode}.")
        finally:
            server.stop()
            kept = self.path.with_name(f"{self.path.stem}-{server.log.name}")
            kept.write_text(server.log.read_text(errors="replace")[-200_000:], encoding="utf-8")

    def _memory(self, target: Target) -> dict[str, float | None]:
        return {"host_mib": round(family_memory_mib([target.pid or 0])), "device_mib": gpu_facts()[1]}

    def _load(self, mode: str, **more: Any) -> Load:
        options = self.options
        closed = mode == "closed"
        warm_up, duration = (
            (options.closed_warm_up, options.closed_seconds)
            if closed
            else (options.open_warm_up, options.open_seconds)
        )
        load = Load(
            mode,
            seeds=options.seeds,
            warm_up=warm_up,
            duration=duration,
            seconds=tuple(options.seconds),
            processes=options.processes,
        )
        return replace(load, **more)

    def _points(self, target: Target, loads: Sequence[Load]) -> None:
        for load in loads:
            seconds = (load.seeds if load.mode == "open" else 1) * (load.warm_up + load.duration + 4)
            if self.left_s < seconds:
                self.found["faults"][
                    f"{self.size} {load.mode} {load.clients or load.rate} {load.protocol}"
                ] = "no time is left"
                continue
            row = measure(target, load)
            self.keep(row)
            if self.options.threads:
                print("\n".join(thread_lines(row)), flush=True)

    def _first(self, target: Target) -> None:
        self.note(**asyncio.run(first_requests(target.plan(), self.options.seconds[1])))

    def _closed(self, target: Target) -> None:
        self._points(target, [self._load("closed", clients=count) for count in self.options.clients])

    def _open(self, target: Target) -> None:
        self._points(target, [self._load("open", rate=rate) for rate in self.options.rates])

    def _websocket(self, target: Target) -> None:
        loads = [
            self._load("closed", clients=count, protocol="websocket")
            for count in self.options.websocket_clients
        ]
        loads += [
            self._load("open", rate=rate, protocol="websocket", seeds=1)
            for rate in self.options.websocket_rates
        ]
        self._points(target, loads)

    def _listen(self, target: Target) -> None:
        # Their beginnings are spread over the mean length of a speech, so the warm-up is longer.
        warm_up = max(self.options.closed_warm_up, sum(self.options.seconds) / 2 + 1)
        duration = 1.5 * self.options.closed_seconds
        self._points(
            target,
            [
                self._load("closed", clients=n, listen=True, warm_up=warm_up, duration=duration)
                for n in self.options.listeners
            ],
        )

    def _mixed(self, target: Target) -> None:
        streams, batch = self.options.mixed
        duration = 1.5 * self.options.closed_seconds
        self._points(
            target,
            [
                self._load("closed", clients=count, batch_clients=batch, duration=duration)
                for count in (0, streams)
            ],
        )
        alone, beside = self.rows[-2:]
        if alone.get("batch_clients") and beside.get("batch_clients"):
            share = beside["batch_audio_s_per_s"] / alone["batch_audio_s_per_s"]
            self.note(
                batch_share=round(share, 3),
                batch_and_streams=round(share + beside["audio_s_per_s"] / alone["batch_audio_s_per_s"], 3),
            )

    def _cancel(self, target: Target) -> None:
        self.note(
            cancel=asyncio.run(cancel_times(target.plan(), self.options.cancels, self.options.seconds[1]))
        )

    def _soak(self, target: Target) -> None:
        """Streams in stretches of some seconds until there were enough; memory after each."""
        options, streams, memory = self.options, 0, list[dict[str, float | None]]()
        while streams < options.soak and self.left_s > options.closed_seconds + 15:
            row = measure(
                target,
                self._load(
                    "closed", clients=options.soak_clients, cancel=1 / 3, seconds=(0.5, 3.0), warm_up=0.0
                ),
            )
            streams += row["requests"]
            memory.append(self._memory(target))
            self.keep(row)
        self.note(
            soak={"streams": streams, "memory": memory, "left_over": asyncio.run(left_over(target.address))}
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--sizes", nargs="+", default=["0b6", "1b7"], choices=("0b6", "1b7", "tiny"))
    made.add_argument("--parts", nargs="+", default=[part for part in PARTS if part != "soak"], choices=PARTS)
    made.add_argument(
        "--device",
        default="cuda",
        help="where checkpoints are made; the server takes the best device by itself",
    )
    made.add_argument("--tree", type=Path, default=REPOSITORY, help="checkout whose packages serve")
    made.add_argument("--name", default="", help="what rows say of the version that serves")
    made.add_argument("--commit", default="", help="its commit")
    server = "--slots 256 --waiting-room 1024 --option slots=256 --option streams=128"
    made.add_argument("--server", default=server, help="options of benchmarks.random_server")
    made.add_argument(
        "--ready-seconds", type=float, default=240.0, help="time that a server gets to become ready"
    )
    made.add_argument(
        "--minutes", type=float, default=9.0, help="for everything; what does not fit is left out and named"
    )
    made.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32, 64, 128], help="closed loop")
    made.add_argument(
        "--rates", nargs="+", type=float, default=[1, 10, 20, 50, 100], help="open loop, requests a second"
    )
    made.add_argument("--websocket-clients", nargs="*", type=int, default=[1, 32])
    made.add_argument("--websocket-rates", nargs="*", type=float, default=[20])
    made.add_argument("--listeners", nargs="+", type=int, default=[384, 1000])
    made.add_argument(
        "--mixed",
        nargs=2,
        type=int,
        default=[32, 192],
        metavar=("STREAMS", "WHOLE"),
        help="clients of each kind",
    )
    made.add_argument("--cancels", type=int, default=30, help="streams of the part `cancel`")
    made.add_argument("--soak", type=int, default=10_000, help="streams of the part `soak`")
    made.add_argument("--soak-clients", type=int, default=64)
    made.add_argument(
        "--seconds",
        nargs=2,
        type=float,
        default=[2.0, _LONGEST_SECONDS],
        metavar=("FROM", "TO"),
        help="lengths of speeches",
    )
    made.add_argument("--seeds", type=int, default=3, help="runs of an open point")
    made.add_argument("--closed-seconds", type=float, default=15.0, help="of a closed point")
    made.add_argument("--closed-warm-up", type=float, default=5.0)
    made.add_argument("--open-seconds", type=float, default=30.0, help="of each run of an open point")
    made.add_argument("--open-warm-up", type=float, default=10.0)
    made.add_argument(
        "--short",
        action="store_true",
        help="6 s a closed point; one run of 12 s and 3 s of warm-up an open point",
    )
    made.add_argument(
        "--processes",
        type=int,
        default=max(min((os.cpu_count() or 1) // 3, 6), 1),
        help="processes of clients",
    )
    made.add_argument(
        "--threads", action="store_true", help="print the server's busiest threads after each row"
    )
    made.add_argument("--json", type=Path, help="the result; default: stream_h200.json in $OUT, or here")
    made.add_argument(
        "--folder", type=Path, help="where checkpoints are written; default: a temporary folder"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.short:
        (
            options.seeds,
            options.closed_seconds,
            options.closed_warm_up,
            options.open_seconds,
            options.open_warm_up,
        ) = 1, 6.0, 2.0, 12.0, 3.0
    with tempfile.TemporaryDirectory(
        prefix="nightjar-stream-", dir=options.folder, ignore_cleanup_errors=True
    ) as folder:
        return StreamBench(options, Path(folder)).run()


if __name__ == "__main__":
    raise SystemExit(main())
