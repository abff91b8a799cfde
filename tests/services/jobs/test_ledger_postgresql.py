"""What is particular to a ledger on PostgreSQL: a server that goes away and comes back."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator

import psycopg
import pytest

from jobs.ledger import Ledger
from jobs.ledger.database import TRANSACTION_TRIES
from jobs.ledger.transaction import Transaction
from pipelines.errors import ErrorCode, ServiceError
from tests.support.ledger_kit import assert_exact, done, lease_next, submit
from tests.support.services import Postgres, running_postgres


@pytest.fixture
def server() -> Iterator[Postgres]:
    with running_postgres(synced=False) as server:
        yield server


@pytest.fixture
def ledger(postgres_url: str) -> Iterator[Ledger]:
    ledger = Ledger(postgres_url)
    ledger.migrate()
    yield ledger
    ledger.close()


def test_a_killed_server_is_unreachable_and_then_goes_on(server: Postgres) -> None:
    ledger = Ledger(server.create_database("ledger"))
    ledger.migrate()
    job = submit(ledger, (2,))
    lease = lease_next(ledger)
    assert ledger.commit(lease.ticket, [done(0)]).accepted == 1
    server.kill()
    for _ in range(2):
        with pytest.raises(ServiceError) as caught:
            ledger.commit(lease.ticket, [done(1)])
        assert caught.value.code is ErrorCode.LEDGER_UNREACHABLE
        assert caught.value.code.retryable
    server.start()
    assert ledger.commit(lease.ticket, [done(1)]).accepted == 1
    assert ledger.finish_shard(lease.ticket)
    assert ledger.status(job.id).items.done == 2
    assert_exact(ledger, job.id)
    ledger.close()


def test_a_connection_that_was_cut_is_replaced(ledger: Ledger, postgres_url: str) -> None:
    job = submit(ledger)
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert ledger.status(job.id).items.total == 3


def test_a_connection_cut_in_a_transaction_is_unreachable(ledger: Ledger, postgres_url: str) -> None:

    def cut(sql: Transaction) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        raise AssertionError(sql.value("SELECT 1"))

    with pytest.raises(ServiceError) as caught:
        ledger.write(cut)
    assert caught.value.code is ErrorCode.LEDGER_UNREACHABLE
    assert ledger.now() > 0


def test_deadlocks_are_tried_again(ledger: Ledger) -> None:
    """Two transactions that lock two jobs crosswise both come through."""
    jobs = [submit(ledger), submit(ledger)]
    barrier = threading.Barrier(2)
    tries: list[str] = []

    def cross(sql: Transaction, first: str, second: str) -> None:
        tries.append(first)
        lock = "SELECT 1 FROM jobs WHERE id = :job FOR UPDATE"
        sql.value(lock, job=first)
        if len(tries) <= 2:
            barrier.wait(240)
        sql.value(lock, job=second)

    ids = [job.id for job in jobs]
    threads = [threading.Thread(target=ledger.write, args=(cross, *order)) for order in (ids, ids[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 3 <= len(tries) <= TRANSACTION_TRIES


def test_a_wrong_password_or_database_is_unreachable_and_hides_the_password(postgres_url: str) -> None:
    ledger = Ledger(postgres_url.replace("nightjar@", "nobody:s3cret@"))
    with pytest.raises(ServiceError) as caught:
        ledger.check_schema()
    assert caught.value.code is ErrorCode.LEDGER_UNREACHABLE
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("listed", [[], ["it's"], ("it's", 'a "b\\c}'), {"it's"}])
def test_any_list_stands_in_an_in(ledger: Ledger, listed: Collection[str]) -> None:
    statement = "SELECT name FROM (SELECT 'it''s' AS name) AS names WHERE name IN (:listed)"
    found = ledger.read(lambda sql: sql.column(statement, listed=listed))
    assert found == [name for name in listed if name == "it's"]
