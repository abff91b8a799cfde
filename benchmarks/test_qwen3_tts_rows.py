"""Numbers of slots side by side: the arithmetic, and a run on a CPU at sizes whose figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_session, qwen3_tts_rows
from benchmarks.gpu_session import Outcome


def test_a_frame_is_split_into_what_the_device_did() -> None:
    row = {
        "part": "all",
        "slots": 512,
        "ms_per_frame": 17.0,
        "stream_frames": 0.88,
        "stream_prefill": 0.06,
        "stream_idle": 0.06,
    }
    found = qwen3_tts_rows.split_ms(row, 13.0)
    assert found == {
        "lm": pytest.approx(14.96 - 6.656),
        "prefill": pytest.approx(1.02),
        "idle": pytest.approx(1.02),
        "codec": 6.656,
    }
    assert sum(found.values()) == pytest.approx(17.0)
    assert qwen3_tts_rows.split_ms({**row, "part": "lm"}, 13.0)["codec"] == 0
    assert qwen3_tts_rows.split_ms({"part": "all", "slots": 4, "ms_per_frame": 1.0}, 13.0) == {}
    shown = qwen3_tts_rows.split_lines(
        [{**row, "size": "0b6", "context": 108.4, "audio_s_per_s": 2410.0, "split_ms": found}
         | {"clocks": {"mhz": 1755.0, "watts": 640.2}}, {"part": "codec", "audio_s_per_s": 1.0}]
    )  # fmt: skip
    (line,) = (" ".join(each.split()) for each in shown)
    assert line == (
        "0b6 all 512 context 108 2,410 RTFx 17.00 ms = lm 8.30 prefill 1.02 idle 1.02 codec 6.66 1755 MHz 640 W"
    )


def test_slots_are_compared_in_one_step_of_a_session(tmp_path: Path) -> None:
    chosen = [step for step in gpu_session.steps("cpu", True, tmp_path) if step.name.startswith("rows")]
    told: list[Outcome] = []
    gpu_session.run_all(chosen, "cpu", 4, tmp_path, told.append)
    assert [outcome.ended for outcome in told] == ["ok", "left out"], (tmp_path / "session.log").read_text()[
        -2000:
    ]
    rows = [
        row
        for row in json.loads((tmp_path / "qwen3_tts_rows.json").read_text())["rows"]
        if row["part"] == "all"
    ]
    spare = qwen3_tts_rows.SPARE
    assert [(row["slots"], row["spare_slots"]) for row in rows] == [
        (4, 0),
        (4, spare),
        (6, 0),
        (4, 0),
        (6, 0),
    ]
    assert [case.spare for case in qwen3_tts_rows.cases([4], [0], [4])] == [0, spare]
    assert all(
        row["size"] == "tiny" and row["audio_s_per_s"] > 0 and row["wrong_lengths"] == 0 for row in rows
    )
    assert rows[-1]["context"] > rows[0]["context"] + 36
    assert len(gpu_session.summary(tmp_path)) == len(rows)
