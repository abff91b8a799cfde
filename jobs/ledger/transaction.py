"""A transaction on the ledger. Statements are plain SQL, the same for SQLite and PostgreSQL.

`Ledger` runs them on a connection of SQLAlchemy's pool. `nightjar status` and `nightjar list` use the
driver directly, because importing SQLAlchemy takes longer than the rest of the command.
"""

from __future__ import annotations

import re
import sqlite3
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from jobs.ledger.records import SCHEMA_REVISION, clean
from jobs.own_files import own_ledger, place_of
from jobs.settings import sqlite_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONNECT_SECONDS = 5
BUSY_SECONDS = 30

#: UTC epoch seconds of the database's clock, constant within a statement.
NOW = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS DOUBLE PRECISION)",
}
#: A list is passed as one parameter, so that the text of a statement does not depend on its length.
LISTS = {"sqlite": r"IN (SELECT value FROM json_each(:\1))", "postgresql": r"= ANY(:\1)"}
_LIST = re.compile(r"IN \(:(\w+)\)")
_LOCKS = re.compile(r"\s+FOR (UPDATE|SHARE)( OF \w+)?( SKIP LOCKED)?")
#: A field of a job's spec. SQLite has this operator since 3.38, and Ubuntu 22.04 has an older SQLite.
_FIELD = re.compile(r"spec ->> '(\w+)'")
#: Columns with JSON.
_JSON = frozenset({"spec", "labels", "meta", "scores"})

T = TypeVar("T")
#: A named tuple of columns.
Row = Any


class Transaction(NamedTuple):
    """Runs statements with named parameters (`:name`; a list as `IN (:name)`) and `<now>` for the
    database's clock. Locks (`FOR UPDATE`) are removed for SQLite, which has one writer."""

    #: Runs a statement with values; returns a cursor of the driver.
    execute: Callable[[str, Any], Any]
    #: `sqlite` or `postgresql`.
    engine: str
    #: The folder to which store addresses are relative; None for a ledger that is not a file.
    place: Path | None = None
    #: The first backoff of a failed shard.
    backoff_seconds: float = 1.0
    #: The connection of SQLAlchemy, for migrations and COPY; None if the driver is used directly.
    connection: Any = None

    def rows(self, statement: str, made: Any = None, /, **values: object) -> list[Row]:
        """The rows, or what `made`, a type, makes of their columns."""
        cursor = self._run(statement, values)
        made = made or _row_type(tuple(column[0] for column in cursor.description))
        return [made(*row) for row in cursor]

    def row(self, statement: str, **values: object) -> Row | None:
        """The first row, or None."""
        return next(iter(self.rows(statement, **values)), None)

    def column(self, statement: str, **values: object) -> list[Any]:
        """The first column of the rows."""
        return [row[0] for row in self.rows(statement, **values)]

    def value(self, statement: str, **values: object) -> Any:
        """The first column of the first row, or None."""
        return next(iter(self.column(statement, **values)), None)

    def change(self, statement: str, **values: object) -> int:
        """Runs a statement that changes rows; returns their number."""
        return self._run(statement, values).rowcount

    def insert(
        self, table: str, rows: Sequence[Mapping[str, object]], conflict: str = "", **expressions: str
    ) -> int:
        """Inserts rows with equal columns, and with further columns given as SQL expressions. `conflict`:
        an ON CONFLICT clause."""
        if not rows:
            return 0
        for name in _JSON.intersection(rows[0]):
            rows = [{**row, name: msgspec.json.encode(row[name]).decode()} for row in rows]
        columns = {**{name: f":{name}" for name in rows[0]}, **expressions}
        statement = (
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(columns.values())}) {conflict}"
        )
        return self.execute(_for_engine(statement, self.engine), rows).rowcount

    @property
    def now(self) -> float:
        """The database's clock."""
        return self.value("SELECT <now>")

    def _run(self, statement: str, values: dict[str, object]) -> Any:
        for name, value in values.items():
            if isinstance(value, Enum):
                values[name] = value.value
            elif isinstance(value, list | tuple | set):
                listed = list(msgspec.to_builtins(value))
                values[name] = msgspec.json.encode(listed).decode() if self.engine == "sqlite" else listed
        return self.execute(_for_engine(statement, self.engine), values)


@lru_cache(maxsize=256)
def _for_engine(statement: str, engine: str) -> str:
    statement = _LIST.sub(LISTS[engine], statement.replace("<now>", NOW[engine]))
    if engine == "sqlite":
        return _FIELD.sub(r"json_extract(spec, '$.\1')", _LOCKS.sub("", statement))
    # The parameter style of psycopg.
    return re.sub(r":(\w+)", r"%(\1)s", statement)


def literals(*values: Enum) -> str:
    """Values as SQL literals for an IN: SQLite uses a partial index only if its condition has no
    parameter."""
    return ", ".join(f"'{value.value}'" for value in values)


def columns_of(record: DataclassInstance) -> dict[str, object]:
    """The columns of a record, with texts that every database accepts."""
    values = asdict(record).items()
    return {name: clean(value) if isinstance(value, str) else value for name, value in values}


def record(kind: type[T], row: Row, **changes: object) -> T:
    """Makes a record from a row, with these changes. Columns that are not fields of the record are ignored."""
    values = row._asdict() | changes
    for name in _JSON.intersection(values):
        # SQLite returns it as text.
        if isinstance(values[name], str):
            values[name] = msgspec.json.decode(values[name])
    return msgspec.convert(values, kind)


def read_with_driver(url: str, work: Callable[[Transaction], T]) -> T | None:
    """The result of `work`, read with the driver alone in one snapshot.

    None if that fails: another schema, an unreachable database, a missing driver. `Ledger` then raises the
    error with the reason.
    """
    path = sqlite_path(url)
    try:
        with _postgresql(url) if path is None else _sqlite(path.absolute()) as transaction:
            if transaction.column("SELECT version_num FROM alembic_version") == [SCHEMA_REVISION]:
                return work(transaction)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        # Only errors of the drivers are expected; any other error is a bug.
        if type(error).__module__.partition(".")[0] not in {"sqlite3", "psycopg"}:
            raise
    return None


#: The type of rows with these names of columns.
_row_type = lru_cache(maxsize=64)(partial(namedtuple, "Row", rename=True))


def connect_sqlite(path: Path) -> sqlite3.Connection:
    """Opens an existing ledger. Transactions are begun by statements. Raises `store.forbidden` for a link in a
    home."""
    uri = f"file:{quote(str(own_ledger(path)))}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None)


@contextmanager
def _sqlite(path: Path) -> Iterator[Transaction]:
    with closing(connect_sqlite(path)) as connection:
        connection.execute("BEGIN")
        yield Transaction(connection.execute, "sqlite", place_of(path))


@contextmanager
def _postgresql(url: str) -> Iterator[Transaction]:
    import psycopg

    with psycopg.connect(url, connect_timeout=CONNECT_SECONDS, application_name="nightjar") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        execute: Any = connection.execute
        yield Transaction(execute, "postgresql")
