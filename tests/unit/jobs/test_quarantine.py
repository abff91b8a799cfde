"""What the process that starts workers tells the ledger of those that it has quarantined."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.gpus import Device
from jobs.ledger import Ledger
from jobs.settings import Settings
from jobs.worker_group import Member, QuarantineReports, WorkerPlan
from pipelines.errors import NightjarError
from tests.support.worker_rig import wait_for


def bad(gpu: str | None) -> Member:
    return Member(
        WorkerPlan(None if gpu is None else Device(gpu, "")),
        1.0,
        quarantined=True,
        reason=f"GPU {gpu} is bad.",
    )


def test_quarantines_are_reported_and_end(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    ledger = Ledger.of(settings)
    ledger.migrate()
    reports = QuarantineReports(settings)

    def states() -> dict[str, tuple[str, str, int]]:
        rows = ledger.worker_statuses(include_ended=True)
        return {row.gpu: (row.state, row.state_reason, row.pid) for row in rows}

    reports.poll([])
    reports.close(all_ended=True)
    assert states() == {}
    reports.poll([bad("0"), bad("3")])
    wait_for(lambda: len(states()) == 2)
    assert states()["3"] == ("quarantined", "GPU 3 is bad.", os.getpid())
    # As a supervisor polls: not once, since the report before may still be under way.
    wait_for(lambda: reports.poll([bad("3")]) or states()["0"][0] == "retired")
    assert states()["3"][0] == "quarantined"
    # Nobody is left who would start it again: it is not retired, and goes silent.
    reports.close(all_ended=False)
    assert states()["3"][0] == "quarantined"
    wait_for(lambda: reports.poll([bad(None)]) or "" in states())
    reports.close(all_ended=True)
    assert {state for state, _, _ in states().values()} == {"retired"}
    ledger.close()


def test_a_ledger_that_is_away_holds_nothing_up(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    ledger = Ledger.of(settings)
    with pytest.raises(NightjarError):
        ledger.worker_statuses(include_ended=True)
    reports = QuarantineReports(settings)
    reports.poll([bad("0")])
    reports.close(all_ended=False)
    ledger.migrate()
    assert ledger.worker_statuses(include_ended=True) == []
    reports.poll([bad("0"), bad("3")])
    wait_for(lambda: len(ledger.worker_statuses(include_ended=True)) == 2)
    reports.close(all_ended=True)
    ledger.close()
