"""What every benchmark of a device shares: its result, times of calls, and what the device and the threads do
meanwhile."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Result, Row, parser, read  # noqa: F401
from pipelines.interpreter import serve_threads
from pipelines.nn.checkpoint import open_device


def serves() -> float:
    """Runs Python as an engine's process does. For how many milliseconds a thread may keep the interpreter from
    others."""
    serve_threads()
    return sys.getswitchinterval() * 1000


class Bench(Result):
    """A result of one device."""

    def __init__(self, name: str, options: argparse.Namespace, **facts: Any) -> None:
        self.device = open_device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        processor = platform.processor() or platform.machine()
        device = torch.cuda.get_device_name(self.device) if self.on_gpu else processor
        super().__init__(name, options, device, torch=torch.__version__, **facts)

    def attempt(self, part: str, work: Callable[..., object], *given: Any, **more: Any) -> None:
        super().attempt(part, work, *given, **more)
        self.clean()

    def timed(
        self, part: str, batch: int, ms: float, audio_seconds: float | None = None, **more: Any
    ) -> None:
        """A row of one call: its milliseconds, and the RTFx where it made audio."""
        rate = {} if audio_seconds is None else {"audio_s_per_s": 1000 * audio_seconds / ms}
        self.add({"part": part, "batch": batch, "ms": ms, **rate, **more})

    def clean(self) -> None:
        """Gives back the device's memory of what was measured before."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


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
    """Median microseconds of one of the `calls` that `work` makes, replayed as a CUDA graph, by event pairs."""
    graph, times = captured(work), list[float]()
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[2:])


def memory(device: torch.device) -> dict[str, float]:
    """GiB of the device since the last call: maximum that was allocated, maximum that the allocator kept; and in
    use by all now."""
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
    """The driver's own count of the time in which any kernel ran, and the device's clock and power, sampled
    until `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._done = device, threading.Event()
        #: Percent of the time, MHz, mW.
        self._samples: list[tuple[int, int, int]] = []
        self._thread = threading.Thread(target=self._watch, name="gpu-use", daemon=True)
        if device.type == "cuda":
            self._thread.start()

    def stop(self) -> float | None:
        """Share of the time, 0 to 1; None where there is no such count."""
        self._done.set()
        if self._device.type == "cuda":
            self._thread.join()
        return statistics.mean(one[0] for one in self._samples) / 100 if self._samples else None

    def clocks(self) -> dict[str, float]:
        """After `stop`: the lowest, the median and the highest clock in MHz, and the mean power in W."""
        if not self._samples:
            return {}
        _, mhz, milliwatts = zip(*self._samples, strict=True)
        found = {"least_mhz": min(mhz), "mhz": statistics.median(mhz), "most_mhz": max(mhz)}
        return found | {"watts": statistics.mean(milliwatts) / 1000}

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            try:
                reads = (torch.cuda.utilization, torch.cuda.clock_rate, torch.cuda.power_draw)
                busy, mhz, milliwatts = (read(self._device) for read in reads)
            except (ModuleNotFoundError, RuntimeError) as error:
                print(f"no count of the GPU's use: {error}")
                return
            self._samples.append((busy, mhz, milliwatts))


class ThreadUse:
    """Processor time of this process's Python threads by name, from here to `shares`; threads of one name add
    up."""

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
