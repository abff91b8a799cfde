"""The conformance command on the golden folder, and that it notices what is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.conformance.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_tts"


THETAS = GOLDEN / "thetas"


def promised(column: int) -> dict[str, int]:
    """How many checks of each kind the README names; a kind is the pattern of its names."""
    rows = re.findall(
        r"^\| `([^`]+)` \| (\d+) \| (\d+) \| (\d+) \|$",
        (GOLDEN / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 20
    return {row[0]: int(row[1 + column]) for row in rows}


@pytest.mark.parametrize(
    ("path", "dtype", "column"),
    [(GOLDEN, "float32", 0), (GOLDEN, "bfloat16", 1), (THETAS, "float32", 2)],
    ids=["float32", "bfloat16", "thetas"],
)
def test_every_case_passes(path: Path, dtype: str, column: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["qwen3_tts", str(path), "--dtype", dtype])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if line.startswith("FAIL"))
    names = re.findall(r"^ok   (.+) \([\d.]+ s\)$", printed, re.MULTILINE)
    wanted = promised(column)
    found = Counter(next((kind for kind in wanted if fnmatchcase(name, kind)), name) for name in names)
    assert dict(found) == {kind: count for kind, count in wanted.items() if count}
    assert len(set(names)) == len(names)
    totals = re.search(
        r"^\| all \| (\d+) \| (\d+) \| (\d+) \|$",
        (GOLDEN / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert totals is not None
    assert len(names) == int(totals[1 + column])


@pytest.mark.parametrize(("path", "title"), [(GOLDEN, "qwen3_tts"), (THETAS, "thetas")])
def test_the_readme_lists_every_case(path: Path, title: str) -> None:
    listed = re.search(
        rf"^Cases of `{title}`: ([^.]+)\.$", (GOLDEN / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert listed is not None
    content = json.loads((path / "cases.json").read_text(encoding="utf-8"))
    assert re.findall(r"`(\w+)`", listed[1]) == [case["name"] for case in content["cases"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN, tmp_path / "golden")


def run(folder: Path, only: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["qwen3_tts", str(folder), "--only", only])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "talker.model.layers.0.self_attn.q_norm.weight",
        "talker.code_predictor.lm_head.7.weight",
        "talker.model.norm.weight",
    ],
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


@pytest.mark.parametrize(
    ("file", "array", "only", "dtype"),
    [
        (
            "arrays_design.npz",
            "teacher_forced.design_streaming_auto.bf16.logits_codebook0",
            "bfloat16",
            "bfloat16",
        ),
        (
            "arrays_design.npz",
            "teacher_forced.design_streaming_auto.hidden",
            "teacher-forced design",
            "float32",
        ),
        ("arrays_codec.npz", "audio24k.ref_c", "codec encode.base.ref_c", "float32"),
        ("arrays_codec.npz", "mel.ref_a", "mel ref_a", "float32"),
        ("arrays_codec.npz", "decode_batch.base.23.wave", "codec decode_batch", "float32"),
        ("arrays_custom.npz", "sampling.other.residual_probs", "residual distributions other", "float32"),
    ],
)
def test_a_check_whose_array_is_absent_fails(
    folder: Path, file: str, array: str, only: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = dict(np.load(folder / file))
    gone = [key for key in arrays if key.partition("~")[0] == array]
    assert len(gone) == 1
    del arrays[gone[0]]
    np.savez(folder / file, **arrays)
    code = main(["qwen3_tts", str(folder), "--only", only, "--dtype", dtype])
    printed = capsys.readouterr().out
    assert code == 1
    assert f"KeyError: '{array}'" in printed
    assert printed.endswith("0 passed, 1 failed\n")


@pytest.mark.parametrize(
    ("talker", "predictor"),
    [(300, 20_000), (1_000_000, 1_000_000), (20_000, 20_000), (300, 300)],
    ids=["swapped", "both 1e6", "both the talker's", "both the predictor's"],
)
def test_another_rope_theta_is_noticed(
    talker: int, predictor: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(THETAS, tmp_path / "golden")
    path = folder / "checkpoint-thetas" / "config.json"
    config = json.loads(path.read_text())
    config["talker_config"]["rope_theta"], config["talker_config"]["code_predictor_config"]["rope_theta"] = (
        talker,
        predictor,
    )
    path.write_text(json.dumps(config))
    code, printed = run(folder, "teacher-forced", capsys)
    assert code == 1
    assert printed.endswith("0 passed, 2 failed\n")


def test_other_lengths_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end one draw later moves the counts by one place."""
    folder = shutil.copytree(THETAS, tmp_path / "golden")
    path = folder / "cases.json"
    content = json.loads(path.read_text())
    for entry in content["lengths"]:
        counts = entry["counts"]
        entry["counts"] = [0, *counts[:-2], counts[-2] + counts[-1]]
    path.write_text(json.dumps(content))
    code, printed = run(folder, "lengths default", capsys)
    assert code == 1
    assert printed.endswith("0 passed, 1 failed\n")


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
