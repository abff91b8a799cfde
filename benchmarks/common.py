"""What the benchmarks share: options and results; checkpoints of random weights; times of calls; and what processes, threads and
GPUs do meanwhile. Imports torch where a device is measured only."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
#: Of Qwen3-TTS.
FRAMES_PER_SECOND = 12.5
_GIB = 2.0**30


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


def parser(doc: str | None, device: str = "cuda") -> argparse.ArgumentParser:
    """The options that all have; where there is no device, the result alone."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if device:
        trace, tiny = "rows of a GPU keep its W and MHz, ten times a second", "tiny sizes, for a CPU"
        made.add_argument("--device", default=device)
        made.add_argument("--tiny", action="store_true", help=f"{tiny}; the figures mean nothing")
        made.add_argument("--power-trace", action="store_true", help=trace)
    made.add_argument("--json", type=Path, help="the result; default: a file of its name in $OUT, or here")
    return made


def read(
    made: argparse.ArgumentParser, given: Sequence[str] | None = None, known: Mapping[str, Iterable[str]] | None = None, **defaults: Any
) -> Any:  # fmt: skip
    """The options of a command line, of which further ones have these defaults and their types. A list takes several
    values, apart or with commas; a type stands for an empty list of it. `known`: the values that a list may have."""
    lists: list[str] = []
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            made.add_argument(option, action="store_true")
        elif isinstance(default, list | type):
            kind, values = (type(default[0]), default) if isinstance(default, list) else (default, [])
            made.add_argument(option, nargs="*", type=_several(kind), default=[values])
            lists.append(name)
        else:
            made.add_argument(option, type=str if default is None else type(default), default=default)
    found = made.parse_args(given)
    for name in lists:
        setattr(found, name, [one for several in getattr(found, name) for one in several])
    for name, values in (known or {}).items():
        if unknown := [one for one in getattr(found, name) if one not in values]:
            made.error(f"--{name} has no {', '.join(unknown)}: {', '.join(values)}")
    return found


def _several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def values(text: str) -> list[Any]:
        return [kind(one) for one in text.split(",")]

    values.__name__ = kind.__name__  # argparse prints it
    return values


