"""What `nightjar` and the worker import, for `tests.support.forked`; not the modules that are run, which
are run anew."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import jobs.cli

LIBRARIES = [
    "alembic.command",
    "boto3",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
]
OURS = ["jobs.doctor", "jobs.ingest", "jobs.ledger", "worker.cli", "worker.celery_app", "worker.metrics"]

for name in [
    *LIBRARIES,
    *OURS,
    "worker.runtime",
    "tests.support.fakes",
    *(one.name for one in iter_modules(jobs.cli.__path__, "jobs.cli.")),
]:
    import_module(name)
