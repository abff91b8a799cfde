"""A skip that nobody listed fails a run that has to be whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.support.skips import AllowedSkip, allowed_skips, unlisted

TESTS = """
import pytest
def test_runs():
    pass
@pytest.mark.skip(reason="%s")
def test_does_not():
    pass
"""


def test_only_listed_tests_with_the_listed_reason_may_be_skipped() -> None:
    allowed = [AllowedSkip("tests/gpu/*", "needs a CUDA device")]
    skipped = [
        ("tests/gpu/test_a.py::test_b", "Skipped: needs a CUDA device"),
        ("tests/gpu/test_a.py::test_c", "Skipped: no reason"),
        ("tests/unit/test_a.py::test_b", "Skipped: needs a CUDA device"),
    ]
    assert unlisted(skipped, allowed) == skipped[1:]
    assert allowed_skips()


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize(("in_ci", "status"), [("true", 1), ("", 0)])
def test_a_whole_run_fails_on_an_unlisted_skip(
    tmp_path: Path, processes: str, in_ci: str, status: int
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text("from tests.support.skips import pytest_sessionfinish\n")
    (folder / "test_some.py").write_text(TESTS % "too tired")
    repository = str(Path(__file__).parents[2])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "xdist",
            "-n",
            processes,
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            str(folder),
        ],
        env={**os.environ, "CI": in_ci, "PYTHONPATH": repository, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout
    last = done.stdout.splitlines()[-1]
    assert (
        last
        == "SKIP THAT tests/skips.toml DOES NOT LIST: tests/test_some.py::test_does_not: Skipped: too tired"
    )


def test_the_skips_of_gpu_tests_are_listed() -> None:
    """They all run where this list is not asked, so that only a whole run elsewhere would show one that is
    missing."""
    allowed = allowed_skips()
    root = Path(__file__).parents[2]
    reasons = [
        (f"{path.relative_to(root)}::test", reason)
        for path in sorted((root / "tests" / "gpu").glob("test_*.py"))
        for reason in re.findall(r'"(needs [^"]*)"', path.read_text())
    ]
    assert len(reasons) > 10
    assert unlisted(reasons, allowed) == []


def test_files_that_begin_first_are_there() -> None:
    tests = Path(__file__).parents[1]
    assert [pattern for pattern in LONGEST if not any(tests.glob(pattern))] == []
