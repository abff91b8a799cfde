"""The conformance command on other folders of the same layout: what they may differ in, and what is wrong
with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conformance.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_tts"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "other golden é")


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "cases.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def case_of(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(case for case in content["cases"] if case["name"] == name)


def run(folder: Path, only: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = main(["qwen3_tts", str(folder), "--only", only])
    return code, capsys.readouterr().out.splitlines()


def test_stored_rope_buffers_and_shards_change_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = folder / "checkpoint-base"
    weights = load_file(checkpoint / "model.safetensors")
    weights["talker.model.rotary_emb.inv_freq"] = torch.ones(4)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "generation_config.json").unlink()
    table = {}
    for shard in range(3):
        part = {name: weights[name].double() for name in sorted(weights)[shard::3]}
        save_file(part, checkpoint / f"model-{shard}.safetensors")
        table.update(dict.fromkeys(part, f"model-{shard}.safetensors"))
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    assert run(folder, "codes clone_xvector_streaming.0", capsys)[0] == 0


def test_a_text_of_a_reference_whose_voice_alone_is_taken_is_dropped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(
        folder,
        lambda content: case_of(content, "clone_xvector_streaming")["rows"][0].update(
            ref_text="Good morning."
        ),
    )
    assert run(folder, "speech clone_xvector_streaming", capsys)[0] == 0


def test_a_reference_cut_one_sample_early_is_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "arrays_base.npz"
    arrays = dict(np.load(path))
    for name in ("clone_icl_nonstreaming.0.wave", "clone_xvector_streaming.0.wave"):
        arrays[name] = np.insert(arrays[name], 0, 0.0)
    np.savez(path, **arrays)
    assert run(folder, "speech clone_icl_nonstreaming", capsys)[0] == 0
    assert run(folder, "speech clone_xvector_streaming", capsys)[0] == 1


def test_any_key_of_the_config_may_be_overridden(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "checkpoint-custom" / "config.json").read_text())
    talker = config["talker_config"]
    talker["spk_id"]["ryan"], talker["spk_id"]["vivian"] = (
        talker["spk_id"]["vivian"],
        talker["spk_id"]["ryan"],
    )

    def change(content: dict[str, Any]) -> None:
        case = case_of(content, "custom_nonstreaming")
        case["config_override"] = {"talker_config": talker}
        case["rows"][0]["speaker"] = "Vivian"

    edit(folder, change)
    code, printed = run(folder, "custom_nonstreaming", capsys)
    assert code == 0, printed


def test_what_cannot_be_listed_fails_and_the_rest_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(content: dict[str, Any]) -> None:
        content["codec"]["items"] = [{"kind": "sing"}, *content["codec"]["items"][:1]]
        content["cases"] = content["cases"][:2]
        del content["cases"][0]["rows"]
        del content["tokenizer"]

    edit(folder, change)
    code, printed = run(folder, "", capsys)
    failed = [line for line in printed if line.startswith("FAIL")]
    assert code == 1
    assert any("list of codec item 0" in line and "KeyError: 'sing'" in line for line in failed)
    assert any("list of cases 0" in line for line in failed)
    assert any(line.startswith("ok   codes custom_streaming.0 alone") for line in printed)
    assert any(line.startswith("ok   codec decode.base.1") for line in printed)
    assert printed[-1].endswith(f"passed, {len(failed)} failed")


def test_cases_that_are_no_json_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "cases.json").write_text("{")
    assert main(["qwen3_tts", str(folder)]) == 2
    assert "cases.json" in capsys.readouterr().err
