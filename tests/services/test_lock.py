"""`requirements.lock`: every extra can be installed with it, on every Python of ours, and it is what
`make lock` makes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK, PROJECT = ROOT / "requirements.lock", ROOT / "pyproject.toml"
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
#: What uv says where no index answers, as opposed to one that answers with something else than was asked for.
UNREACHABLE = re.compile(
    r"Failed to fetch|error sending request|Could not connect|dns error|network was disabled", re.IGNORECASE
)


def compile_requirements(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs `uv pip compile` in the repository, which reads the settings of pyproject.toml; nothing is
    installed."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile"]
    command += ["--python", sys.executable, "--no-python-downloads", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module", autouse=True)
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where no package index can be asked."""
    question = tmp_path_factory.mktemp("index") / "requirements.in"
    question.write_text("click\n")
    answer = compile_requirements(
        question, "--refresh-package", "click", "--output-file", question.with_suffix(".txt")
    )
    if answer.returncode and UNREACHABLE.search(answer.stderr):
        pytest.skip("no package index can be reached")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", [*EXTRAS, "vllm on a CPU"])
def test_every_extra_can_be_installed_with_the_lock(extra: str, python: str, tmp_path: Path) -> None:
    wanted = ["--extra", extra] if extra in EXTRAS else ["--extra", "dev", ROOT / "requirements-vllm-cpu.txt"]
    platform = ("--python-version", python, "--python-platform", "x86_64-unknown-linux-gnu")
    found = compile_requirements(
        PROJECT,
        *wanted,
        "--constraint",
        LOCK,
        *platform,
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--output-file",
        tmp_path / "found.txt",
    )
    assert found.returncode == 0, found.stderr
    pinned = {line.partition(" ")[0] for line in LOCK.read_text().splitlines()}
    free = [line for line in (tmp_path / "found.txt").read_text().splitlines() if line not in pinned]
    assert free == [], "the lock leaves these open: run `make lock`"


def test_the_lock_is_what_make_lock_makes(tmp_path: Path) -> None:
    recipe = re.search(
        r"(?m)^lock:\n\t\$\(BIN\)/uv pip compile (.*) --output-file requirements.lock$",
        (ROOT / "Makefile").read_text(),
    )
    assert recipe is not None
    made = Path(shutil.copy(LOCK, tmp_path))
    assert compile_requirements(*recipe[1].split(), "--output-file", made).returncode == 0
    assert made.read_text() == LOCK.read_text(), "run `make lock`"
