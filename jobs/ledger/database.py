"""The ledger's database: connections, transactions, retries, actionable errors, and migrations."""

from __future__ import annotations

import fcntl
import os
import random
import shlex
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc

import migrations
from jobs.ledger.records import SCHEMA_REVISION
from jobs.ledger.schema import statements
from jobs.ledger.transaction import CONNECT_SECONDS, Transaction, connect_sqlite
from jobs.own_files import disk_full, has_room, home_of, open_own, own_ledger, place_of
from pipelines.errors import ErrorCode, NightjarError, ServiceError, invalid, missing_library

P = ParamSpec("P")
T = TypeVar("T")

#: Detection of a lost PostgreSQL connection by either end: idle time before the first probe, time between
#: probes, number of probes, time without an acknowledgement of sent data.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVES, UNANSWERED_SECONDS = 30, 10, 3, 30
#: Maximum number of tries of a transaction that conflicts with others.
TRANSACTION_TRIES = 6

_READ_ONLY = "nightjar_read_only"
#: Settings of each SQLite connection.
_PRAGMAS = ("synchronous = NORMAL", "foreign_keys = ON", "cache_size = -16000", "temp_store = MEMORY")
#: serialization_failure, deadlock_detected
_CONFLICT = {"40001", "40P01"}
#: undefined_table, undefined_column, undefined_schema
_WRONG_SCHEMA = {"42P01", "42703", "3F000"}
#: lock_not_available, query_canceled
_TIMED_OUT = {"55P03", "57014"}


#: Time limits of a PostgreSQL session in seconds. Idle transactions are rolled back, so that a stopped
#: process does not keep its locks. A wait for a lock may take longer than that, so that others get the lock
#: of a stopped process instead of failing.
LIMITS = {"idle_in_transaction_session_timeout": 10.0, "lock_timeout": 30.0, "statement_timeout": 3600.0}
#: Key of the PostgreSQL advisory lock of migrations.
MIGRATION_LOCK = 0x6E69676874


