"""deploy/slurm: scripts that shellcheck takes, and whose warning comes before a drain could be cut off."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.settings import WorkerSettings
from tests.support.deploy_kit import DEPLOY
from worker.runtime import EXIT_SECONDS

SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))


def options(path: Path) -> dict[str, str]:
    return dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=?(.*)$", path.read_text()))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_shellcheck_takes_the_script(path: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_job_may_be_requeued_and_keeps_its_log(path: Path) -> None:
    asked = options(path)
    assert "requeue" in asked
    assert asked["open-mode"] == "append"
    # Slurm stops reading options at the first command.
    assert "#SBATCH" not in path.read_text().partition("\nset -euo pipefail\n")[2]


def test_the_warning_leaves_time_for_a_drain() -> None:
    workers, single = (
        options(DEPLOY / f"slurm/{name}.sbatch")["signal"] for name in ("nightjar", "nightjar-run")
    )
    (before,) = re.fullmatch(r"B:USR1@(\d+)", workers).groups()  # type: ignore[union-attr]
    assert int(before) > WorkerSettings().drain_seconds + EXIT_SECONDS
    assert re.fullmatch(r"B:USR1@\d+", single)
