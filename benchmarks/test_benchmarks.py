"""The arithmetic behind the benchmarks, and runs on a CPU at sizes whose figures mean nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import (
    codec_stage,
    fish_speech,
    gpu_session,
    plots,
    process_profile,
    qwen3_tts_reference,
    qwen3_tts_soak,
    roofline,
    structure,
)
from benchmarks.gpu import Bench, ThreadUse
from benchmarks.process_use import Process
from benchmarks.qwen3_load import Load, Mark, Tally, rates
from benchmarks.qwen3_tts import codec_alone, headlines, share, table
from benchmarks.qwen3_tts_bits import differing
from benchmarks.random_models.qwen3_tts import TINY_CODEC, dummy_decoder
from pipelines.errors import ErrorCode, SynthesisError

H200 = roofline.DEVICES[0]


@pytest.mark.parametrize(
    ("rows", "context", "talker", "predictor", "frame"),
    [
        (1, 300, 214, 564, 778),
        (32, 300, 462, 584, 1046),
        (128, 300, 1230, 646, 1876),
        (512, 300, 4303, 1675, 5978),
        (512, 1500, 20690, 1675, 22365),
    ],
)
def test_floors_are_those_of_the_published_roofline(
    rows: int, context: int, talker: int, predictor: int, frame: int
) -> None:
    floor = roofline.frame_floor("0b6", rows, context, H200)
    assert round(1e6 * max(floor.talker_read, floor.talker_compute)) == talker
    assert round(1e6 * max(floor.predictor_read, floor.predictor_compute)) == predictor
    assert round(1e6 * floor.seconds) == frame


def test_floor_of_a_row_and_what_has_none() -> None:
    assert roofline.device_named("NVIDIA H100 80GB HBM3") is roofline.DEVICES[1]
    assert roofline.device_named("Tesla T4") is None
    frame = roofline.floor_ms("lm", "0b6", 512, 300, H200)
    whole = roofline.floor_ms("all", "0b6", 512, 300, H200)
    assert frame is not None
    assert whole == pytest.approx(frame + 512 * 0.0062785, rel=1e-4)
    assert roofline.floor_ms("codec", "", 1, 0, H200) == pytest.approx(0.0062785, rel=1e-4)
    assert roofline.floor_ms("lm", "0b6", 512, 300, None) is None
    assert roofline.floor_ms("lm", "tiny", 8, 30, H200) is None
    assert share({"floor_ms": 3.0, "ms_per_frame": 12.0}) == 0.25
    assert share({"floor_ms": None, "ms_per_frame": 12.0}) is None


def test_mean_context_weighs_by_time() -> None:
    assert roofline.mean_context([(10, 100)]) == 60
    assert roofline.mean_context([(10, 100), (30, 300)]) == (100 * 60 + 300 * 180) / 400
    assert roofline.mean_context([]) == 0


def test_sustained_is_the_smaller_of_made_and_heard() -> None:
    marks = [Mark(0, 0, 500, 5, 8), Mark(2, 1000, 1400, 9, 8), Mark(4, 2400, 2500, 20, 6)]
    found = rates(marks, 8)
    assert found["made_per_s"] == 600
    assert found["heard_per_s"] == 500
    assert found["frames_per_s"] == 500
    assert found["audio_s_per_s"] == 40
    assert found["ms_per_frame"] == 16
    assert found["windows_made_per_s"] == [500, 700]
    assert found["spread"] == pytest.approx(1 / 3)
    assert found["utterances"] == 15
    assert Load(3, 15, 1).positions == 269


def test_tally_counts_what_is_wrong_and_probes() -> None:
    tally = Tally()
    tally.heard(10, True)
    tally.heard(10, False)
    tally.failed(SynthesisError(ErrorCode.SYNTH_ABORTED, "closed"))
    tally.failed(SynthesisError(ErrorCode.SYNTH_NAN, "nan"))
    for codes in ([[1, 2]], [[1, 2]], [[2, 1]]):
        tally.probed(np.array(codes))
    assert (tally.utterances, tally.frames, tally.wrong) == (2, 20, 2)
    assert sorted(tally.probes.values()) == [1, 2]


WHOLE = {"size": "0b6", "part": "all", "slots": 512, "reproducible": False}


ROWS = [
    {"size": "0b6", "part": "reference", "slots": 256, **qwen3_tts_reference.row(256, 50, 5.0, 50.0)},
    {"size": "0b6", "part": "reference", "slots": 512, **qwen3_tts_reference.row(512, 50, 6.0, 50.0)},
    {"size": "0b6", "part": "reference", "slots": 1024, "error": "out of memory"},
    {**WHOLE, "audio_s_per_s": 2000.0, "frames_per_s": 25000.0, "ms_per_frame": 20.48}
    | {"floor_ms": 9.2, "floor_share": 0.449, "spread": 0.02, "peak_gib": 27.5},
    {**WHOLE, "reproducible": True, "audio_s_per_s": 1500.0, "frames_per_s": 18750.0, "ms_per_frame": 27.3},
    {
        "size": "",
        "part": "codec",
        "us_per_frame": 13.0,
        "ms_per_frame": 0.013,
        "audio_s_per_s": 6154.0,
        "frames_per_s": 76923.0,
    },
]


def test_the_reference_runs_its_stages_one_after_the_other() -> None:
    row = ROWS[1]
    assert row["frames_per_s"] == pytest.approx(512 * 50 / (6.0 + 512 * 50 * 50e-6))
    assert row["lm_frames_per_s"] == pytest.approx(512 * 50 / 6.0)


def test_table_and_headlines() -> None:
    shown = table(ROWS).splitlines()
    assert len(shown) == 6
    assert all(word in shown[3] for word in ("2,000", "25,000", "20.480", "9.200", "45%", "2.0%", "27.5"))
    assert "same bits" in shown[4]
    best = max(row["audio_s_per_s"] for row in ROWS[:2])
    assert headlines(ROWS) == [
        f"0b6: 2,000 RTFx, the reference at the best batch measured {best:,.0f}: {2000 / best:.1f} times",
        "0b6, 512 slots: reproducible mode keeps 75%",
    ]


def test_plot_has_a_line_for_every_part() -> None:
    lines = {line.name: line for line in plots.lines_of(ROWS)}
    assert set(lines) == {"0b6, reference", "0b6, whole", "0b6, whole, reproducible", "0b6, roofline"}
    assert [x for x, _ in lines["0b6, reference"].points] == [256, 512]
    assert lines["0b6, roofline"].points == ((512, pytest.approx(512 / 9.2 * 80)),)
    drawn = plots.plot({"device": "a <GPU>", "rows": ROWS})
    assert drawn.count("<polyline") == 4
    assert "a &lt;GPU&gt;" in drawn
    with pytest.raises(ValueError, match="nothing"):
        plots.svg("", "", "", [])


def samples(growth: float, frames: list[int]) -> list[dict[str, float]]:
    return [
        {
            "at_s": float(at),
            "utterances": at,
            "frames": made,
            "running": 8,
            "free_pages": 2,
            "device_mib": 100 + growth * at,
            "host_mib": 500.0,
        }
        for at, made in enumerate(frames)
    ]


END = {
    "utterances": 100,
    "wrong": 0,
    "drained": True,
    "free_slots": 8,
    "free_pages": 16,
    "distinct_probes": 1,
    "reproducible": True,
}


@pytest.mark.parametrize(
    ("growth", "frames", "end", "problem"),
    [
        (0.0, [100 * at for at in range(12)], {}, ""),
        (20.0, [100 * at for at in range(12)], {}, "the device's memory grew"),
        (
            0.0,
            [0, 100, 200, 300, 400, 500, 600, 700, 800, 850, 900, 950],
            {},
            "the last third ran at 50% of the first",
        ),
        (0.0, [100 * at for at in range(12)], {"free_pages": 15}, "1 pages are lost"),
        (0.0, [100 * at for at in range(12)], {"free_slots": 7}, "1 slots are lost"),
        (0.0, [100 * at for at in range(12)], {"wrong": 2}, "2 utterances were wrong"),
        (0.0, [100 * at for at in range(12)], {"utterances": 99}, "99 of 100 utterances"),
        (0.0, [100 * at for at in range(12)], {"drained": False}, "not everything came out"),
        (0.0, [100 * at for at in range(12)], {"distinct_probes": 2}, "a probe had 2 results"),
    ],
)
def test_verdict_of_a_soak(growth: float, frames: list[int], end: dict[str, object], problem: str) -> None:
    found = qwen3_tts_soak.verdict(samples(growth, frames), 100, 8, 16, {**END, **end})
    assert found["problems"] == ([problem] if problem else [])


def test_differing_codes_are_found_among_requests_that_both_have() -> None:
    first = {"a": np.array([[1]]), "b": np.array([[1]]), "c": np.array([[3]])}
    assert differing(first, {"a": np.array([[1]]), "b": np.array([[2]])}) == ["b"]


def test_reference_config_fits_the_package() -> None:
    config = qwen3_tts_reference.reference_config("0b6")
    talker = config["talker_config"]
    assert talker["rope_scaling"]["mrope_section"] == [24, 20, 20]
    assert talker["code_predictor_config"]["rope_scaling"] is None
    assert "model_type" not in config


def test_summary_of_a_folder(tmp_path: Path) -> None:
    assert gpu_session.summary(tmp_path) == []
    (tmp_path / "qwen3_tts.json").write_text(json.dumps({"rows": ROWS}))
    (tmp_path / "lm_gpu.json").write_text(
        json.dumps({"device": "NVIDIA H200", "frames": [{"model": "0.6b", "rows": 128, "best_ms": 5.55}]})
    )
    (tmp_path / "bits.json").write_text(
        json.dumps({"same_bits": False, "requests": 9, "differ_alone": ["3"]})
    )
    (tmp_path / "soak.json").write_text("{")
    shown = "\n".join(gpu_session.summary(tmp_path))
    assert "5.55 ms     1.88    34%" in shown
    assert "same bits: False for 9 requests {'differ_alone': 1}" in shown


def test_the_codec_alone_is_measured_through_its_stage() -> None:
    decoder = dummy_decoder(TINY_CODEC, torch.device("cpu"), torch.float32)
    pool = [(None, frames) for frames in (3, 5, 2)]
    found = codec_alone(decoder, pool, 0.05, at_once=2)
    assert found["wrong_lengths"] == 0
    assert found["us_per_frame"] == pytest.approx(1e6 / found["frames_per_s"])
    assert found["audio_s_per_s"] > 0


def test_the_codecs_stage_is_measured_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["codec_stage", "--device", "cpu", "--tiny", "--json", str(found)])
    assert codec_stage.main() == 0
    rows = json.loads(found.read_text())["rows"]
    ways = {(row["way"], row["front"], row["lengths"]) for row in rows if row["part"] == "host to host"}
    assert ways == {
        (way, front, lengths)
        for way in ("gathered", "4x4")
        for front in ("plain", "fused")
        for lengths in ("equal", "mixed")
    }
    assert all(row["wrong_lengths"] == 0 for row in rows if row["part"] == "host to host")
    assert [(row["way"], row["front"]) for row in rows if row["part"] == "step"] == [
        ("4x4", "plain"),
        ("4x4", "fused"),
    ]
    errors = {row["way"]: row["relative_rms"] for row in rows if row["part"] == "error"}
    assert len(errors) == 5
    assert max(errors.values()) < 1e-4, "in float32 all ways are one"
    (host,) = (row for row in rows if row["part"] == "host")
    assert host["rows"] == host["frames"] == 4


def options(tmp_path: Path, **more: object) -> Namespace:
    return Namespace(device="cpu", json=tmp_path / "found.json", **more)


def test_a_part_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    bench = Bench("name", options(tmp_path))
    bench.attempt("frame", lambda: 1 / 0)
    bench.attempt("loop", lambda: bench.timed("loop", 1, 2.0, 0.5))
    assert bench.end() == 1
    found = json.loads(bench.path.read_text())
    assert "ZeroDivisionError" in found["faults"]["frame"]
    assert found["rows"][0]["audio_s_per_s"] == 250


def test_a_step_of_fish_is_cut_into_its_parts(tmp_path: Path) -> None:
    bench = Bench("name", options(tmp_path, requests=[16, 64]))
    bench.timed("LM alone", 16, 1.0, ms_a_step=10.0)
    bench.timed("frame, graph", 16, 6.0)
    bench.timed("frame, draws and heads", 16, 1.0)
    assert fish_speech.where_a_step_goes(bench) == [
        "step of 16: 10.00 ms = fast AR's layers 5.00 ms (50 %), draws and heads 1.00 ms (10 %), slow AR and host 4.00 ms (40 %)"
    ]


def test_threads_are_told_apart() -> None:
    assert "MainThread" in ThreadUse().shares()


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str]()}
    assert structure.circles(edges) == [["a", "b", "c"]]


def test_processor_time_of_a_span_is_read_between_readings() -> None:
    process = Process(1, "worker", [(10.0, 1.0), (12.0, 3.0), (14.0, 3.0)])
    assert process.seconds(11.0, 14.0) == 1.0
    assert process.seconds(9.0, 20.0) == 3.0


def test_samples_of_threads_become_shares() -> None:
    raw = "thread (0x1): engine;run (a.py:1);step (a.py:2) 60\nthread (0x1): engine;run (a.py:1) 20\nthread (0x2): writer-0;put (b.py:3) 5\n"
    found = process_profile.summary(raw, 100)
    assert found["engine"] == {"share": 0.8, "functions": {"step (a.py:2)": 0.6, "run (a.py:1)": 0.2}}
    assert found["writer-0"]["share"] == 0.05


@pytest.mark.parametrize(("rows", "measured"), [(128, 5.55), (256, 7.06), (384, 8.94), (512, 10.47)])
def test_a_predicted_frame_is_what_was_measured_of_qwen3_tts(rows: int, measured: float) -> None:
    assert roofline.frame_ms(roofline.qwen3_frame("0b6"), rows, 300, H200) == pytest.approx(
        measured, rel=0.04
    )


def test_a_prediction_adds_up() -> None:
    found = roofline.predicted(roofline.SPARK, 512, H200)
    assert found["step"] == pytest.approx(1.1 * (found["frame"] + found["prefill"] + found["codec"]))
    assert found["audio_s_per_s"] == pytest.approx(1000 * 512 / 50 / found["step"])
    kept, whole = (
        roofline.predicted(load, 256, H200) for load in (roofline.FISH, roofline.FISH_NOTHING_KEPT)
    )
    assert kept["prefill"] < whole["prefill"]
