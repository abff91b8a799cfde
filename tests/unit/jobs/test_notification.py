"""The hook at a job's end, with a real server and real commands: what it gets, how often, and what becomes of one that fails."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jobs.ingest import SubmitOptions
from jobs.ledger.records import Job
from jobs.notification import SIGNATURE, Reported, report_ends, report_ends_with_retries
from jobs.settings import Settings, load_settings
from jobs.settings_groups import NotifySettings
from pipelines.errors import ConfigError
from tests.support.ledger_kit import execute
from tests.support.worker_rig import WORKER, Rig
from worker.maintenance import report_ended_jobs
from worker.runtime import Runtime

SECRET = "s3cr3t-of-the-hook"


@dataclass
class Receiver:
    """What an operator's server got; `statuses` are its next answers, then 204."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    came: threading.Event = field(default_factory=threading.Event)
    #: Answers wait for it.
    answer: threading.Event = field(default_factory=threading.Event)

    @property
    def views(self) -> list[dict]:
        return [json.loads(body) for _, _, body in self.requests]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    got = Receiver()
    got.answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.requests.append((self.path, dict(self.headers), body))
            got.came.set()
            got.answer.wait(120)
            status = got.statuses.pop(0) if got.statuses else 204
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"{got.url}/elsewhere")
            self.end_headers()

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    got.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield got
    got.answer.set()
    server.shutdown()
    server.server_close()


def hooked(rig: Rig, **notify: object) -> Settings:
    return rig.settings.model_copy(update={"notify": NotifySettings.model_validate(notify)})


def ended(rig: Rig, text: str = "a", name: str = "") -> Job:
    job = rig.submit([text], options=SubmitOptions(name=name))
    rig.run_next()
    return rig.ledger.job(job.id)


def make_due(rig: Rig) -> None:
    execute(rig.ledger, "UPDATE jobs SET notify_due_at = 0")


def test_an_address_gets_the_signed_view_of_each_end_once(rig: Rig, receiver: Receiver) -> None:
    settings = hooked(rig, url=f"{receiver.url}/hook?token=t", secret=SECRET)
    job = ended(rig, "[[fail_once:synth.no_eos]] a", name="night; $(id)")
    assert report_ends(rig.ledger, settings) == [Reported(job.id, 1)]
    assert report_ends(rig.ledger, settings) == []
    ((path, headers, body),) = receiver.requests
    view = json.loads(body)
    assert (path, headers["Content-Type"], view["schema"]) == ("/hook?token=t", "application/json", "nightjar.status/1")
    assert (view["job"], view["state"], view["name"]) == (job.id, "completed_with_errors", "night; $(id)")
    assert view["errors"] == {"synth.no_eos": 1}
    wanted = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
    assert (headers[SIGNATURE], headers["X-Nightjar-End"]) == (f"sha256={wanted}", view["end"])
    rig.ledger.retry(job.id, None)
    assert report_ends(rig.ledger, settings) == []
    rig.run_next()
    assert report_ends(rig.ledger, settings) == [Reported(job.id, 1)]
    first, second = receiver.views
    assert (second["state"], second["end"] != first["end"]) == ("completed", True)