def environment_with(*places: str | Path) -> dict[str, str]:
    """The environment of a process that imports from these folders first, then from this tree and what ours has."""
    path = [*map(str, places), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def in_new_process(work: Callable[..., Any], *given: Any) -> Any:
    """What a function of a module returns in a process that begins with nothing."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        return processes.submit(work, *given).result()


class Result:
    """The rows, faults and facts of one run."""

    def __init__(self, name: str, options: argparse.Namespace, device: str, **facts: Any) -> None:
        self.options, self._began = options, time.monotonic()
        Use.traces = getattr(options, "power_trace", False)
        self.path: Path = options.json or Path(os.environ.get("OUT", ".")) / f"{name}.json"
        self.rows, self.faults, self.left_out = list[Row](), dict[str, str](), list[str]()
        self.found: dict[str, Any] = {"commit": commit(), "device": device, **facts}
        self.found |= {"faults": self.faults, "left_out": self.left_out, "rows": self.rows}

    def add(self, row: Row) -> None:
        """Prints and keeps a row; its first field names the part."""
        self.rows.append(row)
        shown = {name: value for name, value in row.items() if not isinstance(value, dict)}
        shown |= {name: round(value, 3) for name, value in shown.items() if isinstance(value, float)}
        print(json.dumps(shown), flush=True)
        self.write()

    def keep(self, **facts: Any) -> None:
        self.found |= facts
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def attempt(
        self, part: str, work: Callable[..., object], *given: Any, needs: float = 0.0, **more: Any
    ) -> None:
        """A part that fails is reported and does not stop the others; one that needs more seconds than `--minutes` has
        left is left out, which the result says."""
        if needs and self.seconds_left < needs:
            self.left_out.append(part)
        else:
            try:
                work(*given, **more)
            except Exception:  # noqa: BLE001 - one run on a borrowed machine must bring home whatever it can
                self.faults[part] = traceback.format_exc()
                print(self.faults[part], flush=True)
        self.write()

    @property
    def seconds_left(self) -> float:
        """Of `--minutes`."""
        return 60 * self.options.minutes - (time.monotonic() - self._began)

    def end(self, *columns: str) -> int:
        """Prints these columns of the rows, and what failed; the exit status."""
        print(table(self.rows, columns))
        left_out, faults = ", ".join(self.left_out) or "nothing", ", ".join(self.faults) or "none"
        print(f"left out: {left_out}; faults: {faults}")
        return 1 if self.faults else 0


class Bench(Result):
    """A result of one device."""

    def __init__(self, name: str, options: argparse.Namespace, **facts: Any) -> None:
        import torch

        from pipelines.nn.checkpoint import open_device

        self.device = open_device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self._cuda = torch.cuda if self.on_gpu else None
        device = torch.cuda.get_device_name(self.device) if self.on_gpu else processor_name()
        super().__init__(name, options, device, torch=torch.__version__, **facts)

    def attempt(self, part: str, work: Callable[..., object], *given: Any, **more: Any) -> None:
        super().attempt(part, work, *given, **more)
        self.clean()

    def clean(self) -> None:
        """Gives back the device's memory of what was measured before."""
        if self._cuda:
            gc.collect()
            self._cuda.empty_cache()
            self._cuda.reset_peak_memory_stats(self.device)

    def wait(self) -> None:
        if self._cuda:
            self._cuda.synchronize()


def serves() -> float:
    """Runs Python as an engine's process does. For how many milliseconds a thread may keep the interpreter from
    others."""
    from pipelines.interpreter import serve_threads

    serve_threads()
    return sys.getswitchinterval() * 1000


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a CUDA graph, after two plain calls."""
    import torch

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


def graph_us(work: Callable[[], object], repeats: int) -> float:
    """Median microseconds of `work`, replayed as a CUDA graph, by event pairs."""
    import torch

    graph, times = captured(work), list[float]()
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[2:])


def memory(device: torch.device) -> dict[str, float]:
    """GiB of the device since the last call: maximum that was allocated, maximum that the allocator kept; and in
    use by all now."""
    import torch

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


def new_database(server: str, name: str) -> str:
    """The URL of a new empty database of a PostgreSQL server."""
    import psycopg  # A machine for other figures may lack it.

    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{server.rpartition('/')[0]}/{name}"


def processor_name() -> str:
    return platform.processor() or platform.machine()


def device_name() -> str:
    """The name of the first GPU; the processor's where there is none."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError, IndexError):
        return subprocess.check_output(words, text=True).splitlines()[0].strip()
    return processor_name()


class GpuReading(NamedTuple):
    """A reading of one GPU."""

    at: float
    #: Share of the time in which a kernel ran.
    busy: float
    bytes: int
    mhz: int
    watts: float
    #: The board's energy counter.
    joules: float


def energy(gpus: Sequence[Sequence[GpuReading]], audio_s_per_s: float | None) -> Row:
    """Joules of these boards for a second of audio that was made at this rate, by their counters between the first and the
    last reading; with `--power-trace` also [s, W, MHz] of each reading. {} where there is no counter."""
    spans = [(reads[0], reads[-1]) for reads in gpus if len(reads) > 1]
    watts = [(last.joules - first.joules) / (last.at - first.at) for first, last in spans]
    found: Row = {"joules_per_audio_s": sum(watts) / audio_s_per_s} if watts and audio_s_per_s else {}
    trace = [
        [[round(one.at - reads[0].at, 3), round(one.watts, 1), one.mhz] for one in reads] for reads in gpus
    ]
    return found | ({"power_trace": trace} if Use.traces and watts else {})


class Use:
    """Reads the GPUs, and a process with all its descendants, every `seconds` until `stop`."""

    #: Whether power is read ten times a second and kept; `--power-trace`.
    traces = False

    def __init__(self, root: int | None = None, seconds: float = 0.5) -> None:
        self._root, self._seconds = root, 0.1 if self.traces else seconds
        #: Unix time, and of each process its name, its processor seconds and its private bytes in memory.
        self._readings: list[tuple[float, dict[int, tuple[str, float, int]]]] = []
        self._gpus: list[list[GpuReading]] = []
        self._nvml, self._done = _open_nvml(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="use", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def between(
        self, since: float, until: float, audio_s_per_s: float | None = None, gpus: int = 1
    ) -> dict[str, Any]:
        """What was in use in a span: cores of all processes and by name, memory at its end, and GPUs. `gpus`: how many of
        them, from the first on, made the audio whose energy is counted."""
        (began, first), (ended, last) = (
            min(self._readings, key=lambda one: abs(one[0] - when)) for when in (since, until)
        )
        span, cores = max(ended - began, 1e-9), dict[str, float]()
        for pid, (name, seconds, _) in last.items():
            before = first[pid][1] if pid in first else 0.0
            cores[name] = cores.get(name, 0.0) + (seconds - before) / span
        of_gpus, largest = self._of_gpus(since, until), sorted(cores.items(), key=lambda one: -one[1])
        return {
            "cpu_cores": sum(cores.values()),
            "cores_of": {name: used for name, used in largest if used >= 0.005},
            "memory_gib": sum(own for _, _, own in last.values()) / _GIB,
            "gpu_busy_nvml": [statistics.mean(one.busy for one in reads) for reads in of_gpus],
            "gpu_gib": [max(one.bytes for one in reads) / _GIB for reads in of_gpus],
            "gpu_watts": [statistics.mean(one.watts for one in reads) for reads in of_gpus],
            **energy(of_gpus[:gpus], audio_s_per_s),
        }

    def of_gpu(
        self, device: torch.device, audio_s_per_s: float, since: float = 0, until: float = math.inf
    ) -> dict[str, Any]:
        """Of a GPU of this process in a span: the share of the time in which a kernel ran, its clock, its power and its
        energy; {} where there is no such count."""
        gpus = self._of_gpus(since, until) if device.type == "cuda" else []
        if not gpus:
            return {}
        reads = gpus[device.index or 0]
        mhz, watts = [one.mhz for one in reads], statistics.mean(one.watts for one in reads)
        clocks = {"least_mhz": min(mhz), "mhz": statistics.median(mhz), "most_mhz": max(mhz), "watts": watts}
        busy = statistics.mean(one.busy for one in reads)
        return {"gpu_busy_nvml": busy, "clocks": clocks, **energy([reads], audio_s_per_s)}

    def _of_gpus(self, since: float, until: float) -> list[tuple[GpuReading, ...]]:
        return list(zip(*(read for read in self._gpus if read and since <= read[0].at <= until), strict=True))

    def _watch(self) -> None:
        while True:
            self._readings.append((time.time(), _family_use(self._root)))
            self._gpus.append(self._nvml())
            if self._done.wait(self._seconds):
                return


class ThreadUse:
    """Processor time of this process's Python threads by name, from here to `shares`; threads of one name add
    up."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), self._seconds()

    def shares(self) -> dict[str, float]:
        """Shares of the time, from 0.01 on: all threads have one interpreter's lock, so in Python they cannot pass 1
        together."""
        took, now = time.perf_counter() - self._began, self._seconds()
        found = {name: (seconds - self._before.get(name, 0.0)) / took for name, seconds in now.items()}
        return {name: share for name, share in found.items() if share >= 0.01}

    @staticmethod
    def _seconds() -> dict[str, float]:
        names = {one.native_id: one.name for one in threading.enumerate()}
        found = defaultdict[str, float](float)
        for one in psutil.Process().threads():
            if name := names.get(one.id):
                found[name] += one.user_time + one.system_time
        return found


def _family_use(root: int | None) -> dict[int, tuple[str, float, int]]:
    """The name, the processor seconds and the private bytes of a process and of each of its descendants."""
    found: dict[int, tuple[str, float, int]] = {}
    with suppress(psutil.Error):
        family = [] if root is None else [psutil.Process(root)]
        for one in [*family, *(child for whole in family for child in whole.children(recursive=True))]:
            with suppress(psutil.Error), one.oneshot():
                cpu, memory = one.cpu_times(), one.memory_info()
                seconds = cpu.user + cpu.system
                found[one.pid] = _name(one.cmdline()), seconds, memory.rss - memory.shared
    return found


def _name(words: list[str]) -> str:
    """The module of a Python process, such as `pipelines.engine_process`; else its program."""
    words = [word for word in words if word]
    if not words or words[0].startswith("["):  # a title, such as Celery's
        return ""
    program = Path(words[0].partition(":")[0]).name
    if program.startswith("python") and "-m" in words:
        at = words.index("-m") + 1
        return " ".join(words[at : at + (2 if words[at] in ("jobs", "worker") else 1)])
    if program.startswith("python") and "-c" in words:
        return words[words.index("-c") + 1].partition("(")[0][:60]
    return program


def _open_nvml() -> Callable[[], list[GpuReading]]:
    """A function that reads each visible GPU; none where the driver's library is missing."""

    def read(handle: Any) -> GpuReading:
        taken = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        mhz = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
        busy = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        return GpuReading(time.time(), busy, taken, mhz, watts, joules)

    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen = map(int, visible) if all(map(str.isdigit, visible)) else range(pynvml.nvmlDeviceGetCount())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in chosen]
        for handle in handles:
            read(handle)
    except Exception:  # noqa: BLE001 - the library's own errors need the library
        return list
    return lambda: [read(handle) for handle in handles]
