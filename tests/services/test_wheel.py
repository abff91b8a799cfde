"""The wheel, installed away from the checkout, is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.golden_checkpoint import whole
from tests.support.wheel_kit import ROOT, built_wheel, copy_sources, names_in, shipped

CHECKPOINT = ROOT / "tests/golden/qwen3_tts/checkpoint-design"
LINE = '{"example_id": "a", "messages": [["user", "text", "Good evening."]]}\n'


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a compiler of kernels."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "nvidia").mkdir()
    (folder / "nvidia/__init__.py").touch()  # hides the packages of NVIDIA
    return built_wheel(
        source, folder / "out", PATH="/usr/bin:/bin", CUDA_HOME=str(folder), PYTHONPATH=str(folder)
    )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel."""
    target = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        target,
        wheel,
    ]
    subprocess.run(command, check=True, timeout=900)
    return target


def call(installed: Path, folder: Path, *arguments: str) -> str:
    """Runs Python in `folder` with the installed wheel before everything else; the checkout is not on its
    path."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
    environment = clean | {
        "PYTHONPATH": str(installed),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_our_packages_is_in_the_wheel(wheel: Path) -> None:
    names = names_in(wheel)
    assert sorted(names) == shipped()
    assert {
        "kernels/cuda/sampler.cu",
        "kernels/cuda/common.cuh",
        "jobs/report/report.html",
        "migrations/script.py.mako",
    } <= set(names)


def test_the_source_distribution_can_build_the_same(source: Path, tmp_path: Path) -> None:
    build = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=source, check=True, timeout=900, capture_output=True
    )
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert {*shipped(), "setup.py", "pyproject.toml"} <= names


def test_a_job_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(LINE)
    call(installed, tmp_path, "-m", "jobs", "run", "in.jsonl", "--out", "out", "--json")
    assert len(list((tmp_path / "out").rglob("*.wav"))) == 1
    (page,) = (tmp_path / "out/reports").glob("*.html")
    assert "<style>" in page.read_text()


def test_a_qwen3_tts_job_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    line = {
        "example_id": "a",
        "messages": [["system", "text", "A calm voice."], ["user", "text", "This is a line."]],
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    said = call(
        installed,
        tmp_path,
        "-m",
        "jobs",
        "run",
        "in.jsonl",
        "--model",
        str(whole(CHECKPOINT)),
        "--seed",
        "7",
        "--out",
        "out",
        "--json",
    )
    assert json.loads(said.splitlines()[-1])["items"]["done"] == 1
    assert len(list((tmp_path / "out").rglob("*.wav"))) == 1


_ASK = """
import importlib.metadata, json
import jobs, kernels.binaries, transformers.utils
theirs = [entry.metadata["Name"] for entry in importlib.metadata.distributions(name="kernels")]
sources = sorted(path.name for path in kernels.binaries.SOURCES.glob("*.cu*") if path.suffix != ".cubin")
print(json.dumps([jobs.__file__, sources, kernels.binaries.shipped(), theirs, transformers.utils.is_kernels_available()]))
"""


def test_kernels_find_their_sources_and_are_taken_for_nobody_elses(installed: Path, tmp_path: Path) -> None:
    where, sources, prebuilt, distributions, believed = json.loads(call(installed, tmp_path, "-c", _ASK))
    assert Path(where).is_relative_to(installed)
    assert sources == sorted(
        file.name
        for file in (Path(__file__).parents[2] / "kernels/cuda").iterdir()
        if file.suffix in (".cu", ".cuh")
    )
    assert not prebuilt
    assert distributions == []
    assert believed is False, "transformers takes our package for Hugging Face's kernels"
