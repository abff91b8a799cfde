"""What `benchmarks.megakernel` does without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import megakernel
from benchmarks.megakernel import speech_row


def test_a_row_of_speech_tells_frames_from_the_rest() -> None:
    long = [(0.30, 10.0), (0.25, 10.0), (0.26, 10.0)]
    row = speech_row("megakernel", "graph", long, [(0.06, 2.0), (0.05, 2.0), (0.07, 2.0)], 0.08)
    assert (row["executor"], row["opened"], row["utterances"]) == ("megakernel", "graph", 3)
    assert row["frame_ms"] == pytest.approx(2.0)
    assert row["rest_ms"] == pytest.approx(10.0)
    assert [row[name] for name in ("rtf_least", "rtf", "rtf_most")] == pytest.approx(
        [10 / 0.30, 10 / 0.26, 40.0]
    )


def test_utterances_of_two_executors_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "found.json"
    options = ["--part", "rtf", "--device", "cpu", "--tiny", "--utterances", "2", "--json", str(found)]
    monkeypatch.setattr("sys.argv", ["megakernel", *options])
    assert megakernel.main() == 0
    rows = json.loads(found.read_text())["rows"]
    assert [(row["part"], row["executor"], row["opened"]) for row in rows] == [
        ("rtf", "eager", "eager"),
        ("rtf", "auto", "eager"),
    ]
    for row in rows:
        assert row["spoken_s"] == pytest.approx(0.8)
        assert 0 < row["rtf_least"] <= row["rtf"] <= row["rtf_most"]


def test_first_chunks_of_one_and_two_streams_are_timed_for_each_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "found.json"
    options = ["--part", "streams", "--device", "cpu", "--tiny", "--streams", "2", "--json", str(found)]
    monkeypatch.setattr("sys.argv", ["megakernel", *options])
    assert megakernel.main() == 0
    rows = json.loads(found.read_text())["rows"]
    assert [(row["executor"], row["at_once"], row["streams"]) for row in rows] == [
        (name, at_once, 8) for name in ("eager", "auto") for at_once in (1, 2)
    ]
    for row in rows:
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["longest_ms"]
