"""Run by Alembic; `jobs.ledger.database` hands over the connection and the metadata."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=context.config.attributes["metadata"],
    render_as_batch=connection.dialect.name == "sqlite",
    compare_server_default=False,
)
with context.begin_transaction():
    context.run_migrations()
