"""What a command's processes use: cores and memory from /proc, and how busy and how full the GPUs are by
the driver's own count."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE, _GIB = os.sysconf("SC_PAGE_SIZE"), 2.0**30
#: Readings in which a new process may still become another program.
_NAMING = 8
#: Threads are read at one in so many readings: there are hundreds of a process.
_THREADS_EVERY = 4


@dataclass(slots=True)
class Process:
    """One process and its readings, (Unix time, processor seconds) each, its threads included and its
    children not."""

    pid: int
    name: str
    readings: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    #: (Unix time, bytes of its own in memory, bytes of files and memory that others may share).
    memory: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    #: Processor time of each thread, as `readings`.
    threads: dict[int, Process] = field(default_factory=dict[int, "Process"])

    def seconds(self, since: float, until: float) -> float:
        """Processor seconds in a span, from the readings around it."""
        return self._at(until) - self._at(since)

    def busiest_thread(self, since: float, until: float) -> float:
        """Cores of the thread that used most in a span. One thread has one core at most."""
        used = [thread.seconds(since, until) for thread in self.threads.values() if len(thread.readings) > 1]
        return max(used, default=0.0) / (until - since)

    def bytes_at(self, when: float) -> tuple[int, int]:
        """Of its own, and shared, by the last reading before; nothing before the first one and after its
        end."""
        before = [(own, shared) for at, own, shared in self.memory if at <= when]
        return before[-1] if before and self.memory[-1][0] >= when - 2.0 else (0, 0)

    def _at(self, when: float) -> float:
        before = (self.readings[0][0], 0.0)
        for reading in self.readings:
            if reading[0] >= when:
                share = (when - before[0]) / (reading[0] - before[0]) if reading[0] > before[0] else 0.0
                return before[1] + max(share, 0.0) * (reading[1] - before[1])
            before = reading
        return before[1]


class ProcessUse:
    """Reads all descendants of some processes twice a second until `stop`."""

    def __init__(self, roots: Sequence[int], seconds: float = 0.5) -> None:
        self._roots, self._seconds = tuple(roots), seconds
        self.processes: dict[int, Process] = {}
        #: Unix time, and of each GPU the share of the time in which a kernel ran, and the bytes in use.
        self.gpu: list[tuple[float, list[tuple[float, int]]]] = []
        self._nvml = _open_nvml()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="process-use", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def busiest(self, count: int) -> list[Process]:
        """The processes that have used most of the last seconds."""
        now = time.time()
        return sorted(self.processes.values(), key=lambda process: -process.seconds(now - 5.0, now))[:count]

    def between(self, since: float, until: float) -> dict[str, Any]:
        """What was in use in a span: cores of all processes and by name, the busiest thread of each name,
        memory at its end, and GPUs."""
        cores: dict[str, float] = {}
        threads: dict[str, float] = {}
        memory: dict[str, float] = {}
        shared = 0
        for process in self.processes.values():
            cores[process.name] = cores.get(process.name, 0.0) + process.seconds(since, until) / (
                until - since
            )
            threads[process.name] = max(threads.get(process.name, 0.0), process.busiest_thread(since, until))
            own, others = process.bytes_at(until)
            memory[process.name] = memory.get(process.name, 0.0) + own / _GIB
            shared = max(shared, others)
        use = [read for at, read in self.gpu if read and since <= at <= until]
        return {
            "cpu_cores": sum(cores.values()),
            "cores_of": _largest(cores, 0.005),
            "busiest_thread_of": _largest(threads, 0.005),
            "memory_gib": sum(memory.values()),
            "memory_gib_of": _largest(memory, 0.01),
            "shared_gib": shared / _GIB,
            "processes_of": dict(
                Counter(process.name for process in self.processes.values() if any(process.bytes_at(until)))
            ),
            "gpu_busy_nvml": [sum(busy for busy, _ in reads) / len(use) for reads in zip(*use, strict=True)],
            "gpu_gib": [max(taken for _, taken in reads) / _GIB for reads in zip(*use, strict=True)],
        }

    def _watch(self) -> None:
        for number in itertools.count():
            now = time.time()
            for pid in family(self._roots):
                seconds = _processor_seconds(pid)
                if seconds is None:
                    continue
                process = self.processes.setdefault(pid, Process(pid, ""))
                if len(process.readings) < _NAMING:
                    process.name = _name(pid) or process.name
                process.readings.append((now, seconds))
                if (pages := _pages(pid)) is not None:
                    process.memory.append((now, (pages[0] - pages[1]) * _PAGE, pages[1] * _PAGE))
                if number % _THREADS_EVERY == 0:
                    _read_threads(process, now)
            self.gpu.append((now, self._nvml()))
            if self._done.wait(self._seconds):
                return


def _largest(values: dict[str, float], least: float) -> dict[str, float]:
    """The values that count, the largest first."""
    return {name: value for name, value in sorted(values.items(), key=lambda one: -one[1]) if value >= least}


def _read_threads(process: Process, now: float) -> None:
    for task in Path(f"/proc/{process.pid}/task").glob("*"):
        thread = int(task.name)
        if (seconds := _processor_seconds(process.pid, thread)) is not None:
            process.threads.setdefault(thread, Process(thread, process.name)).readings.append((now, seconds))


def family(roots: Sequence[int]) -> list[int]:
    """The processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    left = list(roots)
    while left:
        pid = left.pop()
        found.append(pid)
        left += children.get(pid, [])
    return found


