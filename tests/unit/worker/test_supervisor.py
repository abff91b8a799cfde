"""Processes that look after a worker: what is brought back, what is given up, and what is said of it; and the start they watch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.child_process import UP_PIPE, UpPipe, say_up
from jobs.embedded import FAILED_STARTS, EmbeddedHome
from jobs.settings import Settings
from pipelines.errors import ErrorCode, NightjarError, ServiceError
from worker.runtime import Runtime

#: A child that says up when its GPU is in `up`, and ends by SIGTERM or with the status of its GPU in `ends`.
CHILD = """
import os, signal, sys, time
log = open(sys.argv[1], 'a', buffering=1)
gpu = os.environ.get('CUDA_VISIBLE_DEVICES', '-')
signal.signal(signal.SIGTERM, lambda *_: (log.write(f'end {gpu}\\n'), sys.exit(0)))
log.write(f'start {gpu} {sys.argv[2]}\\n')
if gpu in UP:
    from jobs.child_process import say_up
    say_up()
if gpu in ENDS:
    status = ENDS[gpu]
    os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
time.sleep(600)
"""


class Run:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path, gpus: list[str | None], up: str = "", ends: dict[str, int] | None = None) -> None:
        (folder / "child.py").write_text(CHILD.replace("UP", repr(list(up))).replace("ENDS", repr(ends or {})))
        self.log, self.said = folder / "log", folder / "said"
        command = ["[sys.executable", repr(str(folder / "child.py")), f"{str(self.log)!r}]"]
        code = f"import sys; from worker.supervisor import Supervisor; sys.exit(Supervisor({', '.join(command)}, {gpus!r}, 0.05).run())"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen([sys.executable, "-c", code], stdout=said, stderr=said)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def count(self, beginning: str) -> int:
        return sum(line.startswith(beginning) for line in self.lines())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(240)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*arguments: object, **options: object) -> Run:
        runs.append(Run(tmp_path, *arguments, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield start
    for one in runs:
        one.process.kill()
        one.process.wait()


def test_every_gpu_has_its_process_and_signals_are_passed_on(run: Callable[..., Run]) -> None:
    supervisor = run(["0", "3"])
    supervisor.wait_for(lambda: supervisor.count("start") == 2)
    assert supervisor.end() == 0
    assert sorted(supervisor.lines()) == ["end 0", "end 3", "start 0 --parent-pid", "start 3 --parent-pid"]


def test_a_signal_that_comes_while_a_worker_is_started_reaches_it() -> None:
    code = (
        "import os, signal, subprocess, sys\n"
        "from worker.supervisor import Supervisor\n"
        "class Popen(subprocess.Popen):\n"
        "    def __init__(self, *arguments, **options):\n"
        "        super().__init__(*arguments, **options)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "subprocess.Popen = Popen\n"
        "sys.exit(Supervisor([sys.executable, '-c', 'import time; time.sleep(600)'], [None, None]).run())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0


def test_a_worker_that_is_killed_comes_back(run: Callable[..., Run]) -> None:
    supervisor = run(["0"], ends={"0": -9})
    supervisor.wait_for(lambda: supervisor.count("start") > FAILED_STARTS + 1)
    assert supervisor.end() == 0


def test_a_worker_that_came_up_comes_back_however_it_ends(run: Callable[..., Run]) -> None:
    supervisor = run(["0"], up="0", ends={"0": 1})
    supervisor.wait_for(lambda: supervisor.count("start") > FAILED_STARTS + 1)
    assert supervisor.end() == 0
    assert "cannot start" not in supervisor.said.read_text()


def test_a_worker_that_cannot_start_is_given_up_and_said_at_the_end(run: Callable[..., Run]) -> None:
    supervisor = run(["0"], ends={"0": 5})
    assert supervisor.process.wait(240) == 1
    assert supervisor.count("start") == FAILED_STARTS
    assert "cannot start" in supervisor.said.read_text()


def test_a_worker_that_cannot_start_stops_alone(run: Callable[..., Run]) -> None:
    supervisor = run(["0", "1"], up="1", ends={"0": 5})
    supervisor.wait_for(lambda: "cannot start" in supervisor.said.read_text() and supervisor.count("start 1") == 1)
    assert supervisor.count("end") == 0
    assert supervisor.end() == 1
    assert supervisor.count("start 0") == FAILED_STARTS
    assert supervisor.lines()[-1] == "end 1"
    assert "workers could not start" in supervisor.said.read_text()


def test_an_embedded_worker_that_came_up_is_no_failed_start(tmp_path: Path) -> None:
    home = EmbeddedHome(Settings(home=tmp_path))

    def ended(up: bool) -> None:
        home._up = UpPipe()
        if up:
            os.write(home._up.pass_fds[0], b"1")
        home._up.started()
        home._count_crash(1)

    for _ in range(2 * FAILED_STARTS):
        ended(up=True)
    for _ in range(FAILED_STARTS - 1):
        ended(up=False)
    ended(up=True)
    for _ in range(FAILED_STARTS - 1):
        ended(up=False)
    with pytest.raises(NightjarError, match="ended with status 1"):
        ended(up=False)


def test_up_is_said_once_and_only_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    say_up()
    pipe = UpPipe()
    monkeypatch.setenv(UP_PIPE, pipe.environment[UP_PIPE])
    say_up()
    say_up()
    assert pipe.close()


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    runtime = Runtime(Settings(home=tmp_path))
    runtime.ledger.migrate()
    yield runtime
    runtime.stop()


def away() -> ServiceError:
    return ServiceError(ErrorCode.LEDGER_UNREACHABLE, "away")


def test_a_start_waits_for_a_ledger_that_is_away(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    check, register = runtime.ledger.check_schema, runtime.ledger.register_worker
    calls: list[str] = []

    def failing_once(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def tried(*arguments: object) -> None:
            calls.append(name)
            if calls.count(name) == 1:
                raise away()
            call(*arguments)

        return tried

    monkeypatch.setattr(runtime.ledger, "check_schema", failing_once("check", check))
    monkeypatch.setattr(runtime.ledger, "register_worker", failing_once("register", register))
    pipe = UpPipe()
    monkeypatch.setenv(UP_PIPE, pipe.environment[UP_PIPE])
    runtime.start()
    assert calls == ["check", "check", "register", "register"]
    assert [row.state for row in runtime.ledger.workers()] == ["up"]
    assert pipe.close()


def test_a_start_that_waits_ends_when_it_is_told_to(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()

    def fail() -> None:
        waiting.set()
        raise away()

    monkeypatch.setattr(runtime.ledger, "check_schema", fail)
    pipe = UpPipe()
    monkeypatch.setenv(UP_PIPE, pipe.environment[UP_PIPE])
    start = threading.Thread(target=runtime.start)
    start.start()
    assert waiting.wait(240)
    runtime.drain()
    start.join(240)
    assert not start.is_alive()
    assert runtime.ledger.workers() == []
    pipe.started()
    assert not pipe.close()
    runtime.stop()


def test_a_start_that_no_wait_mends_fails_at_once(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ServiceError(ErrorCode.LEDGER_SCHEMA, "old")

    monkeypatch.setattr(runtime.ledger, "check_schema", fail)
    with pytest.raises(ServiceError, match="old"):
        runtime.start()
