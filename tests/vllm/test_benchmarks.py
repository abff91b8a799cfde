"""Benchmarks of models on vLLM, measured on a CPU from small checkpoints: what is measured of each engine,
not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.vllm_kit import require_vllm, wide_checkpoint

require_vllm()

from benchmarks import spark_tts, speechlm  # noqa: E402
from pipelines.errors import ErrorCode, SynthesisError  # noqa: E402
from pipelines.vllm_engine.host import EngineMoment  # noqa: E402


def test_spark_on_both_engines_in_one_run(tmp_path: Path) -> None:
    path = tmp_path / "spark.json"
    asked = [
        "--device",
        "cpu",
        "--checkpoint",
        str(wide_checkpoint()),
        "--part",
        "frame,speech,streams",
        "--requests",
        "2",
    ]
    asked += ["--streams", "1", "--seconds", "0.1", "--turns", "2", "--json", str(path)]
    assert spark_tts.main(asked) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["faults"] == {}
    speech = [row for row in found["rows"] if row["part"] == "speech, end to end"]
    assert [row["engine"] for row in speech] == ["native", "vllm"]
    assert [row.get("frames_per_turn") for row in speech] == [2, None]
    for row in speech:
        assert row["slots"] == 2
        assert row["audio_s_per_s"] > 0
    assert [row["engine"] for row in found["rows"] if row["part"] == "first chunk"] == ["native"]
    assert {row["slots"] for row in found["rows"] if row["part"] == "frame alone"} == {1, 2}


def test_speechlm_waits_for_nothing_that_the_engine_did_not_take(tmp_path: Path) -> None:
    class GivenUp:
        _moment = EngineMoment()

        def submit(self, *_: object) -> None:
            raise SynthesisError(ErrorCode.SYNTH_ENGINE, "vLLM is given up.")

    for text in (0, 2):
        row = speechlm.run(
            speechlm.Load("pairs", 3, 5, text, 2, 3.0),
            speechlm.write_shape(tmp_path, published=False),
            GivenUp(),
        )  # type: ignore[arg-type]
        assert len(row["failures"]) == 3