def _stat(pid: int, thread: int | None = None) -> list[str]:
    """State, parent and so on, as in /proc; empty where there is no such process or thread."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _processor_seconds(pid: int, thread: int | None = None) -> float | None:
    fields = _stat(pid, thread)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else None


def _pages(pid: int) -> tuple[int, int] | None:
    """Pages in memory, and those of them that others may share; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return int(fields[1]), int(fields[2])


def _name(pid: int) -> str:
    """The module of a Python process, such as `pipelines.engine_process`; else its program."""
    try:
        words = [
            word.decode(errors="replace")
            for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if word
        ]
    except OSError:
        return ""
    if not words or words[0].startswith("["):  # a title, such as Celery's
        return ""
    program = Path(words[0].partition(":")[0]).name
    if not program.startswith("python"):
        return program
    if "-m" in words:
        at = words.index("-m") + 1
        return " ".join(words[at : at + (2 if words[at] in ("jobs", "worker") else 1)])
    if "-c" in words:
        return words[words.index("-c") + 1].partition("(")[0][:60]
    return program


def _open_nvml() -> Any:
    """A function that gives the use of each GPU, 0 to 1, and its bytes in use; of none where the driver's
    library is missing."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001 - the library's own errors need the library
        return list

    def read() -> list[tuple[float, int]]:
        return [
            (
                pynvml.nvmlDeviceGetUtilizationRates(one).gpu / 100,
                int(pynvml.nvmlDeviceGetMemoryInfo(one).used),
            )
            for one in handles
        ]

    return read


def thread_seconds(pids: Sequence[int]) -> dict[str, float]:
    """Processor seconds of the processes' threads by `process: thread`; threads of one name add up."""
    found: dict[str, float] = {}
    for pid in family(pids):
        process = _name(pid)
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                text = (task / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            fields = text.rpartition(")")[2].split()
            name = f"{process}: {text.partition('(')[2].rpartition(')')[0]}"
            found[name] = found.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
    return found


def listener_pid(port: int) -> int | None:
    """The process of this host that listens at a TCP port; None where it is elsewhere or another user's."""
    sockets: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(file) in sockets for file in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue
    return None


def family_memory_mib(roots: Sequence[int]) -> float:
    """MiB of memory of the processes and all their descendants; pages that they share count for each."""
    pages = [found[0] for pid in family(roots) if (found := _pages(pid)) is not None]
    return sum(pages) * _PAGE / 2**20
