"""The hook at a job's end, with real commands: what it gets, how often, and what becomes of one that
fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import notification
from jobs.ingest import SubmitOptions
from jobs.ledger.records import Job
from jobs.notification import Reported, report_ends
from jobs.settings import NotifySettings, Settings, load_settings
from tests.support.ledger_kit import execute
from tests.support.worker_rig import WORKER, Rig
from worker.maintenance import report_ended_jobs
from worker.runtime import Runtime

#: Keeps what it gets, a line each; ends with the next status of the file `statuses`, else with 0; waits while
#: there is a file `held`.
HOOK = """
cat >> got; echo >> got
while [ -e held ]; do sleep 0.02; done
status=$(head -n 1 statuses 2> /dev/null)
[ -e statuses ] && sed -i 1d statuses
exit ${status:-0}
"""


class Receiver:
    """A command that is the hook, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.command = ["sh", "-c", f"cd '{folder}'; {HOOK}"]

    def refuse(self, *statuses: int) -> None:
        (self.folder / "statuses").write_text("".join(f"{status}\n" for status in statuses))

    @property
    def views(self) -> list[dict]:
        got = self.folder / "got"
        return [json.loads(line) for line in got.read_text().splitlines() if line] if got.exists() else []

    def wait(self) -> None:
        deadline = time.monotonic() + 240
        while not self.views:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def receiver(tmp_path: Path) -> Receiver:
    return Receiver(tmp_path / "hook")


def hooked(rig: Rig, **notify: object) -> Settings:
    return rig.settings.model_copy(update={"notify": NotifySettings.model_validate(notify)})


def ended(rig: Rig, text: str = "a", name: str = "") -> Job:
    job = rig.submit([text], options=SubmitOptions(name=name))
    rig.run_next()
    return rig.ledger.job(job.id)


def make_due(rig: Rig) -> None:
    execute(rig.ledger, "UPDATE jobs SET notify_due_at = 0")


def test_a_hook_gets_the_view_of_each_end_once(rig: Rig, receiver: Receiver) -> None:
    settings = hooked(rig, command=receiver.command)
    job = ended(rig, "[[fail_once:synth.no_eos]] a", name="night; $(id)")
    assert report_ends(rig.ledger, settings) == [Reported(job.id, 1)]
    assert report_ends(rig.ledger, settings) == []
    (view,) = receiver.views
    assert view["schema"] == "nightjar.status/1"
    assert (view["job"], view["state"], view["name"]) == (job.id, "completed_with_errors", "night; $(id)")
    assert view["errors"] == {"synth.no_eos": 1}
    rig.ledger.retry(job.id, None)
    assert report_ends(rig.ledger, settings) == []
    rig.run_next()
    assert report_ends(rig.ledger, settings) == [Reported(job.id, 1)]
    first, second = receiver.views
    assert (second["state"], second["end"] != first["end"]) == ("completed", True)


def test_an_end_that_is_refused_is_reported_again_up_to_a_maximum(
    rig: Rig, receiver: Receiver, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    settings, job = hooked(rig, command=receiver.command), ended(rig)
    receiver.refuse(5, *[6] * (notification.MAX_ATTEMPTS - 2), 7)
    first, again = report_ends(rig.ledger, settings), report_ends(rig.ledger, settings)
    assert [(one.attempt, one.reason) for one in first] == [(1, "the command ended with status 5")]
    assert again == []
    for _ in range(notification.MAX_ATTEMPTS - 2):
        make_due(rig)
        reported = report_ends(rig.ledger, settings)
        assert [one.reason for one in reported] == ["the command ended with status 6"]
    make_due(rig)
    report_ended_jobs(rig.ledger, settings)
    make_due(rig)
    assert report_ends(rig.ledger, settings) == []
    ends = [view["end"] for view in receiver.views]
    assert (len(ends), len(set(ends))) == (notification.MAX_ATTEMPTS, 1)
    # Another test may have set logging up, which then goes through the standard library.
    logged = "".join(capsys.readouterr()) + caplog.text
    assert ("not retried" in logged, job.id in logged) == (True, True)


SENDER = """
import sys
from pathlib import Path
from jobs.ledger import Ledger
from jobs.notification import report_ends
from jobs.settings import NotifySettings, Settings
settings = Settings(home=Path(sys.argv[1]), notify=NotifySettings(command=sys.argv[2:]))
report_ends(Ledger.of(settings), settings)
"""


def test_a_sender_that_is_killed_is_replaced(rig: Rig, receiver: Receiver) -> None:
    settings, job = hooked(rig, command=receiver.command), ended(rig)
    (receiver.folder / "held").touch()
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(rig.folder), *receiver.command])
    receiver.wait()
    assert report_ends(rig.ledger, settings) == []
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    (receiver.folder / "held").unlink()
    make_due(rig)
    assert report_ends(rig.ledger, settings) == [Reported(job.id, 2)]
    assert [view["job"] for view in receiver.views] == [job.id, job.id]


