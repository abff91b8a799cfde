"""Golden checkpoints made whole: the repository leaves out of them what no case of its golden folders
reads, for its size.

`left_out.json` of a checkpoint names the tensors: {file: {tensor: {"shape": [...], "rows": [...]}}}. A
tensor with `rows` is stored with these rows alone, one without is not stored at all; seeded noise takes
their place. A `.gz` file is a packed one. `python -m tests.support.golden_checkpoint CHECKPOINT FOLDER`
writes a whole one for who wants to run it.
"""

from __future__ import annotations

import atexit
import gzip
import json
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LEFT_OUT = "left_out.json"
#: Scales and variances: above 0.
_POSITIVE = ("running_var", "bn.weight", "cluster_usage", "initialized")


def left_out(checkpoint: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """What the folder leaves out; empty for one that was never cut."""
    path = checkpoint / LEFT_OUT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


@cache
def whole(checkpoint: Path) -> Path:
    """The folder itself where it is whole, else a copy that is, which lives as long as the process."""
    gaps, packed = left_out(checkpoint), [path.relative_to(checkpoint) for path in checkpoint.rglob("*.gz")]
    if not gaps and not packed:
        return checkpoint
    folder = Path(tempfile.mkdtemp(prefix="nightjar-golden-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ignored = shutil.ignore_patterns(LEFT_OUT, "*.gz")
    copy = shutil.copytree(
        checkpoint, folder / checkpoint.name, ignore=ignored, copy_function=shutil.copyfile
    )
    for path in packed:
        (copy / path.with_suffix("")).write_bytes(gzip.decompress((checkpoint / path).read_bytes()))
    for file, tensors in gaps.items():
        _fill(copy / file, tensors)
    return copy


def _fill(path: Path, gaps: dict[str, dict[str, Any]]) -> None:
    dice = torch.Generator().manual_seed(0)
    tensors = load_file(path)
    for name, gap in gaps.items():
        filled = _noise(name, gap["shape"], dice)
        if "rows" in gap:
            stored = tensors[name]
            filled = filled.to(stored.dtype)
            filled[gap["rows"]] = stored
        tensors[name] = filled
    save_file(tensors, path)


def _noise(name: str, shape: list[int], dice: torch.Generator) -> Tensor:
    """Values of a size that keeps signals in range."""
    if name.endswith("num_batches_tracked"):
        return torch.zeros(shape, dtype=torch.long)
    if name.endswith(_POSITIVE) or (".bns." in name and name.endswith("weight")):
        return 0.5 + torch.rand(shape, generator=dice)
    fan = torch.Size(shape[1:]).numel() if len(shape) > 1 else 16
    return torch.randn(shape, generator=dice) * (2 / fan) ** 0.5


def weightless(source: Path | str, folder: Path) -> Path:
    """A copy of a checkpoint in `folder` without its weights: what loads them ends with a `ModelError`."""
    shutil.copytree(source, folder / "weightless", ignore=shutil.ignore_patterns("*.safetensors", "*.pth"))
    return folder / "weightless"


if __name__ == "__main__":
    shutil.copytree(whole(Path(sys.argv[1])), sys.argv[2], copy_function=shutil.copyfile)
