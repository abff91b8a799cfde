"""Brings a ledger's tables to this version, with the migrations of the package `migrations`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from jobs.ledger import schema
from jobs.ledger.database import NO_LIMITS, Database, set_limits
from jobs.ledger.location import own_ledger
from jobs.ledger.records import SCHEMA_REVISION
from jobs.ledger.transaction import Transaction
from jobs.own_files import open_own
from pipelines.errors import ErrorCode, ServiceError

if TYPE_CHECKING:
    from alembic.config import Config

#: Key of the PostgreSQL advisory lock that lets one process migrate at a time.
MIGRATION_LOCK = 0x6E69676874


def upgrade(database: Database) -> None:
    """Makes the tables of a new ledger, or changes those of an older one; safe while other processes do
    the same.

    Raises `ServiceError`: `ledger.schema` where the tables are of a newer version or of another program,
    `ledger.unreachable` otherwise; `StoreError` (`store.forbidden`) for a link in a home.
    """
    with _one_process(database):
        current = database.read(_revision)
        if current is None and database.path is not None and database.read(_tables):
            message = f"The file {database.path} is the database of another program."
            raise ServiceError(
                ErrorCode.LEDGER_SCHEMA,
                message,
                "Find out whose it is, and move it away or name another file.",
            )
        if current is not None and current > SCHEMA_REVISION:
            raise _too_new(database, current)
        if database.path is not None:
            database.use_write_ahead_log()
        if current != SCHEMA_REVISION:
            database.write(_upgrade)


def check(database: Database) -> None:
    """Raises `ServiceError` with `ledger.schema` unless the tables are of this version."""
    if database.path is not None and not database.path.exists():
        raise database.wrong_schema(f"There is no ledger at {database.path} yet.")
    current = database.read(_revision)
    if current is None:
        raise database.wrong_schema(f"The ledger {database.name} has no tables yet.")
    if current != SCHEMA_REVISION:
        raise (
            _too_new(database, current)
            if current > SCHEMA_REVISION
            else database.wrong_schema(
                f"The ledger {database.name} has the tables of an older version ({current}; this is {SCHEMA_REVISION})."
            )
        )


def _too_new(database: Database, current: str) -> ServiceError:
    return ServiceError(
        ErrorCode.LEDGER_SCHEMA,
        f"The ledger {database.name} has the tables of a newer version ({current}; this is {SCHEMA_REVISION}).",
        "Install the version of nightjar that made it, or a newer one.",
    )


def _tables(sql: Transaction) -> list[str]:
    return sa.inspect(sql.connection).get_table_names()


def _revision(sql: Transaction) -> str | None:
    known = "alembic_version" in _tables(sql)
    return sql.value("SELECT version_num FROM alembic_version") if known else None


@contextmanager
def _one_process(database: Database) -> Iterator[None]:
    if database.path is None:
        yield
        return
    try:
        own_ledger(database.path).parent.mkdir(parents=True, exist_ok=True)
        database.path.touch(exist_ok=True)
        lock = open_own(
            database.path.with_name(database.path.name + ".migrate"), os.O_RDWR | os.O_CREAT, depth=1
        )
    except OSError as error:
        database.check_room()
        raise ServiceError(
            ErrorCode.LEDGER_UNREACHABLE,
            f"The ledger {database.path} cannot be made: {error.strerror or error}.",
            "Name a folder that is writable.",
        ) from error
    with os.fdopen(lock):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _upgrade(sql: Transaction) -> None:
    from alembic import command

    if sql.engine == "postgresql":
        # A migration may rewrite a large table, or wait for a process that does so.
        sql.value(set_limits(NO_LIMITS, local=True))
        sql.value(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
    config = _config()
    config.attributes["connection"] = sql.connection
    current = _revision(sql)
    if current is None:
        schema.metadata.create_all(sql.connection)
        command.stamp(config, SCHEMA_REVISION)
    elif current != SCHEMA_REVISION:
        command.upgrade(config, SCHEMA_REVISION)


def _config() -> Config:
    from alembic.config import Config

    spec = find_spec("migrations")
    if spec is None or not spec.submodule_search_locations:
        raise ServiceError(
            ErrorCode.LEDGER_SCHEMA, "The package `migrations` is not installed.", "Install nightjar again."
        )
    config = Config()
    config.set_main_option(
        "script_location", str(Path(next(iter(spec.submodule_search_locations)))).replace("%", "%%")
    )
    config.attributes["metadata"] = schema.metadata
    return config
