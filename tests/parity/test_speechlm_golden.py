"""The conformance command on the golden folder of SpeechLM, and that it notices what is wrong."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conformance.__main__ import main
from tests.conformance.speechlm import Golden
from tests.parity.golden_folder import change, check_listed, passed, scale
from tests.support.speechlm_checkpoint import GOLDEN

CASES = 62
#: Cases that give audio.
HEARD = 21


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases on vLLM run in tests/vllm/test_speechlm_pairs.py, on an engine that has little of
    everything."""
    monkeypatch.setitem(sys.modules, "vllm", None)


def test_every_case_passes_and_looks_at_every_array(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Golden] = []
    monkeypatch.setattr(
        "tests.conformance.speechlm.Golden", lambda *arguments: opened.append(Golden(*arguments)) or opened[0]
    )
    code = main(["speechlm", str(GOLDEN)])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    listed = check_listed(GOLDEN, CASES)
    requests = listed["text_audio"] + listed["text_only"]
    checks = {
        "prompt": requests,
        "loop": requests,
        "features": 7,
        "codec": HEARD + 2,
        "forced": 2,
        "sampling": 3,
        "delay": 13,
    }
    assert passed(printed) == {**checks, "feature": 1, "embeddings": 1}
    assert sorted(opened[0].arrays.keys() - opened[0].arrays.seen) == []


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
def test_one_changed_weight_is_noticed(
    folder: Path, name: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scale(
        next(path for path in (folder / "checkpoint").glob("*.safetensors") if name in load_file(path)),
        name,
        1.5,
    )
    assert main(["speechlm", str(folder), "--only", case]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_one_changed_row_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder / "arrays.npz", "short/rows", 11)
    assert main(["speechlm", str(folder), "--only", "loop short"]) == 1
    assert "rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("array", "case"),
    [
        ("a1/waveform", "codec a1"),
        ("u_d/mel", "features u_d"),
        ("u_c_norm/tower", "features u_c_norm"),
        ("a2_cfg30/null_logits", "loop a2_cfg30"),
        ("t_eot/text_logits", "loop t_eot"),
        ("tf1/merged", "forced tf1"),
    ],
)
def test_an_array_that_is_absent_fails(
    folder: Path, array: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "arrays.npz", array)
    assert main(["speechlm", str(folder), "--only", case]) == 1
    assert f"the array {array} is absent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("array", "case"),
    [("a1/waveform", "codec a1"), ("u_d/mel", "features u_d"), ("long/text_logits", "loop long")],
)
def test_one_changed_number_is_noticed(
    folder: Path, array: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "arrays.npz", array, 40)
    assert main(["speechlm", str(folder), "--only", case]) == 1
    assert "largest difference" in capsys.readouterr().out
