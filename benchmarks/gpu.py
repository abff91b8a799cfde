"""What every GPU benchmark shares: options, rows that are printed and kept at once, times of calls, and
the use of device and threads."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import commit
from pipelines.interpreter import serve_threads
from pipelines.nn.checkpoint import open_device

Row = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all of them have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda")
    made.add_argument(
        "--tiny", action="store_true", help="tiny shapes, to try this on a CPU; the figures mean nothing"
    )
    made.add_argument(
        "--json", type=Path, help="the result; default: a file of the benchmark's name in $OUT, or here"
    )
    return made


def serves() -> float:
    """Runs Python as a worker's engine process does. For how many milliseconds a thread may keep the
    interpreter from others."""
    serve_threads()
    return sys.getswitchinterval() * 1000


def numbers(text: str) -> list[int]:
    """The type of an option such as `16,64`."""
    return [int(number) for number in text.split(",")]


class Bench:
    """One run on one device. What it finds is written after each row, so that a later part that fails
    takes nothing along."""

    def __init__(self, name: str, options: argparse.Namespace, **facts: Any) -> None:
        self.options = options
        self.device = open_device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.path: Path = options.json or Path(os.environ.get("OUT", ".")) / f"{name}.json"
        about = (
            torch.cuda.get_device_name(self.device)
            if self.on_gpu
            else platform.processor() or platform.machine()
        )
        measured = os.environ.get("NIGHTJAR_COMMIT") or commit()
        self.found: dict[str, Any] = {
            "commit": measured,
            "device": about,
            "torch": torch.__version__,
            **facts,
            "faults": {},
            "rows": [],
        }
        self.rows: list[Row] = self.found["rows"]
        self.faults: dict[str, str] = self.found["faults"]

    def add(self, row: Row) -> None:
        """Prints and keeps a row; its first field names the part."""
        self.rows.append(row)
        short = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in row.items()
            if not isinstance(value, dict)
        }
        print(json.dumps(short), flush=True)
        self.write()

    def timed(
        self, part: str, batch: int, ms: float, audio_seconds: float | None = None, **more: Any
    ) -> None:
        """A row of one call: its milliseconds, and the RTFx where it made audio."""
        rate = {} if audio_seconds is None else {"audio_s_per_s": 1000 * audio_seconds / ms}
        self.add({"part": part, "batch": batch, "ms": ms, **rate, **more})

    def keep(self, **facts: Any) -> None:
        self.found |= facts
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def attempt(self, part: str, work: Callable[[], object]) -> None:
        """A part that fails is reported and does not stop the others."""
        try:
            work()
        except Exception:  # noqa: BLE001 - one run on a borrowed machine must bring home whatever it can
            self.faults[part] = traceback.format_exc()
            print(self.faults[part], flush=True)
        self.write()
        self.clean()

    def clean(self) -> None:
        """Gives back the device's memory of what was measured before."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def milliseconds(self, work: Callable[[], object], runs: int = 5) -> float:
        """Median time of a call that ends when the device is done, after two that do not count."""
        times = []
        for _ in range(runs + 2):
            self.wait()
            begin = time.perf_counter()
            work()
            self.wait()
            times.append(1000 * (time.perf_counter() - begin))
        return statistics.median(times[2:])

    def end(self) -> int:
        """Prints the rows as a table; the exit status."""
        print(table(self.rows), end="\n" if self.rows else "")
        print(f"faults: {', '.join(self.faults) or 'none'}")
        return 1 if self.faults else 0


def table(rows: list[Row]) -> str:
    """Rows that have milliseconds as lines."""

    def shown(value: object) -> str:
        return f"{value:,.2f}" if isinstance(value, float) else str(value)

    def line(row: Row) -> str:
        known = ("part", "engine", "batch", "rows", "slots", "ms", "audio_s_per_s")
        rate = f"{row['audio_s_per_s']:12,.1f} RTFx" if "audio_s_per_s" in row else " " * 17
        more = "".join(
            f"  {name} {shown(value)}"
            for name, value in row.items()
            if name not in known and not isinstance(value, dict)
        )
        return f"{row['part']:24}{row.get('engine', ''):8}{row.get('batch', row.get('rows')):6d}{row['ms']:12,.2f} ms{rate}{more}"

    return "\n".join(line(row) for row in rows if "ms" in row)


def event_us(work: Callable[[], object], repeats: int = 7) -> float:
    """Median microseconds of `work`, by event pairs, after two calls to warm up."""
    work()
    work()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a CUDA graph, after two plain calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def graph_us(work: Callable[[], object], calls: int = 1, repeats: int = 12) -> float:
    """Median microseconds of one of the `calls` that `work` makes, replayed as a CUDA graph."""
    return event_us(captured(work).replay, repeats) / calls


def memory(device: torch.device) -> dict[str, float]:
    """GiB of the device since the last call: maximum that was allocated, maximum that the allocator kept;
    and in use by all now."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    found = {
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "used_gib": (total - free) / 2**30,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return found


class GpuUse:
    """The driver's own count of the time in which any kernel ran, and the device's clock and power,
    sampled until `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._samples, self._done = device, list[int](), threading.Event()
        self._clocks, self._milliwatts = list[int](), list[int]()
        self._thread = threading.Thread(target=self._watch, name="gpu-use", daemon=True)
        if device.type == "cuda":
            self._thread.start()

    def stop(self) -> float | None:
        """Share of the time, 0 to 1; None where there is no such count."""
        self._done.set()
        if self._device.type == "cuda":
            self._thread.join()
        return sum(self._samples) / len(self._samples) / 100 if self._samples else None

    def clocks(self) -> dict[str, float]:
        """After `stop`: the lowest, the median and the highest clock of the multiprocessors in MHz, and
        the mean power in W."""
        if not self._clocks:
            return {}
        found = {
            "least_mhz": min(self._clocks),
            "mhz": statistics.median(self._clocks),
            "most_mhz": max(self._clocks),
        }
        return {**found, "watts": statistics.mean(self._milliwatts) / 1000}

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            try:
                self._samples.append(torch.cuda.utilization(self._device))
                self._clocks.append(torch.cuda.clock_rate(self._device))
                self._milliwatts.append(torch.cuda.power_draw(self._device))
            except (ModuleNotFoundError, RuntimeError) as error:
                print(f"no count of the GPU's use: {error}")
                return


class ThreadUse:
    """Processor time of this process's Python threads by name, from here to `shares`; threads of one name
    add up."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), self._seconds()

    def shares(self) -> dict[str, float]:
        """Shares of the time: all threads have one interpreter's lock, so in Python they cannot pass 1
        together."""
        took, now = time.perf_counter() - self._began, self._seconds()
        return {name: (seconds - self._before.get(name, 0.0)) / took for name, seconds in now.items()}

    @staticmethod
    def _seconds() -> dict[str, float]:
        found: dict[str, float] = {}
        for thread in threading.enumerate():
            stat = Path(f"/proc/self/task/{thread.native_id}/stat")
            if stat.exists():
                fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                found[thread.name] = found.get(thread.name, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
        return found