class Database:
    """The database of one ledger. Connects at first use; every method is thread-safe."""

    def __init__(self, url: str, backoff_seconds: float = 1.0) -> None:
        parsed = _parse(url)
        self.url = parsed.render_as_string(hide_password=True)
        #: The file of a SQLite ledger; None for PostgreSQL.
        self.path = Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None
        #: For messages: the path of a file, else the address without its password.
        self.name = self.url if self.path is None else str(self.path)
        self.engine = _postgresql_engine(parsed) if self.path is None else _sqlite_engine(self.path)
        self.place = place_of(self.path)
        self._backoff_seconds = backoff_seconds
        self._reader = self.engine.execution_options(**{_READ_ONLY: True})
        # Threads wait for this lock; SQLite's own lock would make them poll.
        self._writing = nullcontext() if self.path is None else threading.Lock()

    def write(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work` in one transaction and commits it. On PostgreSQL a transaction that conflicts with
        another one is retried."""
        for attempt in range(1, TRANSACTION_TRIES + 1):
            try:
                with self._writing, self._explained(), self.engine.begin() as connection:
                    return work(self._transaction(connection), *args, **kwargs)
            except ConflictError:
                time.sleep(random.uniform(0.01, 0.05) * attempt)
        raise ServiceError(
            ErrorCode.LEDGER_UNREACHABLE, f"The ledger {self.url} is too busy.", "Try again in a moment."
        )

    def read(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work` in a read-only transaction; on SQLite it does not wait for writers."""
        with self._explained(), self._reader.begin() as connection:
            return work(self._transaction(connection), *args, **kwargs)

    def _transaction(self, connection: sa.Connection) -> Transaction:
        def execute(statement: str, values: Any) -> Any:
            result = connection.exec_driver_sql(statement, values)
            return result.cursor if result.returns_rows else result

        return Transaction(execute, connection.dialect.name, self.place, self._backoff_seconds, connection)

    def migrate(self) -> None:
        """Creates the tables of a new ledger, or migrates those of an older one, and creates the folder of a
        SQLite file; several processes may do so at once.

        Raises `ServiceError`: `ledger.schema` if the tables are of a newer version or another program,
        `ledger.unreachable` otherwise; `StoreError` (`store.forbidden`) for a symbolic link in a home.
        """
        with _one_process(self):
            current = self._current_revision()
            if current is None and self.path is not None and self.read(_tables):
                raise ServiceError(
                    ErrorCode.LEDGER_SCHEMA,
                    f"The file {self.path} is the database of another program.",
                    "Find out which program uses it. Then move it away, or name another file.",
                )
            if self.path is not None:
                # Lets readers work during a write. The setting is stored in the file.
                with self._explained(), self.engine.connect() as connection:
                    driver: Any = connection.connection.driver_connection
                    driver.execute("PRAGMA journal_mode = WAL")
            if current != SCHEMA_REVISION:
                self.write(_upgrade)

    def check_schema(self) -> None:
        """Raises `ServiceError` with `ledger.schema` unless the tables are of this version."""
        if self.path is not None and not self.path.exists():
            raise self._wrong_schema(f"There is no ledger at {self.path} yet.")
        current = self._current_revision()
        if current is None:
            raise self._wrong_schema(f"The ledger {self.name} has no tables yet.")
        if current < SCHEMA_REVISION:
            raise self._wrong_schema(
                f"The ledger {self.name} has the tables of an older version ({current}; this is {SCHEMA_REVISION})."
            )

    def _current_revision(self) -> str | None:
        """The version of the tables; None: there are none. Raises `ServiceError` with `ledger.schema` for a
        newer version."""
        current = self.read(_revision)
        if current is not None and current > SCHEMA_REVISION:
            raise ServiceError(
                ErrorCode.LEDGER_SCHEMA,
                f"The ledger {self.name} has the tables of a newer version ({current}; this is {SCHEMA_REVISION}).",
                "Install the version of nightjar that created it, or a newer one.",
            )
        return current

    def _wrong_schema(self, message: str) -> ServiceError:
        """The error for a ledger whose tables have another version."""
        home = home_of(self.path)
        where = "" if home is None else f" --out {shlex.quote(str(home))}"
        return ServiceError(ErrorCode.LEDGER_SCHEMA, message, f"Run `nightjar db upgrade{where}`.")

    def close(self) -> None:
        """Closes all connections; the next use opens new ones."""
        self.engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except exc.TimeoutError as error:
            raise self._unreachable("no connection became free") from error
        except Exception as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, error: BaseException) -> Exception | None:
        """The error to raise for a driver's error. None: the driver's error is not a failure of the service
        and is raised unchanged."""
        disconnected = False
        if isinstance(error, exc.DBAPIError):
            disconnected = error.connection_invalidated
            error = error.orig or error
        # COPY uses psycopg directly, so SQLAlchemy does not wrap its errors.
        elif type(error).__module__.partition(".")[0] not in {"psycopg", "sqlite3"}:
            return None
        sqlstate = getattr(error, "sqlstate", None)
        text = str(error).partition("\n")[0]
        if sqlstate in _CONFLICT:
            return ConflictError()
        if sqlstate in _WRONG_SCHEMA or text.startswith(("no such table", "no such column")):
            return self._wrong_schema(f"The ledger {self.name} lacks tables of this version.")
        if sqlstate in _TIMED_OUT:
            return ServiceError(
                ErrorCode.LEDGER_UNREACHABLE,
                f"The ledger {self.url} did not answer in time: {text}.",
                "Try again. If this persists, pg_stat_activity shows which transaction holds the locks.",
            )
        kind = {base.__name__ for base in type(error).__mro__}
        # SQLite raises DatabaseError itself if the file is not a database or is damaged.
        if (
            disconnected
            or kind & {"OperationalError", "InterfaceError"}
            or type(error) is sqlite3.DatabaseError
        ):
            return self._unreachable(text)
        return None

    def check_room(self) -> None:
        """Raises `store.full` if a SQLite ledger is on a full disk."""
        if self.path is not None and not has_room(self.path.parent):
            raise disk_full(self.path)

    def _unreachable(self, reason: str) -> NightjarError:
        # SQLite reports a full disk by several messages, depending on the file.
        if self.path is not None and (reason == "database or disk is full" or not has_room(self.path.parent)):
            return disk_full(self.path)
        advice = (
            "Check that PostgreSQL is running and that the database URL is correct."
            if self.path is None
            else "Check that the file's folder is writable, has space, and is on a local disk."
        )
        return ServiceError(
            ErrorCode.LEDGER_UNREACHABLE, f"The ledger {self.url} cannot be used: {reason}.", advice
        )


class ConflictError(Exception):
    """The transaction conflicted with another one; nothing was written, so it can be retried."""


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        # Not chained: the parser's message may contain the password.
        raise invalid(
            "The database URL cannot be read.", "Write sqlite:///PATH or postgresql://..."
        ) from None
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed.set(drivername="sqlite")
    raise invalid(
        f"A ledger cannot be stored in a database of kind {backend!r}.",
        "Write sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE.",
    )


def _sqlite_engine(path: Path) -> sa.Engine:
    file = path.absolute()

    def connect() -> sqlite3.Connection:
        connection = connect_sqlite(file)
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        return connection

    engine = sa.create_engine(
        "sqlite://", creator=connect, poolclass=sa.QueuePool, max_overflow=-1, hide_parameters=True
    )
    event.listen(engine, "begin", _begin)
    return engine


def _begin(connection: sa.Connection) -> None:
    # A transaction that first reads and then writes may fail because its snapshot is stale, so writers take
    # the lock at BEGIN.
    read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def set_limits(limits: Mapping[str, float], *, local: bool = False) -> str:
    """The statement that sets limits of a PostgreSQL session, or with `local` only of its current
    transaction."""
    calls = (
        f"set_config('{name}', '{round(seconds * 1000)}ms', {local})" for name, seconds in limits.items()
    )
    return f"SELECT {', '.join(calls)}"


def _postgresql_engine(url: sa.URL) -> sa.Engine:
    # The server gets the same values below, so that both ends notice a lost host equally soon.
    defaults = {
        "connect_timeout": CONNECT_SECONDS,
        "application_name": "nightjar",
        "keepalives_idle": KEEPALIVE_IDLE_SECONDS,
        "keepalives_interval": KEEPALIVE_INTERVAL_SECONDS,
        "keepalives_count": KEEPALIVES,
        "tcp_user_timeout": UNANSWERED_SECONDS * 1000,
    }
    arguments = {name: value for name, value in defaults.items() if name not in url.query}
    try:
        engine = sa.create_engine(
            url, pool_pre_ping=True, max_overflow=-1, hide_parameters=True, connect_args=arguments
        )
    except ModuleNotFoundError:
        raise missing_library("A PostgreSQL ledger", "psycopg", "postgres") from None
    limits = f"""
    {set_limits(LIMITS)};
    SET tcp_keepalives_idle = {KEEPALIVE_IDLE_SECONDS};
    SET tcp_keepalives_interval = {KEEPALIVE_INTERVAL_SECONDS};
    SET tcp_keepalives_count = {KEEPALIVES};
    SET tcp_user_timeout = '{UNANSWERED_SECONDS}s'
    """

    def prepare(connection: Any, _record: object) -> None:
        # Set by statements, because poolers such as PgBouncer refuse the parameter `options`.
        connection.autocommit = True
        connection.execute(limits)
        connection.autocommit = False

    event.listen(engine, "connect", prepare)
    return engine


def _tables(sql: Transaction) -> list[str]:
    return sa.inspect(sql.connection).get_table_names()


def _revision(sql: Transaction) -> str | None:
    known = "alembic_version" in _tables(sql)
    return sql.value("SELECT version_num FROM alembic_version") if known else None


@contextmanager
def _one_process(database: Database) -> Iterator[None]:
    path = database.path
    if path is None:
        yield
        return
    try:
        own_ledger(path).parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=True)
        lock = open_own(path.with_name(path.name + ".migrate"), os.O_RDWR | os.O_CREAT, depth=1)
    except OSError as error:
        database.check_room()
        raise ServiceError(
            ErrorCode.LEDGER_UNREACHABLE,
            f"The ledger {path} cannot be created: {error.strerror or error}.",
            "Name a writable folder.",
        ) from error
    with os.fdopen(lock):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _upgrade(sql: Transaction) -> None:
    from alembic import command
    from alembic.config import Config

    if sql.engine == "postgresql":
        # A migration may rewrite a large table, or wait for another process that does.
        sql.value(set_limits(dict.fromkeys(LIMITS, 0.0), local=True))
        sql.value(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = sql.connection
    if _revision(sql) is None:
        for statement in statements(sql.engine):
            sql.change(statement)
        command.stamp(config, SCHEMA_REVISION)
    else:
        command.upgrade(config, SCHEMA_REVISION)
