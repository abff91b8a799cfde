"""Random moves of people, dispatchers, workers and bad luck, on each database and on a pure model."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from jobs.ledger import Ledger
from tests.support.ledger_model import LedgerMachine

#: A commit of PostgreSQL takes several times as long.
EXAMPLES = {"sqlite": 60, "postgresql": 10}


def test_the_ledger_moves_as_its_model(ledger_url: str) -> None:
    ledger = Ledger(ledger_url)
    ledger.migrate()
    machine = type("Machine", (LedgerMachine,), {"ledger": ledger})
    examples = EXAMPLES[ledger_url.partition(":")[0]]
    quick = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=quick)
    ledger.close()
