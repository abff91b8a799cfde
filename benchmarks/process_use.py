"""What processes use: cores and memory from /proc, and how busy and how full the GPUs are by the driver's own count."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE, _GIB = os.sysconf("SC_PAGE_SIZE"), 2.0**30


class ProcessUse:
    """Reads some processes and all their descendants twice a second until `stop`."""

    def __init__(self, roots: Sequence[int], seconds: float = 0.5) -> None:
        self._roots, self._seconds = tuple(roots), seconds
        #: Unix time, and of each process its name, its processor seconds and its bytes of its own in memory.
        self._readings: list[tuple[float, dict[int, tuple[str, float, int]]]] = []
        #: Unix time, and of each GPU the share of the time in which a kernel ran, and the bytes in use.
        self._gpus: list[tuple[float, list[tuple[float, int]]]] = []
        self._nvml, self._done = _open_nvml(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="process-use", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def between(self, since: float, until: float) -> dict[str, Any]:
        """What was in use in a span: cores of all processes and by name, memory at its end, and GPUs."""
        (began, first), (ended, last) = self._near(since), self._near(until)
        span, cores = max(ended - began, 1e-9), dict[str, float]()
        for pid, (name, seconds, _) in last.items():
            before = first[pid][1] if pid in first else 0.0
            cores[name] = cores.get(name, 0.0) + (seconds - before) / span
        use = [read for at, read in self._gpus if read and since <= at <= until]
        gpus = list(zip(*use, strict=True))
        largest = sorted(cores.items(), key=lambda one: -one[1])
        return {
            "cpu_cores": sum(cores.values()),
            "cores_of": {name: used for name, used in largest if used >= 0.005},
            "memory_gib": sum(own for _, _, own in last.values()) / _GIB,
            "gpu_busy_nvml": [sum(busy for busy, _ in reads) / len(use) for reads in gpus],
            "gpu_gib": [max(taken for _, taken in reads) / _GIB for reads in gpus],
        }

    def _near(self, when: float) -> tuple[float, dict[int, tuple[str, float, int]]]:
        """The reading that is closest to a time."""
        return min(self._readings, key=lambda one: abs(one[0] - when))

    def _watch(self) -> None:
        while True:
            now, found = time.time(), dict[int, tuple[str, float, int]]()
            for pid in family(self._roots):
                seconds, pages = _processor_seconds(pid), _pages(pid)
                if seconds is not None and pages is not None:
                    found[pid] = _name(pid), seconds, (pages[0] - pages[1]) * _PAGE
            self._readings.append((now, found))
            self._gpus.append((now, self._nvml()))
            if self._done.wait(self._seconds):
                return


def family(roots: Sequence[int]) -> list[int]:
    """The processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(f"{entry}/stat")):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = list[int](), list(roots)
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def _stat(path: str) -> list[str]:
    """State, parent and so on, as in /proc; empty where there is no such process or thread."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _processor_seconds(pid: int) -> float | None:
    fields = _stat(f"/proc/{pid}/stat")
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
        raw = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    words = [word.decode(errors="replace") for word in raw if word]
    if not words or words[0].startswith("["):  # a title, such as Celery's
        return ""
    program = Path(words[0].partition(":")[0]).name
    if program.startswith("python") and "-m" in words:
        at = words.index("-m") + 1
        return " ".join(words[at : at + (2 if words[at] in ("jobs", "worker") else 1)])
    if program.startswith("python") and "-c" in words:
        return words[words.index("-c") + 1].partition("(")[0][:60]
    return program


def _open_nvml() -> Any:
    """A function that gives the use of each GPU, 0 to 1, and its bytes in use; of none where the driver's library is
    missing."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001 - the library's own errors need the library
        return list

    def read() -> list[tuple[float, int]]:
        busy = (pynvml.nvmlDeviceGetUtilizationRates(one).gpu / 100 for one in handles)
        return list(
            zip(busy, (int(pynvml.nvmlDeviceGetMemoryInfo(one).used) for one in handles), strict=True)
        )

    return read


def thread_seconds(roots: Sequence[int]) -> dict[str, float]:
    """Processor seconds of the threads of processes and their descendants by `process: thread`; threads of one name
    add up."""
    found: dict[str, float] = {}
    for pid in family(roots):
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
    """MiB of memory of processes and their descendants; pages that they share count for each."""
    pages = [found[0] for pid in family(roots) if (found := _pages(pid)) is not None]
    return sum(pages) * _PAGE / 2**20
