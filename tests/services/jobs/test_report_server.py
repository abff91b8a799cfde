"""The served report: a person decides in a real browser, and nobody else does."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.checks import BASIC
from jobs.export.manifest import renew_manifest
from jobs.ledger.records import Decision, Job
from jobs.recent_jobs import FoundJob
from jobs.report.server import MAX_BYTES, ReportServer
from tests.support.browser import Browser, require_browser
from tests.support.export_kit import export
from tests.support.report_kit import HOSTILE, ClippingPipeline, Desk, open_desk, read_page

TEXTS = ["a good one", "[[clipped]] bad", f"[[clipped]] {HOSTILE}", "another", "[[fail:synth.nan]]"]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with open_desk(tmp_path, ClippingPipeline()) as desk:
        yield desk


@pytest.fixture
def job(desk: Desk) -> Job:
    return desk.job(TEXTS, quality=BASIC)


@pytest.fixture
def server(desk: Desk, job: Job) -> Iterator[ReportServer]:
    with ReportServer(FoundJob(desk.rig.settings, desk.rig.ledger, job)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: ReportServer,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str | None] | None = None,
) -> tuple[int, bytes, dict[str, str]]:
    """(status, body, headers) of an answer; the request has the right `Host` and, if it sends something, `Origin`."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    own: dict[str, str | None] = {"Host": server.origin.removeprefix("http://")}
    if method == "POST":
        own |= {"Origin": server.origin, "Content-Length": str(len(sent))}
    connection.putrequest(method, path, skip_host=True)
    for name, value in (own | (headers or {})).items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(sent if method == "POST" else None)
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def hash_of(desk: Desk, job: Job, index: int) -> str:
    found = [
        one[index].sha256
        for kind in job.spec.audio_kinds
        if index in (one := desk.rig.ledger.artifacts_of(job.id, kind, [index]))
    ]
    return found[0] if found else ""


def decisions(desk: Desk, job: Job) -> dict[str, bool]:
    return {row.id: row.decision.accepted for row in desk.rig.ledger.items(job.id) if row.decision}


def test_the_page_plays_the_audio_of_every_item(desk: Desk, job: Job, server: ReportServer) -> None:
    status, page, headers = ask(server, "GET", f"/{server.key}/")
    assert (status, headers["Cache-Control"], headers["Content-Type"]) == (200, "no-store", "text/html")
    document = read_page(page.decode())
    sources = sorted(player.attributes["src"] for player in document.all("audio"))
    assert sources == [f"audio/{index}" for index in range(4)]
    for index in range(4):
        _, data, _ = ask(server, "GET", f"/{server.key}/audio/{index}")
        row = next(desk.rig.ledger.items(job.id, after=index - 1, limit=1))
        assert data[:4] == b"RIFF"
        assert (row.artifact is None) == (index in (1, 2))
    # One that has no audio can be refused only.
    groups = {group.attributes["data-index"]: group for group in document.all("div", class_="decide")}
    assert [len(groups[str(index)].all("button")) for index in range(5)] == [2, 2, 2, 2, 1]
    # A report in a file has no buttons, and its policy allows no requests.
    saved, _ = desk.report(job)
    assert saved.all("div", class_="decide") == []
    policies = [one.all("meta")[1].attributes["content"] for one in (document, saved)]
    assert ["connect-src 'self'" in policy for policy in policies] == [True, False]


