"""New ledgers and migrations on both databases; the tables are those of the schema."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.util import CommandError

from jobs.ledger import Ledger
from jobs.ledger.database import Database, check, upgrade
from jobs.ledger.records import SCHEMA_REVISION
from jobs.ledger.schema import metadata
from pipelines.errors import ErrorCode, ServiceError
from tests.support.ledger_kit import execute, submit


def differences(database: Database) -> list[object]:
    with database.engine.connect() as connection:
        return list(
            compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata)
        )


def test_a_new_ledger_has_the_tables_of_the_schema(ledger_url: str) -> None:
    database = Database(ledger_url)
    with pytest.raises(ServiceError) as caught:
        check(database)
    assert caught.value.code is ErrorCode.LEDGER_SCHEMA
    upgrade(database)
    check(database)
    assert differences(database) == []
    assert set(sa.inspect(database.engine).get_table_names()) == {*metadata.tables, "alembic_version"}
    database.close()


def test_an_older_ledger_is_changed_by_the_migrations(ledger: Ledger) -> None:
    job = submit(ledger)
    execute(ledger, "UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(ServiceError, match="older"):
        ledger.check_schema()
    with pytest.raises(CommandError, match="0000"):
        ledger.migrate()
    execute(ledger, f"UPDATE alembic_version SET version_num = '{SCHEMA_REVISION}'")
    assert ledger.job(job.id) == job


def test_constraints_and_indexes_have_the_names_and_conditions_of_the_schema(ledger: Ledger) -> None:
    inspector = sa.inspect(ledger.database.engine)
    for table in metadata.tables.values():
        named = {
            constraint.name for constraint in table.constraints if isinstance(constraint, sa.CheckConstraint)
        }
        assert {check["name"] for check in inspector.get_check_constraints(table.name)} == named
        partial = {
            index["name"]: index["dialect_options"]
            for index in inspector.get_indexes(table.name)
            if not index["unique"]
        }
        assert set(partial) == {index.name for index in table.indexes}
        assert all(any(option.endswith("_where") for option in options) for options in partial.values())


def test_migrating_again_keeps_what_is_there(ledger: Ledger) -> None:
    job = submit(ledger)
    ledger.migrate()
    assert ledger.job(job.id) == job


def test_several_threads_migrate_at_once(ledger_url: str) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            ledger = Ledger.open(ledger_url)
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
