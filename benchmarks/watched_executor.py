"""A stopwatch around an executor: the host's time in it, and the time of its work on the device's stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.engine.executor import FrameCodes, FrameExecutor, FrameSettings, PendingFrames, PrefillRun

Span = tuple[torch.cuda.Event, torch.cuda.Event]


class Watched(FrameExecutor):
    """Passes everything on. Between `start` and `stop` it marks each piece of work on the device's stream
    and adds up the host's time."""

    def __init__(self, executor: FrameExecutor) -> None:
        self._executor = executor
        self.name, self.lag = executor.name, executor.lag
        self.kernels, self.packed, self.reproducible = (
            executor.kernels,
            executor.packed,
            executor.reproducible,
        )
        self.state, self.kv = executor.state, executor.kv
        self.batch_sizes, self.stream = executor.batch_sizes, executor.stream
        self.device = executor.kv.k.device
        self._on = False
        self._began = 0.0
        self._spans: dict[str, list[Span]] = {}
        self._host: dict[str, float] = {}
        self._turns = self._admitted = 0

    def start(self) -> None:
        self._spans, self._host = (
            {"prefill": [], "frames": []},
            {"embed": 0.0, "prefill": 0.0, "frames": 0.0, "wait": 0.0},
        )
        self._turns = self._admitted = 0
        self._began, self._on = time.perf_counter(), True

    def stop(self) -> dict[str, Any]:
        """Shares of the time between: what the host did, `host_other` being the scheduler; the device's
        stream with this executor."""
        self._on, seconds = False, time.perf_counter() - self._began
        found: dict[str, Any] = {f"host_{name}": spent / seconds for name, spent in self._host.items()}
        found["host_other"] = 1 - sum(found.values())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            for name, spans in self._spans.items():
                found[f"stream_{name}"] = (
                    sum(begin.elapsed_time(end) for begin, end in spans) / 1000 / seconds
                )
            found["stream_idle"] = 1 - found["stream_prefill"] - found["stream_frames"]
        return {
            **found,
            "turns": self._turns,
            "prefills": len(self._spans["prefill"]),
            "admitted": self._admitted,
        }

    def embed_all(self, prompts: Sequence[object]) -> list[Tensor]:
        begin = time.perf_counter()
        found = self._executor.embed_all(prompts)
        self._spent("embed", begin)
        return found

    def embed(self, prompt: object) -> Tensor:
        begin = time.perf_counter()
        found = self._executor.embed(prompt)
        self._spent("embed", begin)
        self._admitted += 1
        return found

    def take_text(self, ids: NDArray[np.int64]) -> None:
        self._executor.take_text(ids)

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

        def waited() -> FrameCodes:
            begin = time.perf_counter()
            found = pending()
            self._spent("wait", begin)
            return found

        return waited

    def prepare(self) -> bool:
        return self._executor.prepare()

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