def test_a_decision_is_about_the_audio_that_was_heard(desk: Desk, job: Job, server: ReportServer) -> None:
    def decide(index: int, accepted: bool, heard: str, reason: str = "") -> tuple[int, str]:
        status, body, _ = ask(server, "POST", f"/{server.key}/decisions", [index, accepted, heard, reason])
        return status, body.decode()

    assert decide(1, True, hash_of(desk, job, 0)) == (
        409,
        "Item 1 (item-1) has other audio now, so it cannot be accepted. "
        f"Leave it out; `nightjar items {job.id}` shows each item.",
    )
    assert decisions(desk, job) == {}
    status, said = decide(1, True, hash_of(desk, job, 1))
    assert (status, said.startswith("accepted by ")) == (200, True)
    status, said = decide(0, False, hash_of(desk, job, 0), "<b>noise</b>")
    assert (status, said.endswith(": <b>noise</b>")) == (200, True)
    assert decide(4, True, "")[0] == 409
    assert decide(4, False, "")[0] == 200
    assert decisions(desk, job) == {"item-1": True, "item-0": False, "item-4": False}
    # Failed items about which nobody has decided come first after a reload; the refused one was decided.
    document = read_page(ask(server, "GET", f"/{server.key}/")[1].decode())
    first = [group.attributes["data-index"] for group in document.all("div", class_="decide")]
    assert (first[0], "4" in first) == ("2", False)
    shown = [one.whole_text() for one in document.all("p", class_="decision")]
    assert any("<b>noise</b>" in text for text in shown)
    assert not any(one.text == "noise" for one in document.all("b"))


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "localhost"},
        {"Host": None},
        {"Host": "127.0.0.1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": None},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": ""},
    ],
    ids=str,
)
def test_other_sites_decide_nothing(
    desk: Desk, job: Job, server: ReportServer, headers: dict[str, str | None]
) -> None:
    asked = [1, True, hash_of(desk, job, 1), ""]
    status, body, got = ask(server, "POST", f"/{server.key}/decisions", asked, headers)
    assert (status, body, got["Content-Type"]) == (403, b"This address is of no report.", "text/plain")
    if "Host" in headers:
        assert ask(server, "GET", f"/{server.key}/", headers=headers)[0] == 403
    assert decisions(desk, job) == {}
    assert ask(server, "POST", f"/{server.key}/decisions", asked)[0] == 200


def test_the_key_is_needed(desk: Desk, job: Job, server: ReportServer) -> None:
    asked = [1, True, hash_of(desk, job, 1), ""]
    assert ask(server, "GET", f"/{server.key}/decisions", asked)[0] == 409
    assert len(server.key) >= 40
    for key in ("", server.key[:-1], f"{server.key}x", server.key.swapcase(), "%00", "../" + server.key):
        for method, path in (("GET", ""), ("GET", "audio/0"), ("POST", "decisions")):
            status, body, _ = ask(server, method, f"/{key}/{path}", asked)
            assert (status, b"RIFF" in body, server.key.encode() in body) == (403, False, False)
    assert decisions(desk, job) == {}
    with ReportServer(FoundJob(desk.rig.settings, desk.rig.ledger, job)) as other:
        assert other.key != server.key
        assert other.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[1, true, 5, 5]",
        b'[-1, true, "", ""]',
        b'[99, false, "", ""]',
        b'[9999999999999999999999, false, "", ""]',
        b'[1.5, true, "", ""]',
        b"\xff\xfe",
        b"[" * 5000,
        b'[1, false, "", "' + b"x" * MAX_BYTES + b'"]',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_hostile_bodies_are_answered(desk: Desk, job: Job, server: ReportServer, body: bytes) -> None:
    assert ask(server, "POST", f"/{server.key}/decisions", body)[0] == 409
    assert decisions(desk, job) == {}


