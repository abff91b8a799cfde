"""Alembic migrations of the ledger, for SQLite and PostgreSQL; run by `nightjar db upgrade`."""
