"""What a host does as a whole: bytes over loopback and to disks, memory that waits for a disk, and the
time that work waited."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

_GIB_KIB = 2.0**20
_PRESSURES = ("cpu", "io", "memory")


class Reading(NamedTuple):
    """The kernel's counters at a Unix time; -1 where it does not count."""

    at: float
    loopback_bytes: int
    #: To all disks.
    written_kib: int
    dirty_kib: int
    available_kib: int
    #: Microseconds in which some work waited for the cores, for a disk, for memory.
    waited_us: tuple[int, ...]

    @classmethod
    def now(cls) -> Reading:
        memory = _fields("/proc/meminfo")
        waited = tuple(_waited_us(name) for name in _PRESSURES)
        written = _fields("/proc/vmstat").get("pgpgout", -1)
        return cls(
            time.time(),
            _loopback_bytes(),
            written,
            memory.get("Dirty", -1),
            memory.get("MemAvailable", -1),
            waited,
        )


class HostUse:
    """Reads twice a second until `stop`."""

    def __init__(self, seconds: float = 0.5) -> None:
        self._seconds = seconds
        self.readings = [Reading.now()]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-use", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def between(self, since: float, until: float) -> dict[str, Any]:
        """Rates and extremes of the readings of a span; {} where it has fewer than two."""
        return rates([one for one in self.readings if since <= one.at <= until])

    def _watch(self) -> None:
        while not self._done.wait(self._seconds):
            self.readings.append(Reading.now())


def rates(readings: list[Reading]) -> dict[str, Any]:
    """MB a second, GiB, and the shares of the time in which some work waited."""
    if len(readings) < 2:
        return {}
    first, last = readings[0], readings[-1]
    seconds = last.at - first.at
    found: dict[str, Any] = {
        "loopback_mb_per_s": (last.loopback_bytes - first.loopback_bytes) / seconds / 1e6,
        "disk_mb_per_s": (last.written_kib - first.written_kib) * 1024 / seconds / 1e6,
        "dirty_gib": max(one.dirty_kib for one in readings) / _GIB_KIB,
        "available_gib": min(one.available_kib for one in readings) / _GIB_KIB,
    }
    shares = {
        name: (last.waited_us[at] - first.waited_us[at]) / seconds / 1e6 for at, name in enumerate(_PRESSURES)
    }
    if min(first.waited_us) >= 0:
        found["waited_for"] = shares
    return found


def disk_mb_per_s(folder: Path, megabytes: int) -> float:
    """MB a second of one program that writes a file and waits until it is on the disk."""
    path, block = folder / "probe", os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return megabytes * len(block) / seconds / 1e6


def _fields(path: str) -> dict[str, int]:
    """Of lines such as `Dirty:   12 kB` and `pgpgout 12`."""
    found: dict[str, int] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, rest = line.replace(":", " ").partition(" ")
        value = rest.split()
        if value and value[0].isdigit():
            found[name] = int(value[0])
    return found


def _loopback_bytes() -> int:
    """Bytes that came in over loopback, which are those that went out."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[0])
    return -1


def _waited_us(name: str) -> int:
    try:
        line = Path(f"/proc/pressure/{name}").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return -1
    return int(line.rpartition("total=")[2])
