"""`nightjar workers` on SQLite and on PostgreSQL: who works, on what, how fast, and who is quarantined,
draining or lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from jobs.cli import main
from jobs.doctor import workers
from jobs.ledger import Ledger
from jobs.ledger.status import RECENT_SECONDS, WorkerStatus, worker_statuses
from jobs.ledger.transaction import read_with_driver
from jobs.settings import Settings
from tests.support.ledger_kit import done, execute, expire, failed, lease_next, rows, submit, worker

BAD = "The worker of GPU 2 ended by signal 6 (SIGABRT), 5 times in a row without a finished item."


def by_id(ledger: Ledger, *, include_ended: bool = False) -> dict[str, WorkerStatus]:
    """Read in both ways, which agree."""
    found = ledger.worker_statuses(include_ended=include_ended)
    plain = read_with_driver(
        ledger.engine.url.render_as_string(hide_password=False).replace("postgresql+psycopg", "postgresql")
        if ledger.path is None
        else f"sqlite:///{ledger.path}",
        lambda reader: worker_statuses(reader, include_ended=include_ended),
    )
    assert plain is not None
    assert [(one.id, one.state, one.held) for one in plain] == [
        (one.id, one.state, one.held) for one in found
    ]
    return {one.id: one for one in found}


def test_what_a_worker_does_and_did_lately(ledger: Ledger) -> None:
    ledger.register_worker(worker("w1"))
    ledger.register_worker(worker("w2"))
    job = submit(ledger, (4, 4, 4), name="night")
    first = lease_next(ledger, "w1")
    ledger.commit(first.ticket, [done(0), done(1), failed(2), done(3)])
    ledger.finish_shard(first.ticket)
    second = lease_next(ledger, "w1")
    ledger.commit(second.ticket, [done(4)])
    # The second lease began 100 s ago, and runs; the first one was within it.
    execute(ledger, "UPDATE attempts SET started_at = started_at - 100 WHERE shard_no = 1")
    execute(ledger, "UPDATE attempts SET started_at = ended_at - 30 WHERE shard_no = 0")
    found = by_id(ledger)
    busy, idle = found["w1"], found["w2"]
    (held,) = busy.held
    assert (held.job, held.job_name, held.shard, held.items, held.ended_items) == (
        job.id,
        "night",
        1,
        4,
        1,
    )
    recent = busy.recent
    assert (recent.items_done, recent.items_failed, recent.audio_seconds) == (4, 1, 6.0)
    ((since,),) = rows(ledger, "SELECT started_at FROM attempts WHERE outcome IS NULL")
    assert recent.busy_seconds == pytest.approx(busy.heartbeat_at + busy.silent_seconds - since)
    assert recent.rtfx == pytest.approx(6.0 / recent.busy_seconds)
    assert (busy.state, idle.held, idle.recent.rtfx, idle.recent.items_done) == ("up", (), None, 0)
    execute(ledger, "UPDATE attempts SET ended_at = ended_at - :seconds", seconds=RECENT_SECONDS)
    assert by_id(ledger)["w1"].recent.items_done == 1


def test_a_shard_that_two_workers_made_counts_for_each_by_its_items(ledger: Ledger) -> None:
    for name in ("w1", "w2"):
        ledger.register_worker(worker(name))
    submit(ledger, (4,))
    first = lease_next(ledger, "w1")
    ledger.commit(first.ticket, [done(0), done(1), done(2)])
    expire(ledger, first)
    ledger.reconcile()
    second = lease_next(ledger, "w2")
    ledger.commit(second.ticket, [done(3)])
    ledger.finish_shard(second.ticket)
    execute(ledger, "UPDATE attempts SET ended_at = (SELECT max(ended_at) FROM attempts)")
    found = by_id(ledger)
    assert [(found[name].recent.items_done, found[name].recent.audio_seconds) for name in ("w1", "w2")] == [
        (3, 4.5),
        (1, 1.5),
    ]


def test_states_of_workers(ledger: Ledger) -> None:
    for name in ("silent", "lost", "long-lost", "draining", "retired", "up"):
        ledger.register_worker(worker(name))
    ledger.worker_heartbeat("draining", "draining")
    ledger.retire_worker("retired")
    ledger.report_quarantines("here", 7, "1", {"2": BAD})
    for name, seconds in (("silent", 61), ("lost", 3600), ("long-lost", 90_000)):
        execute(
            ledger,
            "UPDATE workers SET heartbeat_at = heartbeat_at - :seconds WHERE id = :name",
            seconds=seconds,
            name=name,
        )
    execute(ledger, "UPDATE workers SET state = 'lost' WHERE id IN ('lost', 'long-lost')")
    found = by_id(ledger)
    quarantine = found.pop("here-7-quarantine-2")
    assert (quarantine.state, quarantine.gpu, quarantine.state_reason) == ("quarantined", "2", BAD)
    assert {name: one.state for name, one in found.items()} == {
        "silent": "lost",
        "lost": "lost",
        "draining": "draining",
        "up": "up",
    }
    assert found["lost"].silent_seconds >= 3600
    assert by_id(ledger, include_ended=True).keys() == {*found, quarantine.id, "long-lost", "retired"}


def test_a_quarantined_worker_is_no_live_one_and_status_names_it(ledger: Ledger) -> None:
    job = submit(ledger)
    ledger.report_quarantines("here", 7, "1", {"2": BAD})
    status = ledger.status(job.id)
    assert (status.workers, status.quarantined_workers) == (0, 1)
    ledger.register_worker(worker("w1"))
    assert (ledger.status(job.id).workers, ledger.status(job.id).quarantined_workers) == (1, 1)
    # The process that starts it says that it works again.
    ledger.report_quarantines("here", 7, "1", {})
    assert ledger.status(job.id).quarantined_workers == 0
    # And one that is gone says nothing.
    ledger.report_quarantines("here", 7, "1", {"2": BAD})
    execute(ledger, "UPDATE workers SET heartbeat_at = heartbeat_at - 61 WHERE state = 'quarantined'")
    assert ledger.status(job.id).quarantined_workers == 0
    assert ledger.reconcile().stale_workers == 1
    assert [one.state for one in by_id(ledger).values()] == ["up", "lost"]


def test_doctor_warns_of_a_quarantined_worker(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    with closing(Ledger.of(settings)) as ledger:
        ledger.migrate()
        ledger.register_worker(worker("w1"))
        assert workers(settings) == ("1 live", "")
        ledger.report_quarantines("here", 7, "1", {"2": BAD})
        message, advice = workers(settings)
    assert message == "1 live, 1 quarantined."
    assert "nightjar workers" in advice


def said(
    ledger: Ledger,
    words: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> str:
    url = ledger.engine.url
    monkeypatch.setenv(
        "SPEECH_DATABASE_URL",
        f"sqlite:///{ledger.path}"
        if ledger.path is not None
        else str(url.render_as_string(False)).replace("+psycopg", ""),
    )
    assert main(words) == 0
    sys.stdout.flush()
    return capsysbinary.readouterr().out.decode()


def test_the_command_prints_a_table_and_json(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    ledger.register_worker(worker("w1"))
    job = submit(ledger, (2,))
    lease = lease_next(ledger, "w1")
    ledger.commit(lease.ticket, [done(0)])
    ledger.report_quarantines("here", 7, "1", {"2": BAD})
    table = said(ledger, ["workers"], monkeypatch, capsysbinary).splitlines()
    assert table[0].split()[:6] == ["HOST", "PID", "GPU", "MODEL", "STATE", "SINCE"]
    (row,) = [line for line in table if " up " in line]
    assert (f"{job.id[:10]}/0 1/2" in row, "fake" in row) == (True, True)
    (held,) = [line for line in table if " quarantined " in line]
    assert held.endswith(BAD)
    views = [
        json.loads(line)
        for line in said(ledger, ["workers", "--json"], monkeypatch, capsysbinary).splitlines()
    ]
    assert {view["schema"] for view in views} == {"nightjar.worker/1"}
    (up,) = [view for view in views if view["state"] == "up"]
    assert up["shards"] == [
        {
            "job": job.id,
            "job_name": "",
            "shard": 0,
            "items": 2,
            "ended_items": 1,
            "claimed_at": up["shards"][0]["claimed_at"],
        }
    ]
    assert (up["recent"]["items_done"], up["recent"]["audio_seconds"], up["model"]) == (1, 1.5, "fake")
    assert "1 quarantined" in said(ledger, ["status", job.id], monkeypatch, capsysbinary)
