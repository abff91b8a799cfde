"""Kernels of frames, few and many rows, of padded and packed prefill, of convolutions that are centred or
whose rows end, in Triton's interpreter, which only a fresh process can be put into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize(
    ("files", "chosen", "passed"),
    [
        (
            [
                "tests/gpu/test_prefill_kernels.py",
                "tests/gpu/test_codec_kernels.py",
                "tests/gpu/test_codec_front_kernels.py",
            ],
            "test_codec_front_kernels or float32 or dtype0 or twins or centred or open_end or rounded or head or packed_attention"
            " or fused_packed or full_row",
            36 + 19,
        ),
        (["tests/gpu/test_frame_kernels.py", "tests/gpu/test_wide_frames.py"], "not bfloat16", 26),
    ],
    ids=["prefill-and-codec", "frames"],
)
def test_the_kernels_equal_their_twins_in_the_interpreter(files: list[str], chosen: str, passed: int) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", *files, "-k", chosen, "-p", "no:cacheprovider"]
    found = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:]
    assert f"{passed} passed" in found.stdout
