"""Kernels of packed prompts, and frames of more than 512 rows, in Triton's interpreter, which only a fresh process can be put into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize(
    ("file", "chosen", "passed"),
    [("prefill_kernels", "packed_attention or fused_packed", 13), ("wide_frames", "", 1)],
    ids=["packed-prompts", "wide-frames"],
)
def test_they_equal_their_twins(file: str, chosen: str, passed: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", f"tests/gpu/test_{file}.py", "-k", chosen, "-p", "no:cacheprovider"]
    root = Path(__file__).parents[2]
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
    assert f"{passed} passed" in found.stdout
