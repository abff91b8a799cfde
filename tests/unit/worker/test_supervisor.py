"""Processes that look after a worker: what is brought back, what is given up, and what is said of it."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.gpus import Device
from jobs.settings import Settings
from jobs.worker_group import (
    CRASHES,
    CRASHES_BESIDE_OTHERS,
    FAILED_STARTS,
    HEALTHY_SECONDS,
    WorkerGroup,
    WorkerPlan,
    WorkerReport,
)
from pipelines.child_process import Child
from pipelines.errors import ConfigError, ErrorCode, ModelError
from pipelines.ipc import Channel
from tests.support.rounds import wait_until
from worker.supervisor import report, report_end, report_refusal

#: A child that says up when its GPU is in `up`, finishes items when it is in `works`, sends its last message
#: when it is in `says`, says that no start can open its model when it is in `refuses`, and ends by SIGTERM or
#: with the status of its GPU in `ends`; unless the file `mended` is there. One that only ends imports
#: nothing.
CHILD = """
import os, signal, sys, time
log = open(sys.argv[1], 'a', buffering=1)
gpu = os.environ.get('CUDA_VISIBLE_DEVICES', '-')
signal.signal(signal.SIGTERM, lambda *_: (log.write(f'end {gpu}\\n'), sys.exit(0)))
mended = os.path.exists(sys.argv[1] + '.mended')
ends = gpu in ENDS and not mended
if not ends or gpu in [*UP, *SAYS, *REFUSES]:
    from jobs.worker_group import WorkerReport
    from worker.supervisor import report, report_end, report_refusal, wait_for_release
    from pipelines.errors import ConfigError, ErrorCode
    wait_for_release()
cores = len(os.sched_getaffinity(0))
log.write(f'start {gpu} cores {cores}\\n')
if gpu in UP or mended:
    report(WorkerReport(up=True))
if gpu in SAYS:
    report_end(SAYS[gpu])
if gpu in REFUSES and not mended:
    report_refusal(ConfigError(ErrorCode.CONFIG_INVALID, REFUSES[gpu], 'Unset it.'))
if ends:
    status = ENDS[gpu]
    os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
for _ in range(6000):
    if gpu in WORKS or mended:
        report(WorkerReport(finished=True))
    time.sleep(0.1)