def script(folder: Path, text: str) -> str:
    path = folder / "hook with a space.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_gets_the_view_and_no_shell_reads_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = script(rig.folder, f'cat > "$1"; echo "$NIGHTJAR_JOB $NIGHTJAR_STATE [$2]" > "{rig.folder}/said"')
    monkeypatch.setenv("SPEECH_NOTIFY__COMMAND", f"'{hook}' '{rig.folder}/got' '$(id); x'")
    notify = load_settings().notify
    job = ended(rig, name="`touch here`")
    assert report_ends(rig.ledger, rig.settings.model_copy(update={"notify": notify})) == [
        Reported(job.id, 1)
    ]
    assert json.loads((rig.folder / "got").read_text())["name"] == "`touch here`"
    assert (rig.folder / "said").read_text() == f"{job.id} completed [$(id); x]\n"


def test_a_command_that_fails_says_why_and_one_that_hangs_is_ended(rig: Rig) -> None:
    ended(rig)
    hook = script(rig.folder, f"echo $$ > '{rig.folder}/pid'; echo no such channel >&2; exit 3")
    (failed,) = report_ends(rig.ledger, hooked(rig, command=[hook]))
    assert failed.reason == "the command ended with status 3: no such channel"
    make_due(rig)
    (hung,) = report_ends(rig.ledger, hooked(rig, command=["sleep", "1000"], timeout_seconds=0.05))
    assert hung.reason == "the command did not end within 0.05 s"
    make_due(rig)
    (missing,) = report_ends(rig.ledger, hooked(rig, command=["/no/such/hook"]))
    assert "cannot be started: No such file" in missing.reason
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not any(
        "sleep\0" in Path(f"/proc/{child}/cmdline").read_text()
        for child in children
        if Path(f"/proc/{child}").exists()
    )


def test_a_worker_reports_the_ends_that_it_finds(rig: Rig, receiver: Receiver) -> None:
    job = ended(rig)
    rig.ledger.retire_worker(WORKER.id)
    runtime = Runtime(hooked(rig, command=receiver.command))
    runtime.start()
    receiver.wait()
    runtime.drain()
    runtime.stop()
    assert [view["job"] for view in receiver.views] == [job.id]


def test_without_a_hook_nothing_is_claimed(rig: Rig, receiver: Receiver) -> None:
    job = ended(rig)
    assert report_ends(rig.ledger, rig.settings) == []
    assert report_ends(rig.ledger, hooked(rig, command=receiver.command)) == [Reported(job.id, 1)]


def test_a_try_that_fails_names_its_end_and_when_the_next_one_is_up_to_the_last(rig: Rig) -> None:
    job, settings = ended(rig), hooked(rig, command=["false"])
    for attempt in range(1, notification.MAX_ATTEMPTS + 1):
        again = 0.0 if attempt < notification.MAX_ATTEMPTS else None
        assert report_ends(rig.ledger, settings, again_seconds=0.0) == [
            Reported(job.id, attempt, "the command ended with status 1", again)
        ]
    assert report_ends(rig.ledger, settings, again_seconds=0.0) == []
