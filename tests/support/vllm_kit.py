"""What tests on a real vLLM share: whether it is there, its processes, and the SparkTTS checkpoint they
run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.errors import NightjarError
from pipelines.tokens import TokenPrompt, TokenRequest, Tokens, TokenSampling
from tests.support.forked_cores import forked_pids, template_pids
from tests.support.golden_checkpoint import whole
from tests.support.wide_heads import widened

GOLDEN = Path(__file__).parents[1] / "golden" / "spark"
#: How long a test waits for the engine: a core takes 10 s to start on quiet cores, and minutes on busy ones.
PATIENCE_SECONDS = 420
#: Set where vLLM has to be installed, as in CI: there its tests are never skipped.
REQUIRED = "NIGHTJAR_REQUIRE_VLLM"
CORE = "EngineCore"


def checkpoint() -> Path:
    """The golden checkpoint, whole."""
    return whole(GOLDEN / "checkpoint")


def wide_checkpoint() -> Path:
    """The same with heads that vLLM's kernels know."""
    return widened(checkpoint())


def require_vllm(*, whole_module: bool = True) -> None:
    """Skips the module (or the test) where vLLM is not installed, and says how to install it; fails where
    it must be."""
    if find_spec("vllm") is not None:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but vLLM is not installed", pytrace=False)
    pytest.skip(
        "vLLM IS NOT INSTALLED: tests of the vLLM engine do not run (make install-vllm)",
        allow_module_level=whole_module,
    )


class Waiter:
    """A receiver that keeps a sequence as a future."""

    def __init__(self, streamed: bool = False) -> None:
        self.streamed = streamed
        self.parts: list[list[int]] = []
        self.future: Future[Tokens] = Future()

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        self.parts.append(ids)

    def finished(self, tokens: Tokens) -> None:
        self.future.set_result(tokens)

    def failed(self, error: NightjarError) -> None:
        self.future.set_exception(error)


def sequence(
    name: str, prompt: list[int], tokens: int, *, seed: int | None = None, **sampling: Any
) -> TokenRequest:
    """A request of exactly so many tokens; greedy unless it has a seed."""
    drawn = (
        {"temperature": 0.0}
        if seed is None
        else {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": seed}
    )
    return TokenRequest(
        name, TokenPrompt(prompt), TokenSampling(tokens, ignore_end=True, **{**drawn, **sampling})
    )


def core_pids(parent: int) -> list[int]:
    """The engine cores among the descendants of a process."""
    children = [int(pid) for pid in _read(f"/proc/{parent}/task/{parent}/children").split()] + _of_threads(
        parent
    )
    named = [
        pid
        for pid in set(children)
        if CORE in _read(f"/proc/{pid}/cmdline") or CORE in _read(f"/proc/{pid}/comm")
    ]
    found = [pid for pid in named if is_running(pid)]
    for child in set(children) - set(template_pids()):
        found += core_pids(child)
    if parent == os.getpid():
        found += filter(is_running, forked_pids())
    return sorted(set(found))


def is_running(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    status = _read(f"/proc/{pid}/stat")
    return bool(status) and status.rpartition(")")[2].split()[0] != "Z"


def kill_core(parent: int) -> int:
    """Kills the engine core of a process as the kernel would, and returns its id."""
    pids = core_pids(parent)
    assert len(pids) == 1, pids
    os.kill(pids[0], signal.SIGKILL)
    return pids[0]


@contextmanager
def paused_core(parent: int) -> Iterator[int]:
    """The engine core of a process stands still inside: what it is given is not over here. Its id; it may
    be killed too."""
    (pid,) = core_pids(parent)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def held_start() -> Iterator[None]:
    """No engine core of this process starts inside, so that one that died stays away."""
    from pipelines.vllm_engine import host as engine

    start, may = engine.start_engine, threading.Event()

    def held(*arguments: Any) -> Any:
        assert may.wait(PATIENCE_SECONDS)
        return start(*arguments)

    engine.start_engine = held
    try:
        yield
    finally:
        engine.start_engine = start
        may.set()


def wait_for_core(parent: int, other_than: int = 0) -> int:
    """Waits until a process has an engine core, another one than `other_than`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        pids = [pid for pid in core_pids(parent) if pid != other_than]
        if pids:
            return pids[0]
        time.sleep(0.1)
    raise AssertionError("no engine core came")


def _of_threads(parent: int) -> list[int]:
    """Children that threads other than the first one started."""
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        found += [int(pid) for pid in _read(str(task)).split()]
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
