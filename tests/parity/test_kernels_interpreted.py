"""Kernels of padded prefill and of centred convolutions in Triton's interpreter, which only a fresh process can be put into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def test_the_kernels_equal_their_twins_in_the_interpreter() -> None:
    root = Path(__file__).parents[2]
    files = ["tests/gpu/test_prefill_kernels.py", "tests/gpu/test_codec_kernels.py"]
    chosen = [*files, "-k", "float32 or dtype0 or twins or centred", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen], cwd=root, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert "8 passed" in found.stdout
