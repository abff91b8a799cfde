"""What every benchmark writes: a result, row by row, and tables of it; the options that all have; and what processes use:
cores and memory from /proc, and how busy and full the GPUs are by the driver's own count. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
NOTHING: Mapping[str, Iterable[str]] = MappingProxyType({})
_TICKS, _PAGE, _GIB = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE"), 2.0**30


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
    """The options that all have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default=device)
    made.add_argument("--tiny", action="store_true", help="tiny sizes for a CPU; the figures mean nothing")
    made.add_argument("--json", type=Path, help="the result; default: a file of its name in $OUT, or here")
    return made


def read(
    made: argparse.ArgumentParser, given: Sequence[str] | None = None, known: Mapping[str, Iterable[str]] = NOTHING, **defaults: Any
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
            several = lambda text, kind=kind: [kind(one) for one in text.split(",")]  # noqa: E731
            made.add_argument(option, nargs="*", type=several, default=[values])
            lists.append(name)
        else:
            made.add_argument(option, type=str if default is None else type(default), default=default)
    found = made.parse_args(given)
    for name in lists:
        setattr(found, name, [one for several in getattr(found, name) for one in several])
    for name, values in known.items():
        if unknown := [one for one in getattr(found, name) if one not in values]:
            made.error(f"--{name} has no {', '.join(unknown)}: {', '.join(values)}")
    return found


def write_random_checkpoint(size: str, folder: Path, texts: Iterable[str], device: str, *more: str) -> float:
    """Writes a checkpoint in a process that leaves no memory of the device taken. Its seconds."""
    lines, began = folder.with_name(f"{folder.name}-texts"), time.perf_counter()
    lines.write_text("\n".join(texts), encoding="utf-8")
    words = [sys.executable, "-m", "benchmarks.checkpoint", size, str(folder), "--texts", str(lines)]
    subprocess.run([*words, "--device", device, *more], cwd=ROOT, check=True)
    return time.perf_counter() - began


class Result:
    """The rows, faults and facts of one run."""

    def __init__(self, name: str, options: argparse.Namespace, device: str, **facts: Any) -> None:
        self.options = options
        self.path: Path = options.json or Path(os.environ.get("OUT", ".")) / f"{name}.json"
        self.rows: list[Row] = []
        self.faults: dict[str, str] = {}
        self.found: dict[str, Any] = {"commit": commit(), "device": device, **facts}
        self._began, self.left_out = time.monotonic(), list[str]()
        self.found |= {"faults": self.faults, "left_out": self.left_out, "rows": self.rows}

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

    def attempt(self, part: str, work: Callable[..., object], *given: Any, **more: Any) -> None:
        """A part that fails is reported and does not stop the others."""
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

    def attempt_in_time(self, part: str, needs: float, work: Callable[..., object], *given: Any) -> None:
        """A part that needs so many seconds; without them it is left out, which the result says."""
        if self.seconds_left >= needs:
            self.attempt(part, work, *given)
        else:
            self.left_out.append(part)
            self.write()

    def end(self, *columns: str) -> int:
        """Prints these columns of the rows, and what failed; the exit status."""
        print(table(self.rows, columns))
        print(
            f"left out: {', '.join(self.left_out) or 'nothing'}; faults: {', '.join(self.faults) or 'none'}"
        )
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
    rows = [asdict(figure) | {"share": figure.share} for figure in figures]
    print(f"{title}\n{table(rows, ('name', 'value', 'unit', 'aim', 'limit', 'limit_name', 'share'))}")
    device = platform.processor() or platform.machine()
    facts = {"commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "device": device}
    (RESULTS / f"{name}.json").write_text(json.dumps({**facts, "figures": rows}, indent=1) + "\n")


def new_database(server: str, name: str) -> str:
    """The URL of a new empty database of a PostgreSQL server."""
    import psycopg  # A machine for other figures may lack it.

    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{server.rpartition('/')[0]}/{name}"


def s3_settings() -> Any:
    """The S3 server that the environment names."""
    from jobs.settings import S3Settings

    names = ("endpoint_url", "access_key_id", "secret_access_key", "region")
    return S3Settings.model_validate({name: os.environ.get(f"SPEECH_S3__{name.upper()}") for name in names})


def device_name() -> str:
    """The name of the first GPU; the processor's where there is none."""
    program = shutil.which("nvidia-smi")
    words = [program or "", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False) if program else None
    if done is None or done.returncode or not done.stdout:
        return platform.processor() or platform.machine()
    return done.stdout.splitlines()[0].strip()


class ProcessUse:
    """Reads some processes and all their descendants every `seconds` until `stop`."""

    def __init__(self, roots: Sequence[int], seconds: float = 0.5) -> None:
        self._roots, self._seconds = tuple(roots), seconds
        #: Unix time, and of each process its name, its processor seconds and its private bytes in memory.
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
        (began, first), (ended, last) = (
            min(self._readings, key=lambda one: abs(one[0] - when)) for when in (since, until)
        )
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

    def _watch(self) -> None:
        while True:
            now, found = time.time(), dict[int, tuple[str, float, int]]()
            for pid in _family(self._roots):
                stat, pages = _stat(f"/proc/{pid}/stat"), _read(f"/proc/{pid}/statm").split()
                if stat and pages:
                    found[pid] = _name(pid), _used_seconds(stat), (int(pages[1]) - int(pages[2])) * _PAGE
            self._readings.append((now, found))
            self._gpus.append((now, self._nvml()))
            if self._done.wait(self._seconds):
                return


def _read(path: str) -> str:
    """A file of /proc; empty where its process or thread is gone."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _stat(path: str) -> list[str]:
    """State, parent and so on of a process or thread; empty where it is gone."""
    return _read(path).rpartition(")")[2].split()


def _used_seconds(stat: Sequence[str]) -> float:
    """Processor seconds of a process or thread."""
    return (int(stat[11]) + int(stat[12])) / _TICKS


def _family(roots: Sequence[int]) -> list[int]:
    """The processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if stat := _stat(f"{entry}/stat"):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, left = list[int](), list(roots)
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def _name(pid: int) -> str:
    """The module of a Python process, such as `pipelines.engine_process`; else its program."""
    words = [word for word in _read(f"/proc/{pid}/cmdline").split("\0") if word]
    if not words or words[0].startswith("["):  # a title, such as Celery's
        return ""
    program = Path(words[0].partition(":")[0]).name
    if program.startswith("python") and "-m" in words:
        at = words.index("-m") + 1
        return " ".join(words[at : at + (2 if words[at] in ("jobs", "worker") else 1)])
    if program.startswith("python") and "-c" in words:
        return words[words.index("-c") + 1].partition("(")[0][:60]
    return program


def listener_pid(port: int) -> int | None:
    """The process of this host that listens at a TCP port; None where it is elsewhere or another user's."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in _read(f"/proc/net/{name}").splitlines()[1:]]
    sockets = {
        f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(file) in sockets for file in (entry / "fd").iterdir()):
                return int(entry.name)
        except OSError:
            continue
    return None


def _open_nvml() -> Callable[[], list[tuple[float, int]]]:
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
        taken = (int(pynvml.nvmlDeviceGetMemoryInfo(one).used) for one in handles)
        return list(zip(busy, taken, strict=True))

    return read
