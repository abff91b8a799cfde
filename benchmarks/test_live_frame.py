"""Live frames taken apart: what the rows differ in, where the rows of a batch lie, and a run on a CPU whose figures mean nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from benchmarks import live_frame
from benchmarks.gpu import Bench
from benchmarks.live_frame import Case, Frames
from benchmarks.qwen3_load import Load
from benchmarks.qwen3_tts import Throughput
from benchmarks.roofline import mean_context
from pipelines.qwen3_tts.dummy import TINY_CODEC, dummy_decoder


def differences(one: Case, other: Case) -> set[str]:
    return {field.name for field in fields(Case) if getattr(one, field.name) != getattr(other, field.name)} - {"name"}


def test_each_row_differs_from_the_first_in_one_thing() -> None:
    first, *others = live_frame.cases(32)
    *alone, live, long, again = others
    assert [len(differences(first, case)) for case in alone] == [1] * 10
    assert len({frozenset(differences(first, case)) for case in alone}) == 8, "four rows draw in another way"
    assert differences(first, live) == {"ragged", "scattered", "reordered", "prompts"}
    assert differences(live, long) == {"rounds"}
    assert differences(first, again) == set()


def test_ragged_contexts_have_the_mean_of_a_live_engine() -> None:
    lengths = [(10, 30), (40, 200)]
    contexts = live_frame.ragged(lengths, 20_000)
    assert sum(contexts) / len(contexts) == pytest.approx(mean_context(lengths), rel=0.02)
    assert (min(contexts), max(contexts)) == (10, 239)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Throughput:
    monkeypatch.setattr(live_frame, "FRAMES", 4)
    bench = Bench("live_frame", Namespace(device="cpu", json=tmp_path / "found.json", tiny=True, turns=None, admit_turns=None))
    return Throughput(bench, "tiny", dummy_decoder(TINY_CODEC, bench.device, bench.dtype), Load(3.0, 15.0, 0.3))


def test_rows_lie_where_their_case_says(work: Throughput) -> None:
    frames = Frames(work.bench, work, 6)
    kv, state = frames.executor.kv, frames.executor.state
    first, free = replace(live_frame.cases(2)[0], rounds=1), kv.free
    assert len(frames.measure(first)) == 2
    assert state.positions[:6].tolist() == [frames.context + 2] * 6, "their mean context was that of the load"
    table = state.page_table[:6].clone()
    assert bool((table[:, 1] == table[:, 0] + 1).all())
    assert kv.free == free
    frames.measure(replace(first, scattered=True))
    assert not torch.equal(state.page_table[:6], table)
    frames.measure(replace(first, ragged=True, prompts=2, reordered=True, frames_per_turn=1))
    assert state.positions[:6].tolist() == [max(one - 2, 1) + 4 for one in frames._ragged]
    assert len(set(frames._ragged)) > 1
    assert kv.free == free


def test_a_live_frame_is_taken_apart_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    few = [case for case in live_frame.cases(4) if case.name in ("as in the table", "four frames a turn", "all together")]
    monkeypatch.setattr(live_frame, "cases", lambda _: few)
    monkeypatch.setattr(live_frame, "FRAMES", 8)
    monkeypatch.setattr("sys.argv", ["live_frame", "--device", "cpu", "--tiny", "--limit", "240", "--json", str(path)])
    assert live_frame.main() == 0
    found = json.loads(path.read_text())
    assert found["left_out"] == []
    rows = [row for row in found["rows"] if row["part"] == "frame"]
    assert [row["name"] for row in rows] == [case.name for case in few]
    assert rows[2]["over_ms"] == pytest.approx(rows[2]["ms"] - rows[0]["ms"])
    assert sum(row["part"] == "table" for row in found["rows"]) == 2
    (live,) = (row for row in found["rows"] if row["part"] == "lm")
    assert (live["wrong_lengths"], live["settled"]) == (0, True)
    assert "frame, all together" in capsys.readouterr().out


def test_a_row_shows_its_clock() -> None:
    row = {"part": "frame", "name": "greedy", "ms": 7.0, "over_ms": -0.5, "mhz": 1755.0, "watts": 640.2}
    shown = live_frame.lines([row, {"part": "lm", "ms": 1.0}, {"part": "table", "name": "context 108", "ms": 7.1, "predicted_ms": 7.33}])
    assert shown[1].split() == ["frame,", "greedy", "7.00", "-0.50", "1755", "640"]
    assert shown[2].split() == ["table,", "context", "108", "7.10", "predicted", "7.33"]
    assert len(shown) == 3