def test_hostile_places_and_lengths_are_answered(desk: Desk, server: ReportServer) -> None:
    for place in (
        "audio/",
        "audio/-1",
        "audio/99",
        "audio/1e3",
        "audio/" + "9" * 400,
        "audio/4",
        "../ledger",
        "x",
    ):
        status, _, got = ask(server, "GET", f"/{server.key}/{place}")
        # Errors are no pages: a message may have the id of an item.
        assert (status, got["Content-Type"]) == (409, "text/plain"), place
    for length in ("x", "1e3", ""):
        headers: dict[str, str | None] = {"Content-Length": length}
        assert ask(server, "POST", f"/{server.key}/decisions", b"[]", headers)[0] == 409, length
    for method in ("PUT", "DELETE", "OPTIONS"):
        assert ask(server, method, f"/{server.key}/")[0] == 501
    long = "x" * 4000
    hostile: dict[str, Any] = {"reason": "\x00\u202e" + long}
    status, said, _ = ask(server, "POST", f"/{server.key}/decisions", [4, False, "", hostile["reason"]])
    assert status == 200
    row = list(desk.rig.ledger.items(server.job_id))[4]
    assert row.decision is not None
    assert row.decision.reason == ("\ufffd\u202e" + long)[:2000]
    assert said.decode().startswith("refused by ")


COMPLAINTS = {"Log.entryAdded", "Runtime.exceptionThrown", "Page.javascriptDialogOpening"}
ROW = "[...document.querySelectorAll('tr[data-rank]')].find(row => row.querySelector('.index').innerText === '%d')"


def press(browser: Browser, index: int, word: str) -> str:
    """Presses a button of an item as a person does, and returns what its row then says."""
    row = ROW % index
    before = browser.value(f"{row}.querySelector('.decision').innerText")
    browser.value(
        f"[...{row}.querySelectorAll('.decide button')].find(one => one.innerText === '{word}').focus()"
    )
    browser.press("Enter")
    said = f"{row}.querySelector('.decision').innerText"
    browser.until(lambda: browser.value(said) != before)
    return str(browser.value(said))


def test_a_person_decides_in_a_browser(desk: Desk, job: Job, server: ReportServer) -> None:
    with Browser(require_browser()) as browser:
        browser.open(f"{server.origin}/{server.key}/")
        length = browser.value(
            f"new Promise(done => {{ const player = {ROW % 2}.querySelector('audio'); player.preload = 'auto';"
            "player.onloadedmetadata = () => done(player.duration); player.onerror = () => done(player.error.message); player.load() })"
        )
        assert isinstance(length, float)
        assert length > 0
        assert press(browser, 2, "Accept").startswith("accepted by ")
        browser.value("document.getElementById('reason').value = ' <i>hums</i> '")
        assert press(browser, 0, "Refuse").endswith(": <i>hums</i>")
        assert press(browser, 4, "Refuse").endswith(": <i>hums</i>")
        assert decisions(desk, job) == {"item-2": True, "item-0": False, "item-4": False}
        # The focus stays, so that the next key is for the same item; a change of mind is the last decision.
        assert browser.value("document.activeElement.innerText") == "Refuse"
        assert press(browser, 0, "Accept").startswith("accepted by ")
        assert decisions(desk, job)["item-0"]
        # Meanwhile the item was made again: the page still has the audio of before.
        assert desk.rig.ledger.retry(job.id, None) == 2
        desk.rig.run_next()
        assert "has other audio now" in press(browser, 1, "Accept")
        assert browser.value(f"{ROW % 1}.querySelector('.decision').classList.contains('mark')")
        browser.open(f"{server.origin}/{server.key}/")
        assert press(browser, 1, "Accept").startswith("accepted by ")
        assert decisions(desk, job)["item-1"]
        assert browser.value("window.hit") is None
        assert [event for event in browser.events if event[0] in COMPLAINTS] == []
        asked = [one["request"]["url"] for name, one in browser.events if name == "Network.requestWillBeSent"]
        assert all(url.startswith((f"{server.origin}/", "data:")) for url in asked), asked


