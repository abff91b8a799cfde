"""An executor with a stopwatch: how long the device was busy with it, and how long the host waited."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pipelines.engine.executor import FrameCodes, FrameExecutor, FrameSettings, PendingFrames, PrefillRun

ROOT = Path(__file__).resolve().parents[1]

Span = tuple[torch.cuda.Event, torch.cuda.Event]


class Watched:
    """Passes everything on. Between `start` and `stop` it marks each piece of work on the device's stream and adds up the host's time."""

    def __init__(self, executor: FrameExecutor) -> None:
        self._executor = executor
        self.name, self.lag = executor.name, executor.lag
        self.state, self.kv = executor.state, executor.kv
        self.device = executor.kv.k.device
        self._on = False
        self._began = 0.0
        self._spans: dict[str, list[Span]] = {}
        self._host: dict[str, float] = {}
        self._turns = self._admitted = 0

    def start(self) -> None:
        self._spans, self._host = {"prefill": [], "frames": []}, {"embed": 0.0, "prefill": 0.0, "frames": 0.0, "wait": 0.0}
        self._turns = self._admitted = 0
        self._began, self._on = time.perf_counter(), True

    def stop(self) -> dict[str, Any]:
        """Shares of the time between: what the host did, `host_other` being the scheduler; the device's stream with this executor."""
        self._on, seconds = False, time.perf_counter() - self._began
        found: dict[str, Any] = {f"host_{name}": spent / seconds for name, spent in self._host.items()}
        found["host_other"] = 1 - sum(found.values())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            for name, spans in self._spans.items():
                found[f"stream_{name}"] = sum(begin.elapsed_time(end) for begin, end in spans) / 1000 / seconds
            found["stream_idle"] = 1 - found["stream_prefill"] - found["stream_frames"]
        return {**found, "turns": self._turns, "prefills": len(self._spans["prefill"]), "admitted": self._admitted}

    def embed(self, prompt: object) -> Tensor:
        begin = time.perf_counter()
        found = self._executor.embed(prompt)
        self._spent("embed", begin)
        self._admitted += 1
        return found

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        begin, first = time.perf_counter(), self._mark()
        self._executor.prefill(runs)
        self._between("prefill", first)
        self._spent("prefill", begin)

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        begin, first = time.perf_counter(), self._mark()
        pending = self._executor.frames(slots, count, settings)
        self._between("frames", first)
        self._spent("frames", begin)
        self._turns += 1
        return _Waited(self, pending)

    def waited(self, begin: float) -> None:
        self._spent("wait", begin)

    def _spent(self, name: str, begin: float) -> None:
        if self._on:
            self._host[name] += time.perf_counter() - begin

    def _mark(self) -> torch.cuda.Event | None:
        if not self._on or self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, name: str, first: torch.cuda.Event | None) -> None:
        if first is not None and (last := self._mark()) is not None:
            self._spans[name].append((first, last))


def profile(names: Sequence[str], seconds: float, most: int = 12) -> dict[str, Any]:
    """What threads do, by sampling: for each name, the functions of this project that were seen running, with their share of the samples.

    A function stands for all that it calls outside of the project, waiting included.
    """
    threads = {thread.ident: thread.name for thread in threading.enumerate() if thread.name in names}
    seen: dict[str, dict[str, int]] = {name: {} for name in names}
    samples, before, until = 0, sys.getswitchinterval(), time.perf_counter() + seconds
    sys.setswitchinterval(1e-4)  # so that a sample is taken where a thread is, not where it next lets go of the interpreter
    try:
        while not samples or time.perf_counter() < until:
            frames = sys._current_frames()
            for ident, name in threads.items():
                place = _place(frames.get(ident or 0))
                seen[name][place] = seen[name].get(place, 0) + 1
            samples += 1
            time.sleep(0.001)
    finally:
        sys.setswitchinterval(before)
    found: dict[str, Any] = {"samples": samples, "seconds": seconds}
    for name, places in seen.items():
        found[name] = {place: count / samples for place, count in sorted(places.items(), key=lambda item: -item[1])[:most]}
    return found


def _place(frame: FrameType | None) -> str:
    """The innermost function of this project in a stack."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if ROOT in file.parents and "site-packages" not in file.parts:
            return f"{file.relative_to(ROOT)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class _Waited:
    """Frames on their way; the wait for them is counted."""

    def __init__(self, watched: Watched, pending: PendingFrames) -> None:
        self._watched, self._pending = watched, pending

    def result(self) -> FrameCodes:
        begin = time.perf_counter()
        found = self._pending.result()
        self._watched.waited(begin)
        return found


class GpuUse:
    """The driver's own count of the time in which any kernel ran, sampled until `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._samples, self._done = device, list[int](), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-use", daemon=True)
        if device.type == "cuda":
            self._thread.start()

    def stop(self) -> float | None:
        """Share of the time, 0 to 1; None where there is no such count."""
        self._done.set()
        if self._device.type == "cuda":
            self._thread.join()
        return sum(self._samples) / len(self._samples) / 100 if self._samples else None

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            try:
                self._samples.append(torch.cuda.utilization(self._device))
            except (ModuleNotFoundError, RuntimeError) as error:
                print(f"no count of the GPU's use: {error}")
                return


class ThreadUse:
    """Seconds of processor time that the threads of these names take, from here to `shares`."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._began, self._before = time.perf_counter(), self._seconds()

    def shares(self) -> dict[str, float]:
        """By name, in percent of the time; all threads of a process share one interpreter, so together they cannot pass 100 in Python."""
        took, now = time.perf_counter() - self._began, self._seconds()
        return {f"{name}_cpu_percent": 100 * (now[name] - self._before[name]) / took for name in self._names}

    def _seconds(self) -> dict[str, float]:
        seconds = dict.fromkeys(self._names, 0.0)
        for thread in threading.enumerate():
            if thread.name in seconds and thread.native_id:
                fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                seconds[thread.name] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds
