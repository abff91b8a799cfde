"""The conformance command on the golden folder of SparkTTS, on vLLM where it is installed, and that it notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.parity.golden_folder import change, check_listed, passed, scale, unpacked
from tests.support.vllm_kit import GOLDEN, require_vllm

CASES = 31
#: Greedy cases: each alone on vLLM, and as a stream.
GREEDY = 8


def test_every_case_passes(capsys: pytest.CaptureFixture[str]) -> None:
    require_vllm(whole_module=False)
    code = main(["spark", str(GOLDEN)])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    found = passed(printed)
    assert found == check_listed(GOLDEN, CASES) + found.__class__({"vllm": GREEDY + 2, "speech": 1, "stream": GREEDY})
    assert "left out" not in printed
    assert "not compared" not in printed


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conformance.spark.find_spec", lambda name: None)


@pytest.fixture
def folder(tmp_path: Path, without_vllm: None) -> Path:
    return unpacked(GOLDEN, tmp_path / "golden")


@pytest.mark.usefixtures("without_vllm")
def test_without_vllm_the_rest_passes_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spark", str(GOLDEN), "--only", "clone_no_text_quiet"]) == 0
    printed = capsys.readouterr().out
    assert passed(printed) == {"greedy": 1}
    assert "left out: the cases on vLLM" in printed


def test_vllm_draws_from_the_golden_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    require_vllm(whole_module=False)
    assert main(["spark", str(GOLDEN), "--only", "sampling_distribution"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "name", "case"),
    [
        ("LLM", "model.layers.1.self_attn.k_proj.weight", "greedy clone_no_text_quiet"),
        ("BiCodec", "prenet.vocos_backbone.convnext.2.norm.scale.bias", "detokenize_len30"),
        ("BiCodec", "decoder.model.3.block.4.block.2.alpha", "detokenize_len50"),
        ("BiCodec", "encoder.encoder.convnext.1.gamma", "tokens_ref_a"),
        ("BiCodec", "speaker_encoder.speaker_encoder.layer3.se_res2block.1.convs.4.weight", "tokens_ref_a"),
        ("BiCodec", "speaker_encoder.perceiver_sampler.layers.1.1.2.weight", "tokens_ref_a"),
        ("BiCodec", "speaker_encoder.quantizer.project_in.bias", "tokens_ref_long"),
    ],
)
def test_one_changed_weight_is_noticed(folder: Path, file: str, name: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    scale(folder / "checkpoint" / file / "model.safetensors", name, 1.02)
    assert main(["spark", str(folder), "--only", case]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_one_changed_id_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "arrays" / "clone_no_text.npz", "output_ids", 3)
    assert main(["spark", str(folder), "--only", "greedy clone_no_text"]) == 1
    assert " at 3, expected " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "case"), [("wav", "greedy clone_no_text"), ("perceiver_out", "tokens_ref_a"), ("resampled", "prep_ref_stereo_44k")]
)
def test_an_array_that_is_absent_fails(folder: Path, key: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "arrays" / f"{case.split()[-1]}.npz", key)
    assert main(["spark", str(folder), "--only", case]) == 1
    assert f"the array {key} is absent" in capsys.readouterr().out


def test_a_file_that_is_absent_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "wavs" / "ref_long.wav").unlink()
    assert main(["spark", str(folder), "--only", "tokens_ref_long"]) == 1
    assert "ref_long.wav" in capsys.readouterr().out
