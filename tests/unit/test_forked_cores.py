"""Engine cores that are forked: whose environment and output they have, where they come from, and when
they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import forked_cores
from tests.support.forked_cores import ForkedCores, template_pids
from tests.support.run_kit import until
from tests.support.services import stat_of
from tests.support.vllm_kit import core_pids, is_running

REPOSITORY = Path(__file__).parents[2]
#: What a core runs here; its text is not found for a core.
WAITING = "import signal; open('/proc/self/comm', 'w').write('Engine' + 'Core'); signal.pause()"
#: Another process of the run, and its core.
OTHER = f"""
import sys
from tests.support import forked_cores
core = forked_cores.ForkedCores().Process(target=exec, args=({WAITING!r},))
core.start()
print(core.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A run whose templates import nothing."""
    own = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", own)
    monkeypatch.setenv(forked_cores.IMPORTS, "")
    yield
    for name in [(run, kind) for run, kind in forked_cores.TEMPLATES if run == own]:
        forked_cores.TEMPLATES.pop(name)._stop()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_core_has_the_environment_and_the_output_of_its_starter(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    for word in ("first", "second"):
        monkeypatch.setenv("WORD", word)
        core = ForkedCores().Process(target=os.system, args=("echo $WORD",))
        core.start()
        core.join(240)
        assert core.exitcode == 0
        assert capfd.readouterr().out == f"{word}\n"


def test_processes_of_a_run_share_a_template_and_a_core_ends_with_its_own() -> None:
    mine = ForkedCores().Process(target=exec, args=(WAITING,))
    mine.start()
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        assert [stat_of(str(pid))[1] for pid in (mine.pid, theirs)] == [
            str(pid) for pid in template_pids()
        ] * 2
        assert core_pids(os.getpid()) == [mine.pid]
        other.kill()
        until(lambda: not is_running(theirs), "it goes on without its starter")
        assert mine.is_alive()
        mine.kill()
        mine.join(240)
        assert (mine.exitcode, core_pids(os.getpid())) == (-signal.SIGKILL, [])
    finally:
        other.kill()
        other.communicate()
        mine.kill()