def test_the_page_of_another_site_decides_nothing_in_a_browser(
    desk: Desk, job: Job, server: ReportServer, tmp_path: Path
) -> None:
    """Even one that knows the key."""
    with Browser(require_browser()) as browser:
        page = tmp_path / "evil.html"
        page.write_text("<!doctype html><title>evil</title>")
        browser.open(page.as_uri())
        body = json.dumps([1, True, hash_of(desk, job, 1), ""])
        place = f"{server.origin}/{server.key}/decisions"
        for more in ("", ", mode: 'no-cors', headers: {'Content-Type': 'text/plain'}"):
            answer = f"fetch('{place}', {{method: 'POST', body: '{body}'{more}}}).then(one => one.status, one => 'refused')"
            assert browser.value(answer) in ("refused", 0)
        browser.value(
            "new Promise(done => { const form = document.createElement('form'), frame = document.createElement('iframe');"
            f"frame.name = 'f'; form.target = 'f'; form.method = 'post'; form.enctype = 'text/plain'; form.action = '{place}';"
            f"const field = document.createElement('input'); field.name = '{body[:-3]}'; field.value = '\"]';"
            "form.append(field); document.body.append(frame, form); frame.onload = () => done(1); form.submit() })"
        )
        assert decisions(desk, job) == {}


def newest(desk: Desk, job: Job) -> list[int]:
    """The indexes in the manifest with the highest number."""
    found = [info.key for info in desk.rig.store.list(f"jobs/{job.id}/manifest.")]
    number = {key: int(key.split(".")[1]) if key.count(".") > 1 else 1 for key in found}
    return [json.loads(line)["index"] for line in desk.rig.store.get(max(found, key=number.__getitem__)).splitlines()]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_manifest_follows_decisions_whatever_ends_the_server(
    desk: Desk, job: Job, number: signal.Signals
) -> None:
    folder = desk.rig.folder
    arguments = ["report", job.id, "--out", str(folder), "--serve", "--json"]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "SPEECH_DEBUG": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "jobs", *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stdout is not None
        view = json.loads(process.stdout.readline())
        assert (view["schema"], view["job"]) == ("nightjar.report_server/1", job.id)
        address, key = view["url"].removeprefix("http://").rstrip("/").split("/")
        connection = http.client.HTTPConnection(address, timeout=60)
        body = json.dumps([0, False, hash_of(desk, job, 0), "hums"])
        connection.request("POST", f"/{key}/decisions", body, {"Origin": f"http://{address}"})
        assert connection.getresponse().status == 200
        time.sleep(0.2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    killed = number == signal.SIGKILL
    assert (process.returncode, errors) == (-number if killed else 0, "")
    assert decisions(desk, job) == {"item-0": False}
    assert newest(desk, job) == ([0, 3] if killed else [3])
    if killed:
        export(desk.rig.ledger, desk.rig.store, job.id, "manifest", str(folder / "x.jsonl"))
        assert newest(desk, job) == [3]
    # A change of mind makes a manifest with the content of the first one, and it is the newest.
    desk.rig.ledger.decide(job.id, ["item-1"], Decision(True, "ada"))
    renew_manifest(desk.rig.ledger, desk.rig.store, job.id)
    assert newest(desk, job) == [1, 3]
    desk.rig.ledger.decide(job.id, ["item-1"], Decision(False, "ada"))
    renew_manifest(desk.rig.ledger, desk.rig.store, job.id)
    assert newest(desk, job) == [3]
    for wrong in ("--embed", "--to=x.html"):
        done = subprocess.run(
            [sys.executable, "-m", "jobs", *arguments, wrong],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "--serve writes no file" in done.stderr) == (2, True)


def test_what_people_decided_is_in_a_saved_report(desk: Desk, job: Job) -> None:
    desk.rig.ledger.decide(job.id, ["item-1"], Decision(True, "ada"))
    desk.rig.ledger.decide(job.id, ["item-3"], Decision(False, "<ben>", HOSTILE))
    document, _ = desk.report(job)
    said = " ".join(document.whole_text().split())
    assert "Decided by people" in said
    assert "1 accepted, 1 refused" in said
    shown = [" ".join(one.whole_text().split()) for one in document.all("p", class_="decision")]
    assert "accepted by ada" in shown
    assert any(text.startswith("refused by <ben>: </script></td>") for text in shown)
    assert document.all("ben") == []
