"""The conformance command on the golden folder, and that it notices what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.conformance.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_tts"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_case_passes(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["qwen3_tts", str(GOLDEN), "--dtype", dtype])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    assert printed.splitlines()[-1].endswith("passed, 0 failed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "golden")


def run(folder: Path, only: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["qwen3_tts", str(folder), "--only", only])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    ["talker.model.layers.0.self_attn.q_norm.weight", "talker.code_predictor.lm_head.7.weight", "talker.model.norm.weight"],
)
def test_one_changed_weight_is_noticed(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "checkpoint-base" / "model.safetensors"
    weights = load_file(path)
    weights[name] = weights[name] * 1.01
    save_file(weights, path)
    code, printed = run(folder, "teacher-forced clone", capsys)
    assert code == 1
    assert "FAIL teacher-forced clone_icl_streaming_text_longer.0: " in printed
    assert printed.endswith("0 passed, 1 failed\n")


def test_one_changed_code_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "arrays_base.npz"
    arrays = dict(np.load(path))
    arrays["clone_xvector_streaming.0.codes"][4, 9] ^= 1
    np.savez(path, **arrays)
    code, printed = run(folder, "codes clone_xvector_streaming", capsys)
    assert code == 1
    assert "codes differ from frame 4 on" in printed


def test_a_broken_case_fails_and_the_others_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    cases["tokenizer"][0]["checkpoint"] = "nowhere"
    (folder / "cases.json").write_text(json.dumps(cases))
    code, printed = run(folder, "tokenizer", capsys)
    assert code == 1
    assert printed.splitlines()[0].startswith("FAIL tokenizer nowhere 0: ModelError")
    assert printed.endswith(f"{len(cases['tokenizer']) - 1} passed, 1 failed\n")


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    assert main(["qwen3_tts", str(tmp_path)]) == 2
