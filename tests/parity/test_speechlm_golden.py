"""The conformance command on the golden folder of SpeechLM, and that it notices what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.conformance.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden" / "speechlm"


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases on vLLM run in tests/integration/test_vllm_speechlm_pairs.py, on an engine that has little of everything."""
    monkeypatch.setattr("tests.conformance.speechlm.find_spec", lambda name: None)


def test_every_case_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["speechlm", str(GOLDEN)])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    assert int(printed.splitlines()[-1].split()[0]) >= 129


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "golden", copy_function=shutil.copyfile)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("model.layers.1.self_attn.k_norm.weight", "loop a1_cfg15"),
        ("stream_emb.weight", "forced tf0"),
        ("multimodal_io_dict.continuous_audio.model.audio_tower.proj1.bias", "features u_b"),
        ("adaptor.continuous_audio.bias", "features u_c"),
        ("multimodal_io_dict.discrete_audio.codec_model.acoustic_decoder.block.2.snake1.alpha", "codec a0"),
    ],
)
def test_one_changed_weight_is_noticed(folder: Path, name: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in (folder / "checkpoint").glob("*.safetensors") if name in load_file(path))
    weights = load_file(path)
    weights[name] = weights[name] * 1.5
    save_file(weights, path)
    assert main(["speechlm", str(folder), "--only", case]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_one_changed_row_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = dict(np.load(folder / "arrays.npz"))
    arrays["short/rows"][1, 3] += 1
    np.savez_compressed(folder / "arrays.npz", **arrays)
    assert main(["speechlm", str(folder), "--only", "loop short"]) == 1
    assert "rows" in capsys.readouterr().out
