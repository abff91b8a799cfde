"""Where the threads of running Python processes are, by samples that py-spy takes from outside."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.process_use import Process

_RATE = 100
_FUNCTIONS = 12


def profiles(processes: Sequence[Process], seconds: float, folder: Path) -> list[dict[str, Any]]:
    """A profile of each process, all at once; an empty one says why there is none."""
    with ThreadPoolExecutor(len(processes) or 1) as pool:
        return list(pool.map(lambda process: _profile(process, seconds, folder), processes))


def _profile(process: Process, seconds: float, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"process": process.name, "seconds": seconds}
    program = shutil.which("py-spy") or shutil.which(
        "py-spy", path=f"{Path(sys.executable).parent}:{':'.join(_bins())}"
    )
    if program is None:
        return {**found, "fault": "py-spy is not installed"}
    for kind, options in (("running", ()), ("interpreter", ("--gil",))):
        path = folder / f"{process.pid}-{kind}"
        words = [
            program,
            "record",
            "--pid",
            str(process.pid),
            "--duration",
            str(round(seconds)),
            "--rate",
            str(_RATE),
            "--threads",
        ]
        words += ["--nonblocking", "--format", "raw", "--output", str(path), *options]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode or not path.is_file():
            return {**found, "fault": done.stderr[-500:]}
        found[kind] = summary(path.read_text(encoding="utf-8", errors="replace"), round(seconds) * _RATE)
    return found


def _bins() -> list[str]:
    """Folders of programs beside the packages of a `pip install --target`."""
    return [str(Path(entry, "bin")) for entry in sys.path if entry]


def summary(raw: str, samples: int) -> dict[str, Any]:
    """Of each thread the share of the time it ran, and of its functions: the innermost frames and how
    often each was there.

    raw: lines of py-spy, `thread;outer;...;inner count`.
    """
    threads: dict[str, Counter[str]] = {}
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        at = next((index for index, frame in enumerate(frames) if frame.startswith("thread (")), None)
        if at is None or not count.isdigit():
            continue
        name = frames[at].partition(": ")[2] or frames[at]
        inner = frames[-1] if len(frames) > at + 1 else "?"
        threads.setdefault(name, Counter())[inner.replace(str(Path(__file__).parents[1]) + "/", "")] += int(
            count
        )
    found: dict[str, Any] = {}
    for name, functions in sorted(threads.items(), key=lambda one: -one[1].total()):
        share = functions.total() / samples
        if share >= 0.01:
            found[name] = {
                "share": share,
                "functions": {place: count / samples for place, count in functions.most_common(_FUNCTIONS)},
            }
    return found
