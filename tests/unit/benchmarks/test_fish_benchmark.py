"""The GPU benchmark of Fish Speech S2 runs through on a CPU at sizes whose figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fish_gpu import Bench, main, where_a_step_goes


def test_it_runs_through_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main(["--tiny", "--device", "cpu", "--part", "frame,loop", "--requests", "1,2", "--seconds", "0.1"]) == 0
    found = json.loads((tmp_path / "fish_gpu.json").read_text())
    parts = {(row["part"], row["batch"]) for row in found["rows"]}
    assert {("frame, graph", 2), ("frame, draws and heads", 1), ("plain loop, end to end", 2)} <= parts
    assert found["faults"] == {}
    assert "faults: none" in capsys.readouterr().out


def test_a_part_that_fails_is_told_of_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr("benchmarks.fish_gpu.frame_part", lambda bench: 1 / 0)
    monkeypatch.setattr("benchmarks.fish_gpu.loop_part", lambda bench: bench.add("loop", 1, 2.0, 4))
    assert main(["--tiny", "--device", "cpu", "--part", "frame,loop", "--requests", "1"]) == 1
    found = json.loads((tmp_path / "fish_gpu.json").read_text())
    assert "ZeroDivisionError" in found["faults"]["frame"]
    assert found["rows"][0]["frames_per_s"] == 2000


def test_a_step_is_cut_into_its_parts() -> None:
    class Found(Bench):
        def __init__(self) -> None:
            self.requests = [16, 64]
            self.rows = [
                {"part": "LM on vLLM", "batch": 16, "ms": 1.0, "ms_a_step": 10.0},
                {"part": "frame, graph", "batch": 16, "ms": 6.0},
                {"part": "frame, draws and heads", "batch": 16, "ms": 1.0},
            ]

    assert where_a_step_goes(Found()) == [
        "step of 16: 10.00 ms = fast AR's layers 5.00 ms (50 %), draws and heads 1.00 ms (10 %), slow AR and host 4.00 ms (40 %)"
    ]
