"""The conformance command on the golden folder of Fish Speech S2, on vLLM where it is installed, and that it notices what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conformance.__main__ import main
from tests.fish_checkpoint import GOLDEN
from tests.vllm_v2 import require_v2

#: Cases that need no vLLM, by kind.
COUNTS = {"tokenize": 1, "resample": 1, "codec_encode": 3, "codec_decode": 3, "greedy": 9, "batch": 1, "end_to_end": 2}
COUNTS |= {"sampling_distribution": 1, "draw": 2, "ras_unit": 1, "stochastic_replay": 1}


def test_every_case_passes(capsys: pytest.CaptureFixture[str]) -> None:
    require_v2(whole_module=False)
    code = main(["fish", str(GOLDEN)])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    for name in ("vllm together", "speech together", "stream multi_speaker_turns"):
        assert f"ok   {name}" in printed
    for kind, cases in COUNTS.items():
        assert printed.count(f"ok   {kind} ") >= cases, kind
    assert "left out" not in printed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.conformance.fish.find_spec", lambda name: None)
    return shutil.copytree(GOLDEN, tmp_path / "golden", copy_function=shutil.copyfile)


def shards(folder: Path, name: str) -> None:
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        if name in weights:
            weights[name] = weights[name] * 1.1
            save_file(weights, path)


def codec(folder: Path, name: str) -> None:
    path = folder / "codec.pth"
    weights = torch.load(path, weights_only=True)
    weights[name] = weights[name] * 1.05
    torch.save(weights, path)


@pytest.mark.parametrize(
    ("change", "name", "case"),
    [
        (shards, "text_model.model.layers.1.attention.k_norm.weight", "greedy text_plain_cut"),
        (shards, "audio_decoder.layers.0.feed_forward.w2.weight", "greedy text_plain_cut"),
        (codec, "decoder.model.3.block.4.block.2.alpha", "decode_len7"),
        (codec, "quantizer.post_module.layers.1.ffn_layer_scale.gamma", "decode_len7"),
        (codec, "quantizer.pre_module.layers.0.attention.wo.weight", "encode_ref_b"),
    ],
)
def test_one_changed_weight_is_noticed(
    folder: Path, change: Callable[[Path, str], None], name: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "checkpoint", name)
    assert main(["fish", str(folder), "--only", case]) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(("key", "case"), [("columns_0", "greedy text_num"), ("prompt_0", "greedy text_num"), ("token", "ras_unit")])
def test_one_changed_number_is_noticed(folder: Path, key: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "arrays" / f"{case.split()[-1]}.npz"
    arrays = dict(np.load(path))
    arrays[key].reshape(-1)[3] += 1
    np.savez(path, **arrays)
    assert main(["fish", str(folder), "--only", case]) == 1
    assert "expected" in capsys.readouterr().out


def test_without_vllm_the_rest_passes_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fish", str(folder), "--only", "draw"]) == 0
    assert "left out: the cases on vLLM" in capsys.readouterr().out
