"""A job in Python whose items are made by other hands: what its items say, and how long it is waited for."""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jobs.checks import Quality
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import Done, JobSpec
from jobs.settings import Settings
from jobs.store import open_store
from nightjar.job import POLL_SECONDS, Job
from nightjar.local_thread import LocalThread
from pipelines.errors import InputError
from tests.support import ledger_kit
from tests.support.export_kit import run_all
from tests.support.ledger_kit import done, lease_next

TALK = {"example_id": "talk", "messages": [["user", "text", "Who goes?"], ["assistant", "text", "A friend."]]}
QUALITY = Quality(meters={"asr": {}})
ONE = {"example_id": "one", "messages": [["user", "text", "Good evening."]]}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def job(settings: Settings) -> Iterator[Job]:
    """A job that was submitted, of two dialogues with three items."""
    ledger = Ledger(settings.ledger_url)
    ledger.migrate()
    source = settings.home / "in.jsonl"
    source.write_text(f"{json.dumps(TALK)}\n{json.dumps(ONE)}\n")
    store = open_store(settings.effective_store_url)
    made = Job(
        submit(settings, ledger, store, str(source), JobSpec("hibari", speak="all", quality=QUALITY)).job.id,
        settings,
    )
    ledger.close()
    yield made
    made.close()


def test_an_item_has_the_text_of_its_own_turn(settings: Settings, job: Job) -> None:
    ledger = Ledger(settings.ledger_url)
    run_all(ledger, open_store(settings.effective_store_url), job.id, 0.1)
    ledger.close()
    expected = [("talk", "Who goes?"), ("talk", "A friend."), ("one", "Good evening.")]
    assert [(item.example_id, item.text) for item in job] == expected
    assert [item.audio.text for item in job.items()] == [text for _, text in expected]


def test_a_dataset_with_a_filter_stands_beside_the_others(settings: Settings, job: Job) -> None:
    ledger = Ledger(settings.ledger_url)
    scores = {"talk": {"wer": 0.1}, "one": {"wer": 0.3}}
    run_all(ledger, open_store(settings.effective_store_url), job.id, 0.1, scores=scores)
    ledger.close()
    for where, count in ((None, 3), ("wer < 0.2", 2), ("wer > 0.2", 1), ("wer<0.2", 2)):
        assert len(job.to_datasets(where=where)) == count
    assert len(list((settings.home / "exports" / job.id).iterdir())) == 3


@pytest.mark.timeout(45)
def test_a_wait_ends_with_its_time(job: Job) -> None:
    begun = time.monotonic()
    assert job.wait(2 * POLL_SECONDS) is job
    assert time.monotonic() >= begun + 2 * POLL_SECONDS
    assert (job.state, job.done) == ("ready", False)


def test_a_loop_gives_each_item_once_while_its_shard_goes_on(settings: Settings, job: Job) -> None:
    ledger = Ledger(settings.ledger_url)
    lease, found = lease_next(ledger), queue.SimpleQueue[int]()
    loop = threading.Thread(target=lambda: [found.put(item.index) for item in job], daemon=True)
    loop.start()
    for index in range(3):
        ledger.commit(lease.ticket, [done(index)])
        assert found.get(timeout=240) == index
    ledger.finish_shard(lease.ticket)
    loop.join(240)
    assert not loop.is_alive(), "it waits on after the last item"
    assert found.empty()
    ledger.close()


@pytest.mark.parametrize("waits", [list, Job.wait])
def test_an_interrupt_stops_the_run_of_a_job_here(job: Job, waits: Callable[[Job], Any]) -> None:
    """In a notebook the program goes on after it."""
    stops: list[bool] = []

    class Running:
        """A run whose program is interrupted while it waits."""

        error = None

        @property
        def stopped(self) -> bool:
            signal.raise_signal(signal.SIGINT)
            return False

        def stop(self) -> None:
            stops.append(True)

    job._thread = Running()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        waits(job)
    assert stops == [True]


@pytest.mark.parametrize("failed", [False, True])
def test_a_program_that_failed_does_not_wait_for_its_run(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setattr(sys, "last_type", ValueError if failed else None, raising=False)

    class Ended(LocalThread):
        """Whose end is not waited for."""

        def join(self, timeout: float | None = None) -> None: ...

    run: Any = None
    thread = Ended(run, quiet=True)
    thread.end_with_program()
    assert (thread._stop_request.number is not None) is failed


def test_codes_are_refused_as_audio(settings: Settings) -> None:
    ledger = Ledger(settings.ledger_url)
    ledger.migrate()
    store = open_store(settings.effective_store_url)
    job_id = ledger_kit.submit(ledger, (1,), spec=JobSpec("fake", output="codes"), store_url=store.url).id
    stored = store.put("codes/0.safetensors", b"no audio")
    made = msgspec.structs.replace(
        done(0).artifacts[0], kind="codes", key=stored.key, sha256=stored.sha256, bytes=8
    )
    ledger.commit(lease_next(ledger).ticket, [Done(0, (made,))])
    ledger.close()
    with closing(Job(job_id, settings)) as job, pytest.raises(InputError) as caught:
        next(job.items()).audio  # noqa: B018 - raises
    assert caught.value.code == "input.audio_unreadable"