def test_an_end_that_is_refused_is_reported_again_up_to_a_maximum(rig: Rig, receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    settings, job = hooked(rig, url=receiver.url, attempts=3, secret=SECRET), ended(rig)
    receiver.statuses = [500, 302, 404]
    first, again = report_ends(rig.ledger, settings), report_ends(rig.ledger, settings)
    assert [(one.attempt, one.reason) for one in first] == [(1, "127.0.0.1 answered 500")]
    assert again == []
    make_due(rig)
    assert [one.reason for one in report_ends(rig.ledger, settings)] == ["127.0.0.1 answered 302"]
    make_due(rig)
    report_ended_jobs(rig.ledger, settings)
    make_due(rig)
    assert report_ends(rig.ledger, settings) == []
    assert [(path, headers["X-Nightjar-Attempt"]) for path, headers, _ in receiver.requests] == [("/", "1"), ("/", "2"), ("/", "3")]
    assert len({view["end"] for view in receiver.views}) == 1
    logged = "".join(capsys.readouterr())
    assert ("not tried again" in logged, job.id in logged, SECRET in logged) == (True, True, False)


def test_a_user_and_a_password_in_an_address_are_sent_as_basic_authorization(rig: Rig, receiver: Receiver) -> None:
    job = ended(rig)
    address = receiver.url.replace("://", f"://night%40jar:{SECRET}%2F%C3%BC@") + "/hook?token=t"
    assert report_ends(rig.ledger, hooked(rig, url=address)) == [Reported(job.id, 1)]
    ((path, headers, _),) = receiver.requests
    assert (path, headers["Host"]) == ("/hook?token=t", receiver.url.partition("://")[2])
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")).decode() == f"night@jar:{SECRET}/ü"


@pytest.mark.parametrize("password", [f"{SECRET}/x", f"{SECRET}#x", f"{SECRET}?x", f"{SECRET}\u2100"])
def test_a_password_that_ends_its_address_too_early_is_refused_at_start(password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_NOTIFY__URL", f"https://user:{password}@host/hook")
    with pytest.raises(ConfigError, match="percent-encoded") as caught:
        load_settings()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("rest", ["ho ok", "h\u00f6ok", f"hook?key={SECRET} x"])
def test_an_address_that_no_request_can_name_is_refused_at_start(rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_NOTIFY__URL", f"https://host/{rest}")
    with pytest.raises(ConfigError, match="percent-encoded") as caught:
        load_settings()
    assert SECRET not in str(caught.value)
    monkeypatch.setenv("SPEECH_NOTIFY__URL", "https://us\u00e9r:p\u00e4ss@host/hook?key=1 ")
    assert load_settings().notify.enabled


def test_an_address_that_is_away_says_no_secret(rig: Rig) -> None:
    ended(rig)
    (failed,) = report_ends(rig.ledger, hooked(rig, url=f"http://user:{SECRET}@127.0.0.1:9/{SECRET}?key={SECRET}", secret=SECRET))
    assert failed.again_seconds is not None
    assert ("127.0.0.1" in failed.reason, SECRET in failed.reason) == (True, False)


def test_an_answer_that_never_ends_takes_no_longer_than_the_timeout(rig: Rig) -> None:
    ended(rig)
    over = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not over.wait(0.01):
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as server:
        dripping = threading.Thread(target=drip, args=(server,))
        dripping.start()
        port = server.getsockname()[1]
        # Without a maximum for the whole answer this call waits for `over`.
        threading.Timer(30, over.set).start()
        (failed,) = report_ends(rig.ledger, hooked(rig, url=f"http://127.0.0.1:{port}/{SECRET}", timeout_seconds=0.2))
        over.set()
        dripping.join()
    assert failed.reason == "127.0.0.1 did not answer within 0.2 s"


SENDER = """
import sys
from pathlib import Path
from jobs.ledger import Ledger
from jobs.notification import report_ends
from jobs.settings import Settings
from jobs.settings_groups import NotifySettings
settings = Settings(home=Path(sys.argv[1]), notify=NotifySettings(url=sys.argv[2]))
report_ends(Ledger.of(settings), settings)
"""


def test_a_sender_that_is_killed_is_replaced(rig: Rig, receiver: Receiver) -> None:
    settings, job = hooked(rig, url=receiver.url), ended(rig)
    receiver.answer.clear()
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(rig.folder), receiver.url])
    assert receiver.came.wait(240)
    assert report_ends(rig.ledger, settings) == []
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    receiver.answer.set()
    make_due(rig)
    assert report_ends(rig.ledger, settings) == [Reported(job.id, 2)]
    assert [view["job"] for view in receiver.views] == [job.id, job.id]


def script(folder: Path, text: str) -> str:
    path = folder / "hook with a space.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_gets_the_view_and_no_shell_reads_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = script(
        rig.folder,
        f'cat > "$1"; echo "$NIGHTJAR_JOB $NIGHTJAR_STATE [$2] $SPEECH_NOTIFY__SECRET$speech_notify__secret" > "{rig.folder}/said"',
    )
    monkeypatch.setenv("SPEECH_NOTIFY__COMMAND", f"'{hook}' '{rig.folder}/got' '$(id); x'")
    monkeypatch.setenv("SPEECH_NOTIFY__SECRET", SECRET)
    # Settings are read from it too.
    monkeypatch.setenv("speech_notify__secret", SECRET)
    notify = load_settings().notify
    job = ended(rig, name="`touch here`")
    assert report_ends(rig.ledger, rig.settings.model_copy(update={"notify": notify})) == [Reported(job.id, 1)]
    assert json.loads((rig.folder / "got").read_text())["name"] == "`touch here`"
    assert (rig.folder / "said").read_text() == f"{job.id} completed [$(id); x] \n"


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
    assert not any("sleep\0" in Path(f"/proc/{child}/cmdline").read_text() for child in children if Path(f"/proc/{child}").exists())


def test_a_worker_reports_the_ends_that_it_finds(rig: Rig, receiver: Receiver) -> None:
    job = ended(rig)
    rig.ledger.retire_worker(WORKER.id)
    runtime = Runtime(hooked(rig, url=receiver.url))
    runtime.start()
    assert receiver.came.wait(240)
    runtime.drain()
    runtime.stop()
    assert [view["job"] for view in receiver.views] == [job.id]


def test_without_a_hook_nothing_is_claimed(rig: Rig, receiver: Receiver) -> None:
    job = ended(rig)
    assert report_ends(rig.ledger, rig.settings) == []
    assert report_ends(rig.ledger, hooked(rig, url=receiver.url)) == [Reported(job.id, 1)]


@pytest.mark.parametrize(("attempts", "tries", "again"), [(20, 3, 0.0), (2, 2, None), (1, 1, None)])
def test_a_run_names_the_ends_that_no_try_reported(rig: Rig, attempts: int, tries: int, again: float | None) -> None:
    job = ended(rig)
    settings = hooked(rig, command=["false"], attempts=attempts)
    assert report_ends_with_retries(rig.ledger, settings, 3, 0.0) == [Reported(job.id, tries, "the command ended with status 1", again)]


def test_a_run_names_no_end_that_a_later_try_reported(rig: Rig, receiver: Receiver) -> None:
    ended(rig)
    receiver.statuses += [500, 503]
    assert report_ends_with_retries(rig.ledger, hooked(rig, url=receiver.url), 3, 0.0) == []
    assert len(receiver.requests) == 3


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "https://", "host/path", ""])
def test_an_address_of_another_kind_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_NOTIFY__URL", url)
    with pytest.raises(ConfigError, match=r"notify\.url"):
        load_settings()
