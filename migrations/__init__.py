"""Alembic migrations of the ledger, for SQLite and PostgreSQL; run by `jobs db upgrade`."""
