"""New ledgers and migrations on both databases; the tables are those of the schema."""

from __future__ import annotations

import re
import threading

import pytest
import sqlalchemy as sa
from alembic.util import CommandError

from jobs.ledger import Ledger
from jobs.ledger.records import SCHEMA_REVISION, SCORE_COLUMNS, JobState, ShardState
from jobs.ledger.schema import ROWS_OF_JOBS, TABLES
from pipelines.errors import ErrorCode, ServiceError
from tests.support.ledger_kit import execute, submit

#: Those of the revision 0001.
FIRST_TABLES = {
    *("jobs", "shards", "items", "artifacts", "draws", "scores", "attempts", "item_errors"),
    *("rejected_lines", "workers", "deleted_jobs", "schedules"),
}


def test_a_new_ledger_has_the_tables_of_the_schema(ledger_url: str) -> None:
    ledger = Ledger(ledger_url)
    with pytest.raises(ServiceError) as caught:
        ledger.check_schema()
    assert caught.value.code is ErrorCode.LEDGER_SCHEMA
    ledger.migrate()
    ledger.check_schema()
    inspector = sa.inspect(ledger.engine)
    tables = re.findall(r"CREATE TABLE (\w+)", TABLES)
    assert set(inspector.get_table_names()) == {*tables, "alembic_version"}
    columns = {table: {column["name"] for column in inspector.get_columns(table)} for table in tables}
    assert set(SCORE_COLUMNS) <= columns["scores"]
    # A deletion forgets none of them.
    of_jobs = {table for table in tables if columns[table] & {"job_no", "job_id"}}
    assert of_jobs == ROWS_OF_JOBS.keys()
    for table, column in ROWS_OF_JOBS.items():
        assert column in inspector.get_pk_constraint(table)["constrained_columns"]
    ledger.close()


def test_an_older_ledger_is_changed_by_the_migrations(ledger: Ledger) -> None:
    job = submit(ledger)
    execute(ledger, "UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(ServiceError, match="older"):
        ledger.check_schema()
    with pytest.raises(CommandError, match="0000"):
        ledger.migrate()
    execute(ledger, f"UPDATE alembic_version SET version_num = '{SCHEMA_REVISION}'")
    assert ledger.job(job.id) == job


def test_a_ledger_of_the_first_version_gets_what_came_later(ledger: Ledger) -> None:
    job = submit(ledger)
    for table in set(re.findall(r"CREATE TABLE (\w+)", TABLES)) - FIRST_TABLES:
        execute(ledger, f"DROP TABLE {table}")
    execute(ledger, "ALTER TABLE shards DROP COLUMN energy_mj")
    execute(ledger, "UPDATE alembic_version SET version_num = '0001'")
    ledger.migrate()
    ledger.check_schema()
    assert {*re.findall(r"CREATE TABLE (\w+)", TABLES)} <= {*sa.inspect(ledger.engine).get_table_names()}
    assert ledger.status(job.id).energy_mj == 0
    execute(ledger, "UPDATE shards SET energy_mj = 7")
    assert ledger.status(job.id).energy_mj == 7


def test_constraints_and_indexes_have_the_names_and_conditions_of_the_schema(ledger: Ledger) -> None:
    inspector = sa.inspect(ledger.engine)
    for text in TABLES.split("CREATE TABLE ")[1:]:
        table = text.split()[0]
        found = {check["name"]: check["sqltext"] for check in inspector.get_check_constraints(table)}
        assert set(found) == set(re.findall(r"CONSTRAINT (ck_\w+)", text))
        states = {"jobs": JobState, "shards": ShardState}.get(table, ())
        assert all(f"'{state}'" in found[f"ck_{table}_state"] for state in states)
        partial = {
            index["name"]: index["dialect_options"]
            for index in inspector.get_indexes(table)
            if not index["unique"]
        }
        assert set(partial) == set(re.findall(r"CREATE INDEX (\w+)", text))
        assert all(any(option.endswith("_where") for option in options) for options in partial.values())


def test_migrating_again_keeps_what_is_there(ledger: Ledger) -> None:
    job = submit(ledger)
    ledger.migrate()
    assert ledger.job(job.id) == job


def test_several_threads_migrate_at_once(ledger_url: str) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            ledger = Ledger(ledger_url)
            ledger.migrate()
            ledger.check_schema()
            ledger.close()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
