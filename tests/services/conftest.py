"""A migrated, empty ledger on each database, and a folder with a job submitted by the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.ledger import Ledger
from pipelines.registry import register_pipeline
from tests.support.cli_kit import LINE, call
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.night_kit import House
from tests.support.run_kit import shell, slow  # noqa: F401 - fixtures


@pytest.fixture(autouse=True)
def own_logging(logging_of_its_own: None) -> None:
    """Commands that run in this process set up the logging of all of it."""


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"sqlite:///{tmp_path}/ledger.sqlite"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres_url")
    )


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    # What waits for its next attempt still waits after a machine stood still.
    ledger = Ledger(ledger_url, backoff_seconds=600)
    ledger.migrate()
    yield ledger
    ledger.close()


@pytest.fixture
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of an input are taken in batches of two."""
    monkeypatch.setattr("jobs.spec.BATCH_LINES", 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text(
        LINE % ("a", "Good morning.") + LINE % ("b", "Good night.") + "broken\n"
    )
    return tmp_path


@pytest.fixture
def submitted(folder: Path, valkey_url: str) -> tuple[Path, str, str]:
    """A folder with a submitted job that no worker runs: (folder, broker, job)."""
    done = call(folder, "submit", "in.jsonl", "-q", "--name", "first", SPEECH_BROKER_URL=valkey_url)
    # One of the lines was refused.
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    return folder, valkey_url, done.stdout.strip()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    house = House(tmp_path)
    yield house
    house.ledger.close()
    forget()
