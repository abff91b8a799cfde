"""The conformance command on the golden folder of SparkTTS, on vLLM where it is installed, and that it notices what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.conformance.__main__ import main
from tests.vllm_kit import GOLDEN, require_vllm


def test_every_case_passes(capsys: pytest.CaptureFixture[str]) -> None:
    require_vllm(whole_module=False)
    code = main(["spark", str(GOLDEN)])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    assert "vllm together" in printed
    assert "left out: the cases on vLLM" not in printed


@pytest.mark.parametrize(
    ("kind", "cases"),
    [("token", 7), ("prompt", 5), ("greedy", 6), ("detokenize", 4), ("audio_prep", 3), ("sampling", 1), ("batch_clone", 1), ("parse", 1)],
)
def test_what_needs_no_vllm_passes_without_it(
    kind: str, cases: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conformance.spark.find_spec", lambda name: None)
    assert main(["spark", str(GOLDEN), "--only", kind]) == 0
    assert int(capsys.readouterr().out.splitlines()[-1].split()[0]) >= cases


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.conformance.spark.find_spec", lambda name: None)
    return shutil.copytree(GOLDEN, tmp_path / "golden", copy_function=shutil.copyfile)


@pytest.mark.parametrize(
    ("file", "name", "case"),
    [
        ("LLM", "model.layers.1.self_attn.k_proj.weight", "greedy clone_no_text_quiet"),
        ("BiCodec", "prenet.vocos_backbone.convnext.2.norm.scale.bias", "detokenize_len30"),
        ("BiCodec", "decoder.model.3.block.4.block.2.alpha", "detokenize_len50"),
        ("BiCodec", "encoder.encoder.convnext.1.gamma", "tokens_ref_a"),
    ],
)
def test_one_changed_weight_is_noticed(folder: Path, file: str, name: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "checkpoint" / file / "model.safetensors"
    weights = load_file(path)
    weights[name] = weights[name] * 1.02
    save_file(weights, path)
    assert main(["spark", str(folder), "--only", case]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_one_changed_id_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "arrays" / "clone_no_text.npz"
    arrays = dict(np.load(path))
    arrays["output_ids"][3] += 1
    np.savez(path, **arrays)
    assert main(["spark", str(folder), "--only", "greedy clone_no_text"]) == 1
    assert " at 3, expected " in capsys.readouterr().out
