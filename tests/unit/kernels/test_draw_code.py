"""The draw of a wide head, compiled for sm_90 without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def test_the_draw_of_spark_tts_spills_no_registers() -> None:
    command = [sys.executable, "-m", "tests.support.draw_code", "--only", "spark", "--json"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    (one,) = (json.loads(line) for line in done.stdout.splitlines())
    assert one["name"] == "spark only"
    assert (one["warps"], one["spill_bytes"]) == (16, 0)
