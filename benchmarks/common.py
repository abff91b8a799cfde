"""What every benchmark shares: its options, a result that is written after each row, times of calls, and what
the device and the threads do meanwhile."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pipelines.interpreter import serve_threads
from pipelines.nn.checkpoint import open_device

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def commit() -> str:
    """The commit that is measured, with `+` when the tree has changes; NIGHTJAR_COMMIT names it where there is
    no repository."""
    if named := os.environ.get("NIGHTJAR_COMMIT"):
        return named
    if shutil.which("git") is None:
        return ""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda")
    made.add_argument("--tiny", action="store_true", help="tiny sizes for a CPU; the figures mean nothing")
    made.add_argument("--json", type=Path, help="the result; default: a file of its name in $OUT, or here")
    return made


def numbers(text: str) -> list[int]:
    """The type of an option such as `16,64`."""
    return [int(number) for number in text.split(",")]


def words(text: str) -> list[str]:
    """The type of an option such as `frame,lm`."""
    return text.split(",")


def serves() -> float:
    """Runs Python as an engine's process does. For how many milliseconds a thread may keep the interpreter from
    others."""
    serve_threads()
    return sys.getswitchinterval() * 1000


class Result:
    """The rows, faults and facts of one run."""

    def __init__(self, name: str, options: argparse.Namespace, device: str, **facts: Any) -> None:
        self.options = options
        self.path: Path = options.json or Path(os.environ.get("OUT", ".")) / f"{name}.json"
        self.rows: list[Row] = []
        self.faults: dict[str, str] = {}
        self.found: dict[str, Any] = {"commit": commit(), "device": device, **facts}
        self.found |= {"faults": self.faults, "rows": self.rows}

    def add(self, row: Row) -> None:
        """Prints and keeps a row; its first field names the part."""
        self.rows.append(row)
        short = {name: value for name, value in row.items() if not isinstance(value, dict)}
        print(json.dumps({name: _rounded(value) for name, value in short.items()}), flush=True)
        self.write()

    def keep(self, **facts: Any) -> None:
        self.found |= facts
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def attempt(self, part: str, work: Callable[[], object]) -> None:
        """A part that fails is reported and does not stop the others."""
        try:
            work()
        except Exception:  # noqa: BLE001 - one run on a borrowed machine must bring home whatever it can
            self.faults[part] = traceback.format_exc()
            print(self.faults[part], flush=True)
        self.write()

    def end(self, *columns: str) -> int:
        """Prints these columns of the rows, and what failed; the exit status."""
        print(table(self.rows, columns))
        print(f"faults: {', '.join(self.faults) or 'none'}")
        return 1 if self.faults else 0


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as lines, of those columns that some row has; `name.key` is a value inside a row's field."""

    def value(row: Row, column: str) -> Any:
        for name in column.split("."):
            row = row.get(name) if isinstance(row, dict) else None  # pyright: ignore[reportAssignmentType]
        return row

    def cell(found: Any) -> str:
        if isinstance(found, float):
            return f"{found:,.0f}" if abs(found) >= 1000 else f"{found:,.2f}"
        return "" if found is None else str(found)

    shown = [column for column in columns if any(value(row, column) is not None for row in rows)]
    lines = [shown, *([cell(value(row, column)) for column in shown] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(shown))]
    return "\n".join(
        "  ".join(one.rjust(width) for one, width in zip(line, widths, strict=True)) for line in lines
    )


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


class Bench(Result):
    """A result of one device."""

    def __init__(self, name: str, options: argparse.Namespace, **facts: Any) -> None:
        self.device = open_device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        processor = platform.processor() or platform.machine()
        device = torch.cuda.get_device_name(self.device) if self.on_gpu else processor
        super().__init__(name, options, device, torch=torch.__version__, **facts)

    def attempt(self, part: str, work: Callable[[], object]) -> None:
        super().attempt(part, work)
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


@dataclass(frozen=True, slots=True)
class Figure:
    """One value of the CPU. `limit` is what the machine does for the bare work in the same run; `share` = value
    / limit."""

    name: str
    value: float
    unit: str
    aim: str = ""
    limit: float | None = None
    limit_name: str = ""

    @property
    def share(self) -> float | None:
        return self.value / self.limit if self.limit else None


def report(title: str, name: str, figures: Sequence[Figure]) -> None:
    """Prints figures as a table, and writes `results/<name>.json` with commit, device and date."""
    from rich.console import Console  # A GPU machine may have no more than the models need.
    from rich.table import Table

    table = Table(title=title)
    for heading in ("figure", "value", "aim", "machine's limit", "share"):
        table.add_column(heading, overflow="fold")
    for figure in figures:
        limit = f"{figure.limit:,.1f} {figure.unit} ({figure.limit_name})" if figure.limit else ""
        share = f"{figure.share:.0%}" if figure.share else ""
        table.add_row(figure.name, f"{figure.value:,.1f} {figure.unit}", figure.aim, limit, share)
    Console(width=140).print(table)
    device = platform.processor() or platform.machine()
    facts = {"commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "device": device}
    rows = [asdict(figure) | {"share": figure.share} for figure in figures]
    (RESULTS / f"{name}.json").write_text(json.dumps({**facts, "figures": rows}, indent=1) + "\n")
