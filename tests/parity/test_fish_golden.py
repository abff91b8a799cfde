"""The conformance command on the golden folder of Fish Speech S2, on both engines where vLLM is installed,
and what it notices."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conformance.__main__ import main
from tests.parity.golden_folder import change as change_array
from tests.parity.golden_folder import check_listed, passed, scale
from tests.support.fish_checkpoint import GOLDEN
from tests.support.vllm_v2 import require_v2

CASES = 30
#: On each engine: sequences alone (on vLLM a few), together, staggered, as speech and as streams; on our own
#: engine the numbers of each step, draws, the window's cases, and two sequences with recorded noise.
ON_ENGINES = {"native": 8 + 3 + 3 + 1 + 3 + 1 + 2, "vllm": 3 + 3 + 3}


def test_every_case_passes(capsys: pytest.CaptureFixture[str]) -> None:
    require_v2(whole_module=False)
    code = main(["fish", str(GOLDEN)])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    found = passed(printed)
    assert found == check_listed(GOLDEN, CASES) + found.__class__(ON_ENGINES)
    assert "left out" not in printed
    assert "not compared" not in printed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "vllm", None)
    return shutil.copytree(GOLDEN, tmp_path / "golden", copy_function=shutil.copyfile)


def shards(folder: Path, name: str) -> None:
    scale(next(path for path in folder.glob("*.safetensors") if name in load_file(path)), name, 1.1)


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
        (shards, "audio_decoder.layers.1.attention.wqkv.weight", "native alone text_plain_cut"),
        (codec, "decoder.model.3.block.4.block.2.alpha", "decode_len7"),
        (codec, "quantizer.post_module.layers.1.ffn_layer_scale.gamma", "decode_len7"),
        (codec, "quantizer.pre_module.layers.0.attention.wo.weight", "encode_ref_b"),
    ],
)
def test_one_changed_weight_is_noticed(
    folder: Path,
    change: Callable[[Path, str], None],
    name: str,
    case: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(folder / "checkpoint", name)
    assert main(["fish", str(folder), "--only", case]) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["native stochastic_replay", "native sampling_distribution"])
def test_draws_of_our_own_engine(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fish", str(folder), "--only", case]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "case"),
    [("columns_0", "greedy text_num"), ("prompt_0", "greedy text_num"), ("token", "ras_unit")],
)
def test_one_changed_number_is_noticed(
    folder: Path, key: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_array(folder / "arrays" / f"{case.split()[-1]}.npz", key, 3)
    assert main(["fish", str(folder), "--only", case]) == 1
    assert "expected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "case"),
    [
        ("wav", "end_to_end_text"),
        ("wav", "decode_len50"),
        ("hidden", "greedy clone_one_ref"),
        ("uniform_fast", "stochastic_replay"),
    ],
)
def test_an_array_that_is_absent_fails(
    folder: Path, key: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change_array(folder / "arrays" / f"{case.split()[-1]}.npz", key)
    assert main(["fish", str(folder), "--only", case]) == 1
    assert f"the array {key} is absent" in capsys.readouterr().out


def test_a_file_that_is_absent_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "arrays" / "codes_len50.npz").unlink()
    assert main(["fish", str(folder), "--only", "decode_len50"]) == 1
    assert "codes_len50" in capsys.readouterr().out


def test_the_audio_of_a_case_is_the_golden_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_array(folder / "arrays" / "end_to_end_clone.npz", "wav", 3_000)
    assert main(["fish", str(folder), "--only", "end_to_end_clone"]) == 1
    assert "wav: largest difference" in capsys.readouterr().out


def test_without_vllm_the_rest_passes_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fish", str(folder), "--only", "end_to_end_text"]) == 0
    printed = capsys.readouterr().out
    assert passed(printed) == {"end_to_end": 1, "native": 1}
    assert "left out: the cases on vLLM" in printed
