"""A migrated, empty ledger on each database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.ledger import Ledger


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.sqlite" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    ledger = Ledger.open(ledger_url)
    ledger.migrate()
    yield ledger
    ledger.close()
