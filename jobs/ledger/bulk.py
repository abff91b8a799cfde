"""The fast way in for many rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

_UNIQUE_VIOLATION = "23505"


class DuplicateRowsError(Exception):
    """A row of a `bulk_copy` breaks a unique constraint; the transaction has to be rolled back."""


def add_missing(connection: sa.Connection, table: sa.Table, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Inserts `rows` as tuples of `columns`, in the driver's own types; rows whose key is there already are left as they are."""
    if rows:
        mark = "?" if connection.dialect.name == "sqlite" else "%s"
        values = ", ".join([mark] * len(columns))
        statement = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({values}) ON CONFLICT DO NOTHING"  # noqa: S608 - names of ours
        connection.exec_driver_sql(statement, rows)


def bulk_copy(connection: sa.Connection, table: sa.Table, columns: tuple[str, ...], rows: Collection[tuple[Any, ...]]) -> None:
    """Inserts `rows` as tuples of `columns`: COPY on PostgreSQL, the driver's executemany on SQLite.

    Raises `DuplicateRowsError`.
    """
    if not rows:
        return
    names = ", ".join(columns)
    try:
        if connection.dialect.name == "sqlite":
            marks = ", ".join("?" * len(columns))
            connection.exec_driver_sql(f"INSERT INTO {table.name} ({names}) VALUES ({marks})", list(rows))  # noqa: S608 - names of ours
            return
        driver: Any = connection.connection.driver_connection
        with driver.cursor() as cursor, cursor.copy(f"COPY {table.name} ({names}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
    except exc.IntegrityError as error:
        raise DuplicateRowsError from error
    except Exception as error:
        if getattr(error, "sqlstate", None) == _UNIQUE_VIOLATION:
            raise DuplicateRowsError from error
        raise
