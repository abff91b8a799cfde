"""What a stranger relies on before any command runs: one version, typed packages, hooks and hosted CI that
run our own checks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from jobs import DISTRIBUTION, installed_version

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_of_pyproject_is_the_only_one() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "jobs", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (
        said.stdout.split()[-1]
        == installed_version()
        == version(DISTRIBUTION)
        == PROJECT["project"]["version"]
    )
    assert PROJECT["project"]["name"] == DISTRIBUTION
    rooms = [
        pattern.removesuffix("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(sources) > 100
    assert [
        path.name for path in sources if re.search(r"^__version__ *=", path.read_text(), re.MULTILINE)
    ] == []


def test_the_changelog_has_an_entry_for_the_version() -> None:
    headings = re.findall(r"(?m)^## (.+)$", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0] == "Not released"
    assert PROJECT["project"]["version"] in headings


def test_the_demo_says_what_it_installs_before_it_does(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        (tmp_path / name).symlink_to(ROOT / name)
    said = subprocess.run(
        ["make", "--dry-run", "demo"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    told, installed, ran = (
        said.index(words) for words in ("MB to download", "pip --disable", "nightjar run")
    )
    assert told < installed < ran


def test_every_installed_package_says_that_it_is_typed() -> None:
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]
    rooms = [
        pattern.removesuffix("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    assert [room for room in rooms if not (ROOT / room / "py.typed").is_file()] == []


def test_hosted_ci_runs_the_script_of_this_repository() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_hooks_before_a_commit_are_programs_of_the_project_and_need_no_network() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert [hook["id"] for hook in repository["hooks"]] == [
        "ruff-check",
        "ruff-format",
        "import-linter",
        "pyright",
    ]
    development = " ".join(PROJECT["project"]["optional-dependencies"]["dev"])
    for hook in repository["hooks"]:
        folder, _, program = hook["entry"].split()[0].rpartition("/")
        assert (hook["language"], folder) == ("system", ".venv/bin")
        assert {"lint-imports": "import-linter"}.get(program, program) in development
