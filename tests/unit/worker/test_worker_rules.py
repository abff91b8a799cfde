"""Rules of leases, isolation and adoption that only show when something has gone wrong before."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import ingest
from jobs.ledger import Ledger, control
from jobs.ledger.records import ItemState, JobSpec, JobState, Ticket
from jobs.settings import Settings
from jobs.shard_file import ShardLine
from jobs.store import open_store
from pipelines.audio import encode
from pipelines.errors import ErrorCode
from pipelines.registry import register_pipeline
from pipelines.request import Generation, Message, Speech, SynthesisRequest
from tests.support.fake_worker import fake_card
from tests.support.fakes import SAMPLE_RATE, FakeClock, FakePipeline, sine
from tests.support.ledger_kit import execute, failed, lease_next, rows, states, submit
from tests.support.times import with_times
from tests.support.worker_rig import WORKER, Rig, wait_for
from worker.leases import LeaseGoneError
from worker.maintenance import Maintenance
from worker.result_writer import Answer, ItemDraw
from worker.runtime import Handling, Runtime


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.sqlite")
    ledger.migrate()
    yield ledger
    ledger.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path, clock=FakeClock(), lease_seconds=60.0)
    yield rig
    rig.close()
    forget()


def test_a_shard_whose_next_crash_decides_runs_with_no_other_beside_it(tmp_path: Path) -> None:
    shards: list[list[tuple]] = []

    class Watching(FakePipeline):
        """Notes how the shards stand when each item begins."""

        def submit(self, request: SynthesisRequest) -> Future[Speech]:
            shards.append(rows(runtime.ledger, "SELECT no, state FROM shards ORDER BY no"))
            return super().submit(request)

    pipeline, gate = Watching(), tmp_path / "gate"
    forget = register_pipeline("fake", fake_card(), lambda **_: pipeline)
    settings = with_times(Settings(home=tmp_path), shard_items=1)
    runtime = Runtime(settings)
    runtime.ledger.migrate()
    lines = [
        {"example_id": str(number), "messages": [["user", "text", text]]}
        for number, text in enumerate((f"[[until:{gate}]]", "next"))
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    store = open_store(settings.effective_store_url)
    ingest.submit(settings, runtime.ledger, store, str(source), JobSpec("fake"))
    execute(
        runtime.ledger,
        "UPDATE shards SET epoch = 1, attempts = (SELECT max_attempts - 1 FROM jobs) WHERE no = 1",
    )
    ended: list[Handling] = []
    threads = [
        threading.Thread(target=lambda ticket=ticket: ended.append(runtime.handle(ticket)))
        for ticket in runtime.ledger.take_ready(2)
    ]
    try:
        threads[0].start()
        wait_for(lambda: len(pipeline.submitted) == 1)
        threads[1].start()
        # The other one waits for the lock, or has begun if nothing holds it.
        wait_for(lambda: runtime.demand.suspended() or len(pipeline.submitted) == 2)
        assert len(pipeline.submitted) == 1
        gate.touch()
        for thread in threads:
            thread.join(240)
        assert (ended, len(pipeline.submitted)) == (["ran"] * 2, 2)
        assert shards == [[(0, "leased"), (1, "queued")], [(0, "done"), (1, "leased")]]
    finally:
        gate.touch()
        runtime.drain()
        runtime.stop()
        forget()


def test_an_object_that_stands_there_already_is_left_alone(rig: Rig) -> None:
    """Of an engine that has changed since, or of another ledger: whoever put it may still commit it."""
    job = rig.submit(["text"])
    other = encode(sine("A text that is longer.", 1), SAMPLE_RATE, "wav")
    key = f"jobs/{job.id}/audio/00000/000000000-item-0.wav"
    rig.store.put(key, other, metadata={"spec_sha": "other"})
    rig.run_next()
    (item,) = rig.items(job)
    assert item.artifact is not None
    assert rig.store.get(key) == other
    assert item.artifact.key == key.replace(".wav", ".2.wav")
    assert rig.store.get(item.artifact.key) == encode(sine("text", item.artifact.seed), SAMPLE_RATE, "wav")


def test_a_result_whose_lease_is_lost_is_not_stored(rig: Rig) -> None:
    rig.submit(["text"])
    held = rig.leases.hold(rig.claim_next())
    held.give_up("lost")
    rig.writer.ensure_threads(rig.store, "wav")
    request = SynthesisRequest("one", (Message("user", "text", "text"),), Generation(), 1)
    draw = ItemDraw(ShardLine(0, 1, "item-0", request.messages, Generation(), 0))
    draw.request = request
    answers: list[Answer] = []
    settle = lambda _, answer: answers.append(answer)  # noqa: E731
    about: dict[str, Any] = {"packs": None, "codec": None, "abandoned": False}
    shard: Any = SimpleNamespace(held=held, store=rig.store, settle=settle, **about)
    rig.writer.work(shard, draw, Speech(sine("text", 1), SAMPLE_RATE))
    wait_for(lambda: answers)
    assert isinstance(answers[0], LeaseGoneError)
    assert rig.audio() == {}


def test_retry_and_cancel_come_to_the_last_shard(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SHARDS_AT_ONCE", 2)
    job = submit(ledger, (1,) * 5)
    for _ in range(5):
        lease = lease_next(ledger)
        ledger.commit(lease.ticket, [failed(index, ErrorCode.SYNTH_NO_EOS) for index in lease.open_items])
        ledger.finish_shard(lease.ticket)
    assert ledger.retry(job.id, [ErrorCode.SYNTH_NO_EOS]) == 5
    assert states(ledger, job.id) == [ItemState.PENDING] * 5
    ledger.cancel(job.id)
    assert states(ledger, job.id) == [ItemState.SKIPPED] * 5
    assert ledger.job(job.id).state is JobState.CANCELLED


def test_a_lease_is_as_long_as_it_was_asked_for(ledger: Ledger) -> None:
    submit(ledger)
    (ticket,) = ledger.take_ready(1)
    lease = ledger.claim(ticket, "w1", 60.0)
    assert lease is not None
    for seconds in (60.0, 90.0):
        ((length,),) = rows(ledger, "SELECT lease_until - heartbeat_at FROM shards")
        assert length == pytest.approx(seconds, abs=0.01)
        assert ledger.heartbeat("w1", [lease.ticket], 90.0) == set()


def test_a_lease_is_renewed_from_the_moment_the_heartbeat_was_sent(rig: Rig) -> None:
    rig.submit(["text"])
    held = rig.leases.hold(rig.claim_next())
    clock = rig.clock
    assert isinstance(clock, FakeClock)

    def heartbeat(*arguments: Any) -> set[Ticket]:
        lost = rig.ledger.heartbeat(*arguments)
        clock.advance(50)
        return lost

    clock.advance(30)
    slow: Any = SimpleNamespace(heartbeat=heartbeat, worker_heartbeat=rig.ledger.worker_heartbeat)
    nothing: Any = SimpleNamespace()
    Maintenance(slow, rig.settings, WORKER, rig.leases, rig.metrics, clock, nothing, nothing).send_heartbeat()
    clock.advance(5)
    assert held.gone is None
    clock.advance(10)
    assert held.gone == "expired"
