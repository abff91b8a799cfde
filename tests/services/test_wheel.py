"""The wheel, built from a copy of the tracked files and installed away from the checkout, is whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("jobs", "worker", "pipelines", "kernels", "migrations")
LINE = '{"example_id": "a", "messages": [["user", "text", "Good evening."]]}\n'


def shipped() -> list[str]:
    """The files of our packages, as the wheel names them: all that is no cache."""
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix != ".pyc")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        out,
        source,
    ]
    subprocess.run(command, check=True, timeout=240)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(command, check=True, timeout=240)
    return target


def call(installed: Path, folder: Path, *arguments: str) -> str:
    """Runs Python in `folder` with the installed wheel before everything else; the checkout is not on its path."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
    environment = clean | {"PYTHONPATH": str(installed), "XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_our_packages_is_in_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == shipped()
    assert {"kernels/cuda/sampler.cu", "kernels/cuda/common.cuh", "jobs/report/report.html", "migrations/script.py.mako"} <= set(names)


def test_a_job_runs_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(LINE)
    call(installed, tmp_path, "-m", "jobs", "run", "in.jsonl", "--out", "out", "--json")
    assert len(list((tmp_path / "out").rglob("*.wav"))) == 1
    (page,) = (tmp_path / "out/reports").glob("*.html")
    assert "<style>" in page.read_text()


_ASK = """
import importlib.metadata, json
import jobs, kernels.lm_cuda, transformers.utils
theirs = [entry.metadata["Name"] for entry in importlib.metadata.distributions(name="kernels")]
sources = sorted(path.name for path in kernels.lm_cuda.SOURCES.iterdir())
print(json.dumps([jobs.__file__, sources, theirs, transformers.utils.is_kernels_available()]))
"""


def test_kernels_find_their_sources_and_are_taken_for_nobody_elses(installed: Path, tmp_path: Path) -> None:
    where, sources, distributions, believed = json.loads(call(installed, tmp_path, "-c", _ASK))
    assert Path(where).is_relative_to(installed)
    assert sources == ["common.cuh", "predictor_attention.cu", "sampler.cu", "skinny.cu"]
    assert distributions == []
    assert believed is False, "transformers takes our package for Hugging Face's kernels"
