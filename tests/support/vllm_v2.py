"""vLLM's V2 model runner, which CUDA uses, on a CPU: its Triton kernels run in Triton's interpreter. Slow,
but the real one.

`python -m tests.support.vllm_v2 COMMAND...` runs a command whose engine cores take it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.vllm_kit import REQUIRED, require_vllm

SITE = Path(__file__).parent / "v2_runner"
#: Set where the cores of a command are forked; `v2_runner/sitecustomize.py` reads it.
FORKED = "NIGHTJAR_FORKED_CORES"


def require_v2(*, whole_module: bool = True) -> None:
    """Skips the module (or the test) where vLLM or Triton is not installed, and says how to install them;
    fails where they must be."""
    require_vllm(whole_module=whole_module)
    if find_spec("triton") is not None:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but Triton is not installed", pytrace=False)
    pytest.skip(
        "TRITON IS NOT INSTALLED: tests of vLLM's V2 runner do not run (make install-vllm)",
        allow_module_level=whole_module,
    )


def environment() -> dict[str, str]:
    """What a process needs so that its engine cores take the V2 runner."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": os.pathsep.join(paths)}


def forked_environment() -> dict[str, str]:
    """As `environment`, for a command whose engine cores are forked where vLLM computes on the CPU
    (`tests.support.forked_cores`)."""
    found = environment()
    return {**found, FORKED: "1", "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(SITE.parents[2])])}


@contextmanager
def v2_runner() -> Iterator[None]:
    """Engine cores that start inside take the V2 runner; open the host or the pipeline in it, and keep it
    open while it may start again."""
    wanted = environment()
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    # Our own process only checks its settings; it may have imported vLLM before, for tests of the other
    # runner.
    config = importlib.import_module("vllm.config.vllm")
    has_triton, config.HAS_TRITON = config.HAS_TRITON, True
    try:
        yield
    finally:
        config.HAS_TRITON = has_triton
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment()})
