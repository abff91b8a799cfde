"""Random moves of people, dispatchers, workers and bad luck, on a SQLite ledger and on a pure model."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from jobs.ledger import Ledger
from tests.support.ledger_model import LedgerMachine


def test_the_ledger_moves_as_its_model(tmp_path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    ledger.migrate()
    machine = type("SqliteMachine", (LedgerMachine,), {"ledger": ledger})
    quick = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=quick)
