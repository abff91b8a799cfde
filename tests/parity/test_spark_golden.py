"""The conformance command on the golden folder of SparkTTS, on both engines where vLLM is installed, and
that it notices what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.parity.golden_folder import change, check_listed, passed, scale, unpacked
from tests.support.vllm_kit import GOLDEN, require_vllm

CASES = 31
#: Greedy cases: on each engine alone and as a stream, and together, staggered, penalized, drawn and as
#: speech; on vLLM the sampler's chances too, on our own engine the numbers of each step and the sampler's
#: draws.
GREEDY = 8
NATIVE, VLLM = 3 * GREEDY + 6, 2 * GREEDY + 6


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.fixture
def folder(tmp_path: Path, without_vllm: None) -> Path:
    return unpacked(GOLDEN, tmp_path / "golden")


def conforms(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints, once every case has passed."""
    code = main(["spark", str(GOLDEN), *arguments])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    return printed


@pytest.mark.usefixtures("without_vllm")
def test_every_case_passes_on_our_engine_which_needs_no_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    printed = conforms(capsys)
    found = passed(printed)
    assert found == check_listed(GOLDEN, CASES) + found.__class__({"native": NATIVE})
    assert "left out: the cases on vLLM" in printed
    assert "not compared" not in printed


def test_every_case_passes_on_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    require_vllm(whole_module=False)
    printed = conforms(capsys, "--only", "vllm ")
    assert passed(printed) == {"vllm": VLLM}
    assert "left out" not in printed


@pytest.mark.parametrize(
    ("file", "name", "case"),
    [
        ("LLM", "model.layers.1.self_attn.k_proj.weight", "greedy clone_no_text_quiet"),
        ("LLM", "model.layers.0.self_attn.q_proj.bias", "native alone clone_no_text_quiet"),
        ("BiCodec", "prenet.vocos_backbone.convnext.2.norm.scale.bias", "detokenize_len30"),
        ("BiCodec", "decoder.model.3.block.4.block.2.alpha", "detokenize_len50"),
        ("BiCodec", "encoder.encoder.convnext.1.gamma", "tokens_ref_a"),
        ("BiCodec", "speaker_encoder.speaker_encoder.layer3.se_res2block.1.convs.4.weight", "tokens_ref_a"),
        ("BiCodec", "speaker_encoder.perceiver_sampler.layers.1.1.2.weight", "tokens_ref_a"),
        ("BiCodec", "speaker_encoder.quantizer.project_in.bias", "tokens_ref_long"),
    ],
)
def test_one_changed_weight_is_noticed(
    folder: Path, file: str, name: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scale(folder / "checkpoint" / file / "model.safetensors", name, 1.02)
    assert main(["spark", str(folder), "--only", case]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_one_changed_id_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "arrays" / "clone_no_text.npz", "output_ids", 3)
    assert main(["spark", str(folder), "--only", "greedy clone_no_text"]) == 1
    assert " at 3, expected " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "case"),
    [
        ("wav", "greedy clone_no_text"),
        ("perceiver_out", "tokens_ref_a"),
        ("resampled", "prep_ref_stereo_44k"),
    ],
)
def test_an_array_that_is_absent_fails(
    folder: Path, key: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "arrays" / f"{case.split()[-1]}.npz", key)
    assert main(["spark", str(folder), "--only", case]) == 1
    assert f"the array {key} is absent" in capsys.readouterr().out


def test_a_file_that_is_absent_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "wavs" / "ref_long.wav").unlink()
    assert main(["spark", str(folder), "--only", "tokens_ref_long"]) == 1
    assert "ref_long.wav" in capsys.readouterr().out
