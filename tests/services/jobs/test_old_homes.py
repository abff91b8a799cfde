"""A home that an earlier version left half done is read, exported, verified and finished by this one."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.export import export
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import ItemState, JobState, ShardState
from jobs.ledger.status import read_with_driver, status_and_errors
from jobs.settings import Settings
from jobs.spec import item_seed
from jobs.store import FolderStore
from jobs.verify import ObjectCheck, expected_objects
from pipelines.errors import ErrorCode
from pipelines.request import Message, SynthesisRequest
from tests.support.fakes import FakePipeline
from tests.support.worker_rig import WORKER, Rig

HOME = Path(__file__).parents[2] / "support" / "home_half_done"
JOB = "01m82cxvbf9gd73qc850cvphp6"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[Ledger, FolderStore]]:
    folder = tmp_path / "home"
    shutil.copytree(HOME, folder)
    (folder / ".nightjar").mkdir()
    connection = sqlite3.connect(folder / ".nightjar" / "ledger.sqlite")
    connection.executescript((HOME / "ledger.sql").read_text())
    connection.close()
    ledger = Ledger.open(Settings(home=folder).ledger_url)
    ledger.migrate()
    ledger.check_schema()
    yield ledger, FolderStore(folder)
    ledger.close()


def test_its_status_is_read(home: tuple[Ledger, FolderStore]) -> None:
    ledger, store = home
    seen = read_with_driver(Settings(home=store.root).ledger_url, lambda reader: status_and_errors(reader, JOB[:12]))
    assert seen is not None
    for status, errors in (seen, (ledger.status(JOB), ledger.error_counts(JOB))):
        assert (status.job.state, status.job.labels, status.job.store_url) == (JobState.RUNNING, {"split": "dev"}, store.url)
        assert (status.items.total, status.items.done, status.items.failed, status.items.pending) == (6, 4, 1, 1)
        assert status.shards == {ShardState.DONE: 2, ShardState.LEASED: 1}
        assert status.audio_ms == 440
        assert status.busy_seconds == pytest.approx(60.2, abs=0.1), "the lease ran out a minute after the last heartbeat"
        assert status.workers == 0
        assert errors == {ErrorCode.SYNTH_NAN: 1, ErrorCode.INPUT_BAD_JSON: 1}
    assert ledger.statuses()[0].items == seen[0].items


def test_what_it_made_is_whole_and_exported(home: tuple[Ledger, FolderStore], tmp_path: Path) -> None:
    ledger, store = home
    assert list(ObjectCheck(ledger, store, ledger.job(JOB))) == []
    assert len([*expected_objects(ledger, JOB)]) == 7, "four audios and three inputs"
    to = tmp_path / "manifest.jsonl"
    export(ledger, store, JOB, "manifest", str(to))
    lines = [json.loads(line) for line in to.read_text().splitlines()]
    written = "".join(store.get(f"jobs/{JOB}/manifest/{number:06d}.jsonl").decode() for number in range(2))
    own = [{name: value for name, value in line.items() if name not in ("model", "voice")} for line in lines[:3]]
    assert own == [json.loads(line) for line in written.splitlines()], "as its worker wrote them"
    assert [(line["example_id"], line["text"], line["message_index"]) for line in lines] == [
        ("talk", "Yes?", 0),
        ("talk", "Why?", 2),
        ("ask", "Good.", 0),
        ("late", "Good night.", 0),
    ]


def test_it_is_resumed_where_it_stopped(home: tuple[Ledger, FolderStore], tmp_path: Path) -> None:
    ledger, store = home

    class Listening(FakePipeline):
        def submit(self, request: SynthesisRequest):
            heard.append(request)
            return super().submit(request)

    heard: list[SynthesisRequest] = []
    before = {row.index: row.artifact for row in ledger.items(JOB) if row.artifact}
    assert ledger.reconcile().expired_leases == 1
    ledger.wake(JOB)
    rig = Rig(tmp_path, Listening())
    rig.ledger.close()
    rig.ledger, rig.store = ledger, store  # type: ignore[assignment]
    ledger.register_worker(WORKER)
    rig.runner = rig.runner_on(ledger)
    rig.run_next()
    rig.writer.close()
    rig.pipelines.close()
    (request,) = heard
    assert (request.messages, request.seed) == ((Message("user", "text", "Bye."),), item_seed(7, "last", 0))
    after = {row.index: row for row in ledger.items(JOB)}
    assert {index: after[index].artifact for index in before} == before
    assert [row.state for row in after.values()].count(ItemState.DONE) == 5
    assert ledger.job(JOB).state is JobState.COMPLETED_WITH_ERRORS
    assert list(ObjectCheck(ledger, store, ledger.job(JOB))) == []


def test_the_same_submit_finds_it(home: tuple[Ledger, FolderStore]) -> None:
    ledger, store = home
    found = submit(Settings(home=store.root), ledger, store, str(store.root / "in.jsonl"), ledger.job(JOB).spec)
    assert (found.job.id, found.created) == (JOB, False)
