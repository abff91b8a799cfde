"""Nobody waits for ever on a PostgreSQL ledger: processes that are stopped inside a transaction, locks
that are held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa
from pydantic import SecretStr

from jobs.ledger import Ledger
from jobs.ledger.database import LIMITS
from jobs.settings import Settings
from pipelines.errors import ErrorCode, ServiceError
from tests.support.ledger_kit import assert_exact, done, lease_next, submit
from tests.support.services import Postgres
from tests.support.worker_process import REPOSITORY

#: Finishes a shard, or takes ready ones, and is stopped before it commits; then tells how that went, and does
#: it again.
STOPPED = """
import os, signal, sys
from jobs.ledger import Ledger, leases, workers
from jobs.ledger.database import LIMITS
from jobs.ledger.records import Ticket
from pipelines.errors import ServiceError
url, what, *ticket = sys.argv[1:]
LIMITS["idle_in_transaction_session_timeout"] = 0.2
ledger = Ledger(url)
def work(connection):
    if what == "finish":
        made = leases.finish_shard(connection, Ticket(ticket[0], int(ticket[1]), int(ticket[2])), None, None)
    else:
        made = workers.take_ready(connection, 1, 2)
    if not stopped:
        stopped.append(True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return made
stopped = []
try:
    print(ledger.write(work))
except ServiceError as error:
    print(error.code.value, error.code.retryable)
print(bool(ledger.write(work)))
"""


@pytest.fixture
def ledger(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    # Longer than a stopped process keeps its locks, on a slow machine too.
    monkeypatch.setitem(LIMITS, "lock_timeout", 60)
    ledger = Ledger(postgres_url)
    ledger.migrate()
    yield ledger
    ledger.close()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def stopped(processes: list[subprocess.Popen[str]], url: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that is stopped inside a transaction."""
    command = [sys.executable, "-c", STOPPED, url, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    processes.append(process)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return process


def went_on(process: subprocess.Popen[str]) -> list[str]:
    process.send_signal(signal.SIGCONT)
    return process.communicate(timeout=240)[0].splitlines()


def test_a_process_stopped_while_it_finishes_a_shard_stops_nobody(
    ledger: Ledger, postgres_url: str, processes: list[subprocess.Popen[str]]
) -> None:
    job = submit(ledger, (1, 1))
    mine, others = lease_next(ledger), lease_next(ledger, "w2")
    for lease in (mine, others):
        ledger.commit(lease.ticket, [done(index) for index in lease.open_items])
    process = stopped(processes, postgres_url, "finish", job.id, others.shard_no, others.epoch)
    assert ledger.finish_shard(mine.ticket)
    assert ledger.status(job.id).items.done == 2
    assert went_on(process) == ["ledger.unreachable True", "True"]
    assert ledger.job(job.id).state.final
    assert_exact(ledger, job.id)


def test_a_process_stopped_while_it_dispatches_stops_nobody(
    ledger: Ledger, postgres_url: str, processes: list[subprocess.Popen[str]]
) -> None:
    submit(ledger, (1, 1))
    process = stopped(processes, postgres_url, "dispatch")
    assert [ticket.shard_no for ticket in ledger.take_ready(1)] == [0]
    assert went_on(process) == ["ledger.unreachable True", "True"]
    assert ledger.take_ready(1) == []


def test_a_lock_is_waited_for_no_longer_than_set_and_the_error_says_so(
    ledger: Ledger, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(ledger)
    monkeypatch.setitem(LIMITS, "lock_timeout", 0.1)
    hasty = Ledger(postgres_url)
    with psycopg.connect(postgres_url) as holder:
        holder.execute("SELECT 1 FROM jobs FOR UPDATE")
        with pytest.raises(ServiceError, match="lock timeout") as caught:
            hasty.pause(job.id)
    assert caught.value.code is ErrorCode.LEDGER_UNREACHABLE
    assert caught.value.code.retryable
    assert "pg_stat_activity" in caught.value.advice
    hasty.pause(job.id)
    hasty.close()


def test_a_statement_takes_no_longer_than_set(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "statement_timeout", 0.1)
    ledger = Ledger(postgres_url)
    with pytest.raises(ServiceError, match="statement timeout") as caught:
        ledger.read(lambda sql: sql.value("SELECT pg_sleep(60)"))
    assert caught.value.code.retryable
    ledger.close()


def session(ledger: Ledger) -> dict[str, str]:
    names = (
        "idle_in_transaction_session_timeout",
        "lock_timeout",
        "statement_timeout",
        "tcp_keepalives_idle",
    )
    names += ("tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    return ledger.read(lambda sql: {name: str(sql.value(f"SHOW {name}")) for name in names})


def test_the_limits_reach_every_session(postgres_url: str) -> None:
    ledger = Ledger.of(Settings(database_url=SecretStr(postgres_url)))
    assert tuple(session(ledger).values()) == ("10s", "30s", "1h", "30", "10", "3", "30000")
    ledger.close()


def test_a_migration_may_wait_and_take_its_time(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import command

    seen: list[list[str]] = []

    def stamp(config: object, revision: str) -> None:
        connection = config.attributes["connection"]  # type: ignore[attr-defined]
        names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
        seen.append([str(connection.scalar(sa.text(f"SHOW {name}"))) for name in names])

    monkeypatch.setattr(command, "stamp", stamp)
    ledger = Ledger(postgres_url)
    ledger.migrate()
    assert seen == [["0", "0", "0"]]
    assert session(ledger)["lock_timeout"] == "30s"
    ledger.close()


def test_a_ledger_on_a_socket_has_them_too(postgres: Postgres, postgres_url: str) -> None:
    database = postgres_url.rpartition("/")[2]
    ledger = Ledger(f"postgresql://nightjar@/{database}?host={postgres.folder}&port={postgres.port}")
    assert session(ledger)["lock_timeout"] == "30s"
    ledger.close()


def test_a_store_that_is_slow_to_delete_keeps_the_lock_of_the_job(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "idle_in_transaction_session_timeout", 0.1)
    ledger = Ledger(postgres_url)
    ledger.migrate()
    job = submit(ledger, (1,))
    ledger.cancel(job.id)
    deleted: list[str] = []

    def delete() -> None:
        time.sleep(0.5)
        with psycopg.connect(postgres_url) as other, pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("SELECT 1 FROM jobs FOR UPDATE NOWAIT")
        deleted.append("deleted")

    assert ledger.delete_orphan(
        job.id, f"jobs/{job.id}/audio/00000/000000000-e0.wav", ledger.now() + 60, delete
    )
    assert deleted == ["deleted"]
    ledger.close()
