"""The wheel, built from a copy of the tracked files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = (".cubin", ".ptx")
ROOMS = ("nightjar", "jobs", "worker", "pipelines", "kernels", "migrations")


def shipped() -> list[str]:
    """The files of our packages, as the wheel names them: all that is no cache."""
    found = [
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix not in (".pyc", *CODE))


def copy_sources(folder: Path) -> Path:
    """A copy of what a distribution is built from."""
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


def names_in(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
