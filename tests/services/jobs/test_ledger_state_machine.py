"""The same random moves as on SQLite, on PostgreSQL."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from jobs.ledger import Ledger
from tests.support.ledger_model import LedgerMachine


def test_postgresql_moves_as_the_model(postgres_url: str) -> None:
    ledger = Ledger.open(postgres_url)
    ledger.migrate()
    machine = type("PostgresqlMachine", (LedgerMachine,), {"ledger": ledger})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=10, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    )
    ledger.close()
