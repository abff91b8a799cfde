"""Jobs of before turns could be chosen keep their meaning: the one user's text, its seed, their hashes and their keys."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from jobs.export import export
from jobs.ingest import SubmitOptions, submit
from jobs.ledger import Ledger, migrate
from jobs.ledger.records import ItemState, JobSpec
from jobs.settings import Schedule, Settings
from jobs.spec import item_seed
from jobs.store import FolderStore
from pipelines.errors import ErrorCode, ServiceError
from pipelines.request import Message, SynthesisRequest
from tests.support.fakes import FakePipeline
from tests.support.ledger_kit import execute
from tests.support.worker_rig import WORKER, Rig
from worker.nightly import is_mended

HOME = Path(__file__).parents[2] / "support" / "home_before_turns"
JOB = "01m81yarqm5nn48j0r341j7eng"
SPEC = JobSpec("hibari", "0.2.1", seed=5, format="flac")
SPEC_SHA = "08c8ace6736d4f9afd5e42791d3c5faab7d8faf9aeb9e948d4c09c1d3cfb1c26"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[Ledger, FolderStore]]:
    """The home, brought to this version."""
    shutil.copytree(HOME, tmp_path / "home")
    store = FolderStore(tmp_path / "home")
    path = tmp_path / "home" / "ledger.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript((HOME / "ledger.sql").read_text().replace("{store}", store.url))
        # The key is made of input, spec and store.
        (input_sha,) = connection.execute("SELECT input_sha256 FROM jobs").fetchone()
        key = hashlib.sha256(json.dumps([input_sha, SPEC_SHA, store.url], separators=(",", ":")).encode()).hexdigest()
        connection.execute("UPDATE jobs SET idempotency_key = ?", [key])
    connection.close()
    ledger = Ledger.open(f"sqlite:///{path}")
    ledger.migrate()
    yield ledger, store
    ledger.close()


def test_it_opens_from_the_tables_of_the_first_version(home: tuple[Ledger, FolderStore]) -> None:
    ledger, _ = home
    now = list(ledger.items(JOB))
    migrate.downgrade(ledger.database, "0001")
    with pytest.raises(ServiceError, match="older version"):
        ledger.check_schema()
    ledger.migrate()
    assert list(ledger.items(JOB)) == now
    assert ledger.status(JOB).items.done == 2


def test_its_exports_pair_audio_with_the_users_text(home: tuple[Ledger, FolderStore], tmp_path: Path) -> None:
    ledger, store = home
    assert ledger.job(JOB).spec_sha == SPEC_SHA
    to = tmp_path / "espnet.jsonl"
    report = export(ledger, store, JOB, "espnet", str(to))
    assert (report.items, report.left_out) == (2, 0)
    both, asked = [json.loads(line)["messages"] for line in to.read_text().splitlines()]
    first, second = [f"home/jobs/{JOB}/audio/00000/{name}.flac" for name in ("000000000-both", "000000001-asked")]
    assert both == [["user", "text", "Yes?"], ["user", "audio", first], ["assistant", "text", "No."]]
    assert asked == [["user", "text", "Good."], ["assistant", "audio", second]]
    export(ledger, store, JOB, "nemo", str(to))
    assert [json.loads(line)["text"] for line in to.read_text().splitlines()] == ["Yes?", "Good."]
    # As its workers wrote it, and what every export says of an item.
    export(ledger, store, JOB, "manifest", str(to))
    assert [list(json.loads(line))[-4:] for line in to.read_text().splitlines()] == [["spec_sha", "text", "model", "voice"]] * 2


def test_its_ids_are_as_they_were(home: tuple[Ledger, FolderStore]) -> None:
    ledger, _ = home
    execute(ledger, "UPDATE items SET example_id = :id WHERE idx = 1", id="chat:turn1")
    assert [row.id for row in ledger.items(JOB)] == ["both", "chat:turn1"]


def test_the_same_submit_finds_it(home: tuple[Ledger, FolderStore], tmp_path: Path) -> None:
    ledger, store = home
    source, settings = str(tmp_path / "home" / "in.jsonl"), Settings()
    found = submit(settings, ledger, store, source, SPEC)
    assert (found.job.id, found.created) == (JOB, False)
    asked = submit(settings, ledger, store, source, JobSpec("hibari", "0.2.1", seed=5, format="flac", speak="auto"))
    assert (asked.job.id != JOB, asked.created) == (True, True)
    assert asked.job.spec_sha != SPEC_SHA
    execute(ledger, "UPDATE jobs SET idempotency_key = 'mine' WHERE id = :job", job=JOB)
    mine = SubmitOptions(idempotency_key="mine")
    assert submit(settings, ledger, store, source, SPEC, options=mine).job.id == JOB
    with pytest.raises(ServiceError) as caught:
        submit(settings, ledger, store, source, JobSpec("hibari", "0.2.1", seed=6, format="flac"), options=mine)
    assert caught.value.code is ErrorCode.LEDGER_STATE


def test_an_ingest_that_was_stopped_goes_on_in_its_meaning(home: tuple[Ledger, FolderStore], tmp_path: Path) -> None:
    ledger, store = home
    execute(ledger, "DELETE FROM items")
    execute(ledger, "DELETE FROM shards")
    execute(ledger, "UPDATE jobs SET state = 'ingesting', lines_read = 0, total_items = 0, finished_at = NULL")
    result = submit(Settings(), ledger, store, str(tmp_path / "home" / "in.jsonl"), SPEC)
    assert (result.job.id, result.items) == (JOB, 2)
    # The same lines in the same object.
    ((key, _),) = ledger.shard_inputs(JOB).values()
    assert key == f"jobs/{JOB}/input/000000.jsonl.zst"


def test_its_open_items_are_made_as_before(home: tuple[Ledger, FolderStore], tmp_path: Path) -> None:
    ledger, store = home

    class Listening(FakePipeline):
        def submit(self, request: SynthesisRequest):
            heard.append(request)
            return super().submit(request)

    heard: list[SynthesisRequest] = []
    before = next(iter(ledger.items(JOB))).artifact
    assert before is not None
    execute(ledger, "UPDATE items SET state = 0, attempts = 0 WHERE idx = 0")
    execute(ledger, "DELETE FROM artifacts WHERE idx = 0")
    execute(ledger, "UPDATE shards SET state = 'ready', n_done = 1")
    execute(ledger, "UPDATE jobs SET state = 'running', finished_at = NULL")
    store.delete(before.key)
    rig = Rig(tmp_path, Listening())
    rig.ledger.close()
    rig.ledger, rig.store = ledger, store  # type: ignore[assignment]
    ledger.register_worker(WORKER)
    rig.runner = rig.runner_on(ledger)
    rig.run_next()
    rig.writer.close()
    rig.pipelines.close()
    (request,) = heard
    # The whole dialogue, with the seed of the place behind it.
    assert request.messages == (Message("user", "text", "Yes?"), Message("assistant", "text", "No."))
    assert request.seed == before.seed == item_seed(5, "both", 2)
    (made, _) = ledger.items(JOB)
    assert (made.state, made.artifact and made.artifact.seed) == (ItemState.DONE, before.seed)


def test_a_night_of_before_is_not_another_night_now(home: tuple[Ledger, FolderStore], tmp_path: Path) -> None:
    ledger, store = home
    values = {"input": str(tmp_path / "home" / "in.jsonl"), "model": "hibari", "seed": 5, "format": "flac", "qa": "off"}
    execute(ledger, "UPDATE jobs SET state = 'cancelled'")
    job = ledger.job(JOB)
    for speak, mended in ((None, False), ("user", True)):
        schedule = Schedule(**values, store_url=str(store.root), speak=speak)  # type: ignore[arg-type]
        settings = Settings(schedules={"news": schedule})
        assert is_mended(settings, job, "news", date(2026, 11, 20)) is mended
