# ruff: noqa: N802 - the driver's own names
"""LM and codec side by side: the arithmetic, the driver's calls, and the rows that a CPU can measure, whose figures mean nothing."""

from __future__ import annotations

import contextlib
import ctypes
import json
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import partitions, side_by_side
from benchmarks.side_by_side import Lane, Work, balanced, paces
from kernels import cuda_graphs
from kernels.cuda_graphs import GraphPool

CPU = torch.device("cpu")


def test_the_slower_one_goes_on_alone() -> None:
    # Side by side for 2 s: 200 and 100 seconds of audio; the codec then has 100 left, at 400 a second 0.25 s.
    assert balanced(100, 50, 300, 400) == pytest.approx(200 / 2.25)
    assert balanced(50, 100, 400, 300) == pytest.approx(200 / 2.25)
    assert balanced(70, 70, 300, 400) == 70


def test_what_a_lane_raises_is_raised_and_ends_the_other() -> None:
    runs: list[int] = []

    def broken() -> None:
        if len(runs) > 3:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        paces([Lane(lambda: runs.append(1), 1.0, None), Lane(broken, 1.0, None)], CPU, 240.0)


def test_a_cpu_measures_both_alone_and_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr("sys.argv", ["side_by_side", "--device", "cpu", "--tiny", "--json", str(path)])
    assert side_by_side.main() == 0
    found = json.loads(path.read_text())
    alone = {row["what"]: row for row in found["rows"] if row["part"] == "alone"}
    serial = {row["codec"]: row for row in found["rows"] if row["part"] == "serial"}
    assert (set(alone), set(serial)) == ({"lm", "continuous", "gathered"}, {"continuous", "gathered"})
    assert alone["lm"]["audio_s_per_s"] == pytest.approx(4 * 0.08 / (alone["lm"]["lm_ms"] / 1000))
    assert alone["gathered"]["audio_s_per_s"] == pytest.approx(0.08 / (alone["gathered"]["codec_us"] / 1e6))
    assert found["left_out"] == []


def test_graphs_that_run_side_by_side_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[GraphPool] = []

    def capture(work: Work, pool: GraphPool, aside: object) -> SimpleNamespace:
        pools.append(pool)
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(side_by_side, "capture", capture)
    assert signature(capture).parameters.keys() == signature(cuda_graphs.capture).parameters.keys()
    for _ in range(2):
        side_by_side.graph_of(lambda: None, SimpleNamespace())()  # type: ignore[arg-type]
    assert all(isinstance(pool, GraphPool) for pool in pools)
    assert pools[0] is not pools[1]


def test_what_has_no_time_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["side_by_side", "--device", "cpu", "--tiny", "--limit", "0", "--json", str(path)])
    assert side_by_side.main() == 0
    assert "lm alone" in json.loads(path.read_text())["left_out"]


def test_the_verdict_is_the_best_rows() -> None:
    row = {"part": "together", "how": "parts", "codec": "gathered", "lm_multiprocessors": 72, "codec_multiprocessors": 60}
    row |= {"lm_ms": 9.2, "codec_us": 29.5, "in_step": 2700.0, "balanced": 3310.0}
    shown = side_by_side.lines([{**row, "gain": 0.1}, {**row, "gain": 0.13}])
    assert shown[1].split() == ["parts", "gathered", "72,", "60", "9.20", "29.50", "2,700", "3,310", "10.0%"]
    assert shown[-1] == "best gain 13.0%, needed 12%: go"
    assert side_by_side.lines([{**row, "gain": 0.11}])[-1].endswith("no go")


class Driver:
    """The calls of the driver, on a device of 132 multiprocessors that are given out by eight."""

    def __init__(self) -> None:
        self.contexts: list[int] = []

    def cuDeviceGetDevResource(self, device: int, found: object, kind: int) -> int:
        assert (device, kind) == (0, 1)
        found._obj.count = 132  # type: ignore[attr-defined]
        return 0

    def cuDevSmResourceSplitByCount(self, first: object, groups: object, whole: object, others: object, flags: int, least: int) -> int:
        assert groups._obj.value == 1  # type: ignore[attr-defined]
        count = min(-(-least // 8) * 8, 132)
        first._obj.count, others._obj.count = count, whole._obj.count - count  # type: ignore[attr-defined]
        return 0

    def cuDevResourceGenerateDesc(self, described: object, resource: object, count: int) -> int:
        described._obj.value = resource._obj.count  # type: ignore[attr-defined]
        return 0

    def cuGreenCtxCreate(self, context: object, described: ctypes.c_void_p, device: int, flags: int) -> int:
        assert flags == 1
        self.contexts.append(described.value or 0)
        context._obj.value = 1000 + (described.value or 0)  # type: ignore[attr-defined]
        return 0

    def cuGreenCtxStreamCreate(self, stream: object, context: ctypes.c_void_p, flags: int, priority: int) -> int:
        assert (flags, priority) == (1, 0)
        stream._obj.value = (context.value or 0) + 1000  # type: ignore[attr-defined]
        return 0


def test_a_device_is_cut_into_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(partitions, "_driver", lambda: driver)
    monkeypatch.setattr(partitions, "_on", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(handle=handle))
    assert ctypes.sizeof(partitions._Resource) == 144, "what cuda.h says of CUdevResource"
    first, others = partitions.two_parts(torch.device("cuda", 0), 100)
    assert (first.multiprocessors, others.multiprocessors) == (104, 28)
    assert (first.stream.handle, others.stream.handle) == (2104, 2028)  # type: ignore[attr-defined]
    assert driver.contexts == [104, 28]
    with pytest.raises(RuntimeError, match="no second part"):
        partitions.two_parts(torch.device("cuda", 0), 132)
