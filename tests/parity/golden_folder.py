"""What the tests of golden folders share: the cases that ran, and copies of a folder with one thing
changed."""

from __future__ import annotations

import gzip
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from tests.support.golden_subset import case_list, kinds


def check_listed(folder: Path, count: int) -> Counter[str]:
    """The README lists the cases, which are so many; their numbers by kind."""
    assert (folder / "README.md").read_text(encoding="utf-8").endswith(case_list(folder))
    found = Counter({kind: len(names) for kind, names in kinds(folder).items()})
    assert found.total() == count
    return found


def passed(printed: str) -> Counter[str]:
    """How many cases of each kind passed."""
    return Counter(line.split()[1] for line in printed.splitlines() if line.startswith("ok "))


def unpacked(folder: Path, target: Path) -> Path:
    """A copy of a golden folder whose packed files are plain."""
    copy = shutil.copytree(folder, target, copy_function=shutil.copyfile)
    for path in copy.rglob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    return copy


def scale(path: Path, name: str, factor: float) -> None:
    """Changes one tensor of a file."""
    weights = load_file(path)
    weights[name] = weights[name] * factor
    save_file(weights, path)


def change(path: Path, key: str, index: int | None = None) -> None:
    """Adds 1 to one number of an array of a file, or takes the array out of it."""
    with np.load(path) as data:
        arrays: dict[str, Any] = dict(data)
    stored = next(name for name in arrays if name.partition("~")[0] == key)
    if index is None:
        del arrays[stored]
    else:
        arrays[stored].reshape(-1)[index] += 1
    np.savez(path, **arrays)
