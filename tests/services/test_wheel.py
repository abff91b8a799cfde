"""The wheel, built from a copy of the tracked files and installed away from the checkout, is whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kernels import binaries, lm_cuda, toolchain
from kernels.cuda_driver import Source
from tests.support.golden_checkpoint import whole

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests/golden/qwen3_tts/checkpoint-design"
CODE = (".cubin", ".ptx")
ROOMS = ("nightjar", "jobs", "worker", "pipelines", "kernels", "migrations")
LINE = '{"example_id": "a", "messages": [["user", "text", "Good evening."]]}\n'


def shipped() -> list[str]:
    """The files of our packages, as the wheel names them: all that is no cache."""
    found = [
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix not in (".pyc", *CODE))


def code_of_kernels() -> set[str]:
    """The machine code that a wheel brings, as it names it."""
    return {f"kernels/cuda/{binaries.file_name(name, target)}" for name, target in binaries.shipped_code()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a distribution is built from."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for room in ROOMS:
        shutil.copytree(
            ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "*.cubin", "*.ptx")
        )
    return folder


def built_wheel(source: Path, out: Path, **environment: str) -> Path:
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
    subprocess.run(command, check=True, timeout=900, env=os.environ | environment)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(source, tmp_path_factory.mktemp("wheel"))


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


def names_in(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]


def test_every_file_of_our_packages_is_in_the_wheel(wheel: Path) -> None:
    names = names_in(wheel)
    assert sorted(name for name in names if not name.endswith(CODE)) == shipped()
    assert {
        "kernels/cuda/sampler.cu",
        "kernels/cuda/common.cuh",
        "jobs/report/report.html",
        "migrations/script.py.mako",
    } <= set(names)
    compiled = code_of_kernels() if toolchain.cuda_compiler() else set()
    assert {name for name in names if name.endswith(CODE)} == compiled
    assert wheel.name.endswith("-py3-none-any.whl"), "machine code of GPUs runs beside any CPU"


@pytest.mark.parametrize("kernel", lm_cuda.SOURCES, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("target", [binaries.HOPPER, binaries.NEWER])
def test_its_code_has_the_kernels_that_are_launched(kernel: Source, target: str, wheel: Path) -> None:
    if toolchain.cuda_compiler() is None:
        pytest.skip("needs a CUDA compiler")
    code = zipfile.ZipFile(wheel).read(f"kernels/cuda/{binaries.file_name(kernel.name, target)}")
    for name in kernel.kernels:
        assert name.encode() in code
    assert code.startswith(b"\x7fELF") != target.startswith("compute_")


def test_a_wheel_built_without_a_compiler_has_the_sources_of_kernels(source: Path, tmp_path: Path) -> None:
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia/__init__.py").touch()  # hides the packages of NVIDIA
    plain = built_wheel(
        source, tmp_path / "out", PATH="/usr/bin:/bin", CUDA_HOME=str(tmp_path), PYTHONPATH=str(tmp_path)
    )
    assert sorted(names_in(plain)) == shipped()


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
    assert prebuilt == (toolchain.cuda_compiler() is not None)
    assert distributions == []
    assert believed is False, "transformers takes our package for Hugging Face's kernels"