"""
PROGRAM = """
import logging, sys
import msgspec
from jobs.gpus import Device
from jobs.settings import Settings
from jobs.worker_group import WorkerGroup, WorkerPlan, WorkerReport
from pipelines.child_process import Child
from worker.supervisor import run_group
plans = [WorkerPlan(gpu and Device(gpu, gpu)) for gpu in GPUS]
settings = Settings(home=HOME)
settings._times = msgspec.structs.replace(settings.times, quarantine_seconds=QUARANTINE)
group = WorkerGroup(
    settings,
    plans,
    lambda plan: Child([CHILD, LOG], WorkerReport, plan.environment, bound=False),
    (0.5, 0.05),
    on_event=lambda level, event, details: print(event, details, flush=True),
)
sys.exit(run_group(group))
"""


class Run:
    """A supervisor in a process of its own."""

    def __init__(
        self,
        folder: Path,
        gpus: list[str | None],
        up: str = "",
        ends: dict[str, int] | None = None,
        works: str = "",
        says: dict[str, str] | None = None,
        refuses: dict[str, str] | None = None,
        quarantine_seconds: float = 600.0,
    ) -> None:
        child = CHILD
        values = {
            "UP": list(up),
            "ENDS": ends or {},
            "WORKS": list(works),
            "SAYS": says or {},
            "REFUSES": refuses or {},
        }
        for name, value in values.items():
            child = child.replace(name, repr(value))
        (folder / "child.py").write_text(child)
        self.log, self.said = folder / "log", folder / "said"
        code = PROGRAM
        for name, given in {
            "CHILD": str(folder / "child.py"),
            "LOG": str(self.log),
            "GPUS": gpus,
            "QUARANTINE": quarantine_seconds,
            "HOME": str(folder),
        }.items():
            code = code.replace(name, repr(given))
        with self.said.open("wb") as said:
            self.process = subprocess.Popen([sys.executable, "-c", code], stdout=said, stderr=said)

    def mend(self) -> None:
        """From the next start on, no child ends by itself and all finish items."""
        Path(f"{self.log}.mended").touch()

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
    started = [line.partition(" cores")[0] for line in supervisor.lines()]
    assert sorted(started) == ["end 0", "end 3", "start 0", "start 3"]


def test_a_start_is_logged_without_what_its_plan_leaves_open(run: Callable[..., Run]) -> None:
    supervisor = run([None])
    supervisor.wait_for(lambda: supervisor.count("start") == 1)
    assert supervisor.end() == 0
    (started,) = (
        line for line in supervisor.said.read_text().splitlines() if line.startswith("worker started")
    )
    assert ast.literal_eval(started.removeprefix("worker started ")).keys() == {"pid"}


def test_a_signal_that_comes_while_a_worker_is_started_reaches_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from jobs.settings import Settings\n"
        "from jobs.worker_group import WorkerGroup, WorkerPlan, WorkerReport\n"
        "from pipelines.child_process import Child\n"
        "from worker.supervisor import run_group\n"
        "def start(plan):\n"
        "    child = Child(['-c', 'import time; time.sleep(600)'], WorkerReport)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return child\n"
        f"settings = Settings(home={str(tmp_path)!r})\n"
        "sys.exit(run_group(WorkerGroup(settings, [WorkerPlan(), WorkerPlan()], start, (0.5, 1))))\n"
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
    assert "quarantined" not in supervisor.said.read_text()


def test_a_lone_worker_that_cannot_start_ends_the_supervisor(run: Callable[..., Run]) -> None:
    supervisor = run(["0"], ends={"0": 5}, says={"0": "The driver is too old."})
    assert supervisor.process.wait(240) == 1
    assert supervisor.count("start") == FAILED_STARTS
    said = supervisor.said.read_text()
    assert "The worker of GPU 0 ended with status 5, 3 times in a row without a finished item." in said
    assert "Its last message: The driver is too old." in said
    assert "nvidia-smi" in said
    assert "no worker can work; the supervisor ends" in said


def test_a_worker_that_can_never_open_its_model_is_started_once(run: Callable[..., Run]) -> None:
    supervisor = run(["0", "1"], up="1", ends={"0": 4}, refuses={"0": "No executor of this kind."})
    supervisor.wait_for(
        lambda: "worker quarantined" in supervisor.said.read_text() and supervisor.count("start 1") == 1
    )
    assert supervisor.end() == 1
    assert (supervisor.count("start 0"), supervisor.count("end 1")) == (1, 1)
    said = supervisor.said.read_text()
    assert (
        "The worker of GPU 0 cannot open its model (config.invalid): No executor of this kind. Unset it. It is quarantined"
        in said
    )
    assert "nvidia-smi" not in said


def test_a_worker_whose_settings_were_mended_comes_back(run: Callable[..., Run]) -> None:
    supervisor = run(
        ["0", "1"], up="1", ends={"0": 4}, refuses={"0": "No executor of this kind."}, quarantine_seconds=0.2
    )
    supervisor.wait_for(lambda: supervisor.count("start 0") >= 2)
    supervisor.mend()
    supervisor.wait_for(lambda: "out of quarantine" in supervisor.said.read_text())
    assert supervisor.end() == 0


def test_a_worker_that_cannot_start_is_quarantined_alone(run: Callable[..., Run]) -> None:
    supervisor = run(["0", "1"], up="1", ends={"0": 5})
    supervisor.wait_for(
        lambda: "worker quarantined" in supervisor.said.read_text() and supervisor.count("start 1") == 1
    )
    assert supervisor.count("end") == 0
    assert supervisor.end() == 1
    assert supervisor.count("start 0") == FAILED_STARTS
    assert supervisor.lines()[-1] == "end 1"
    assert "workers were quarantined" in supervisor.said.read_text()


def test_a_worker_that_dies_while_others_work_is_quarantined(run: Callable[..., Run]) -> None:
    """As one whose GPU fell off the bus: it comes up each time, and dies at its first items."""
    supervisor = run(["0", "1", "2", "3"], up="0123", works="123", ends={"0": -6})
    supervisor.wait_for(lambda: "worker quarantined" in supervisor.said.read_text())
    assert supervisor.count("start 0") == CRASHES_BESIDE_OTHERS
    assert [supervisor.count(f"start {gpu}") for gpu in (1, 2, 3)] == [1, 1, 1]
    assert "The worker of GPU 0 ended by signal 6 (SIGABRT), 5 times in a row" in supervisor.said.read_text()
    assert supervisor.end() == 1
    assert supervisor.count("start 0") == CRASHES_BESIDE_OTHERS


def test_a_quarantined_worker_is_tried_again_and_comes_back_with_an_item(run: Callable[..., Run]) -> None:
    supervisor = run(["0", "1"], up="1", ends={"0": 5}, quarantine_seconds=0.2)
    supervisor.wait_for(lambda: supervisor.count("start 0") >= FAILED_STARTS + 2)
    assert supervisor.said.read_text().count("worker quarantined") >= 2
    supervisor.mend()
    supervisor.wait_for(lambda: "out of quarantine" in supervisor.said.read_text())
    assert supervisor.count("start 1") == 1
    assert supervisor.end() == 0


def test_the_supervisor_ends_when_all_are_quarantined(run: Callable[..., Run]) -> None:
    supervisor = run(["0", "1"], ends={"0": 5, "1": 6})
    assert supervisor.process.wait(240) == 1
    assert (supervisor.count("start 0"), supervisor.count("start 1")) == (FAILED_STARTS, FAILED_STARTS)
    assert "no worker can work" in supervisor.said.read_text()


class Failing:
    """A group whose processes end at once, without a process: what its rules make of ends in a row."""

    def __init__(self, members: int, home: Path) -> None:
        plans = [WorkerPlan(Device(str(number), str(number))) for number in range(members)]
        self.quarantines: list[str] = []
        self.group = WorkerGroup(
            Settings(home=home),
            plans,
            lambda plan: Child(["-c", "import time; time.sleep(600)"], WorkerReport),
            (0.0, 0.0),
        )
        self.group.start()

    def wait_for(self, number: int) -> None:
        """Waits until a member runs."""

        def runs() -> bool:
            self.group.poll()
            return self.group.members[number].child is not None

        wait_until(runs)

    def end(self, number: int, count: int = 1) -> None:
        """Kills a member so many times, each time as soon as it runs again."""
        member = self.group.members[number]
        for _ in range(count):
            self.wait_for(number)
            assert member.child is not None
            member.child.kill()
            member.child.wait()
            self.quarantines += [ended.reason for ended, _ in self.group.poll() if ended.quarantined]


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Callable[[int], Failing]]:
    made: list[Failing] = []

    def start(members: int) -> Failing:
        made.append(Failing(members, tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.group.send_signal(signal.SIGKILL)
        for process in one.group.processes:
            process.wait()


def test_a_finished_item_begins_a_new_count(failing: Callable[[int], Failing]) -> None:
    group = failing(1)
    for _ in range(3):
        group.end(0, CRASHES - 1)
        group.wait_for(0)
        group.group.finished(group.group.members[0], time.monotonic())
    assert group.quarantines == []
    group.end(0, CRASHES)
    (said,) = group.quarantines
    assert "ended by signal 9 (SIGKILL), 20 times in a row without a finished item" in said


def test_a_long_life_begins_a_new_count(failing: Callable[[int], Failing]) -> None:
    group = failing(1)
    group.end(0, CRASHES - 1)
    group.wait_for(0)
    group.group.members[0].started_at -= HEALTHY_SECONDS
    group.end(0, CRASHES - 1)
    assert group.quarantines == []


def test_items_of_others_before_the_first_failure_prove_nothing(failing: Callable[[int], Failing]) -> None:
    """Where all fail from some time on, it is the job or the driver, and no worker's own fault."""
    group = failing(2)
    group.group.finished(group.group.members[1], time.monotonic() - 1)
    group.end(0, CRASHES_BESIDE_OTHERS + 1)
    assert group.quarantines == []
    group.group.finished(group.group.members[1], time.monotonic())
    group.end(0)
    assert len(group.quarantines) == 1


def test_a_worker_says_why_it_ends(parent: Channel[WorkerReport]) -> None:
    report(WorkerReport(finished=True))
    report_end("Broken:\nredis://:hunter2@host/0 " + "x" * 100_000)
    assert parent.receive(60) == WorkerReport(finished=True)
    assert parent.receive(60).last_message.startswith("Broken: redis://:********@host/0 xxx")
    # Nobody reads any more.
    parent.close()
    report(WorkerReport(finished=True))
    report(WorkerReport(finished=True))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(ErrorCode.CONFIG_INVALID, "No.", "Unset it."),
        ModelError(ErrorCode.MODEL_UNKNOWN, "No model."),
    ],
)
def test_a_parent_hears_what_no_start_can_open(
    parent: Channel[WorkerReport], error: ConfigError | ModelError
) -> None:
    report_refusal(error)
    heard = parent.receive(60).refusal
    assert heard is not None
    assert (type(heard), heard.code, heard.message, heard.advice) == (
        type(error),
        error.code,
        error.message,
        error.advice,
    )
