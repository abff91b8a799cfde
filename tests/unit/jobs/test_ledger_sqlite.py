"""What is particular to a ledger in a SQLite file, to URLs and to versions of the tables."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import event

from jobs.ledger import Ledger
from jobs.ledger.records import SCHEMA_REVISION, ItemState
from jobs.where import parse_where
from pipelines.errors import ConfigError, ErrorCode, NightjarError, NotFoundError, ServiceError
from tests.support.ledger_kit import execute, submit, worker


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(f"sqlite:///{tmp_path}/home/ledger.sqlite")
    ledger.migrate()
    return ledger


def migrate_at(url: str) -> None:
    Ledger(url).migrate()


def test_the_schema_revision_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", "migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA_REVISION]


def test_a_missing_ledger_is_named_with_advice_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(f"sqlite:///{path}")
    with pytest.raises(ServiceError, match="nightjar db upgrade") as caught:
        ledger.check_schema()
    assert caught.value.code is ErrorCode.LEDGER_SCHEMA
    with pytest.raises(ServiceError) as caught:
        ledger.jobs()
    assert caught.value.code is ErrorCode.LEDGER_UNREACHABLE
    assert not path.exists()


def test_an_empty_database_and_another_version_are_refused(ledger: Ledger, tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.sqlite").execute("VACUUM")
    (tmp_path / "empty.sqlite").touch()
    empty = Ledger(f"sqlite:///{tmp_path}/empty.sqlite")
    for call in (empty.check_schema, empty.jobs):
        with pytest.raises(ServiceError) as caught:
            call()
        assert caught.value.code is ErrorCode.LEDGER_SCHEMA
    ledger.check_schema()
    execute(ledger, "UPDATE alembic_version SET version_num = '9999'")
    for call in (ledger.check_schema, ledger.migrate):
        with pytest.raises(ServiceError, match="newer") as caught:
            call()
        assert caught.value.code is ErrorCode.LEDGER_SCHEMA


def test_items_that_change_while_a_page_is_read_do_not_end_the_list(ledger: Ledger) -> None:
    # As on PostgreSQL, where the second statement of a page sees what was committed after the first.
    job, changed = submit(ledger, [6]), list[bool]()

    def change(connection: sa.Connection, cursor: sqlite3.Cursor, statement: str, *_: object) -> None:
        if "LEFT OUTER JOIN artifacts" in statement and not changed:
            cursor.connection.execute("UPDATE items SET state = 1 WHERE idx = 1")
            changed.append(True)

    event.listen(ledger.engine, "before_cursor_execute", change)
    assert [row.index for row in ledger.items(job.id, ItemState.PENDING, limit=4)] == [0, 2, 3, 4]


def test_statements_run_on_the_sqlite_of_ubuntu_22_04(ledger: Ledger) -> None:
    statements: list[str] = []
    event.listen(ledger.engine, "before_cursor_execute", lambda *about: statements.append(str(about[2])))
    job = submit(ledger, [2])
    # Bound to one model, so that models of jobs are compared.
    ledger.register_worker(worker())
    ticket = ledger.take_ready(1)[0]
    assert ledger.claim(ticket, "w1", 9.0)
    assert not ledger.others_may_run(job.id, "w1")
    assert ledger.measured_rtf("fake") is None
    with pytest.raises(ConfigError):
        ledger.items(job.id, where=parse_where("mine > 1"))
    assert any("json_extract(spec" in statement for statement in statements)
    # SQLite 3.37 does not know this operator.
    assert not [statement for statement in statements if "->" in statement]


def test_several_processes_migrate_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/ledger.sqlite"
    processes = [
        multiprocessing.get_context("spawn").Process(target=migrate_at, args=(url,)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    Ledger(url).check_schema()


def test_the_file_is_in_write_ahead_mode_and_readers_do_not_wait_for_a_writer(ledger: Ledger) -> None:
    job = submit(ledger, (1,))
    with ledger.engine.begin() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1
        connection.exec_driver_sql("UPDATE jobs SET name = 'written'")
        assert ledger.status(job.id).job.name == ""


def test_workers_of_two_hosts_cannot_share_the_file(ledger: Ledger) -> None:
    ledger.register_worker(worker("a", host="one"))
    ledger.register_worker(worker("b", host="one"))
    with pytest.raises(ServiceError) as caught:
        ledger.register_worker(worker("c", host="two"))
    assert caught.value.code is ErrorCode.LEDGER_SHARED_SQLITE
    ledger.retire_worker("a")
    ledger.retire_worker("b")
    ledger.register_worker(worker("c", host="two"))


def test_a_folder_that_cannot_be_written_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServiceError) as caught:
        Ledger(f"sqlite:///{tmp_path}/file/ledger.sqlite").migrate()
    assert caught.value.code is ErrorCode.LEDGER_UNREACHABLE
    (tmp_path / "noise").write_bytes(b"no database" * 1000)
    with pytest.raises(NightjarError) as caught:
        Ledger(f"sqlite:///{tmp_path}/noise").migrate()
    assert caught.value.code is ErrorCode.LEDGER_UNREACHABLE


@pytest.mark.parametrize(
    "url",
    ["", "mysql://a:secret@h/d", "sqlite://", "sqlite:///:memory:", "postgresql://u:secret@host:port/d"],
)
def test_other_urls_are_refused_without_their_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Ledger(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_unreachable_server_is_named_without_its_password() -> None:
    ledger = Ledger("postgresql://nightjar:s3cret@127.0.0.1:1/ledger")
    with pytest.raises(ServiceError) as caught:
        ledger.now()
    assert caught.value.code is ErrorCode.LEDGER_UNREACHABLE
    assert "s3cret" not in str(caught.value) + repr(caught.value.__cause__) + ledger.url
    assert "127.0.0.1" in str(caught.value)


def test_unknown_jobs_are_not_found(ledger: Ledger) -> None:
    calls = (
        ledger.job,
        ledger.find_job,
        ledger.status,
        ledger.items,
        ledger.error_counts,
        lambda job_id: next(ledger.rejected_lines(job_id)),
        ledger.staged_shards,
        ledger.seal_job,
        ledger.abandon_job,
        ledger.pause,
        ledger.resume,
        ledger.cancel,
    )
    for call in calls:
        with pytest.raises(NotFoundError):
            call("no-such\x00job")
    with pytest.raises(NotFoundError):
        ledger.retry("none", None)
    with pytest.raises(NotFoundError):
        ledger.set_priority("none", 3)
    with pytest.raises(NotFoundError):
        ledger.worker_heartbeat("none")
