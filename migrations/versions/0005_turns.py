"""Several items of one dialogue: which of its spoken turns an item is."""

import sqlalchemy as sa
from alembic import op

from pipelines.errors import ErrorCode, ServiceError

revision = "0005"
down_revision = "0003"
branch_labels = None
depends_on = None

_COLUMNS = "job_no, idx, example_id, shard_no, state, attempts, error_code, error_message"


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        _rebuild(turns=True)
        return
    op.add_column("items", sa.Column("turn", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.drop_constraint(op.f("uq_items_job_no_example_id"), "items", type_="unique")
    op.create_unique_constraint(op.f("uq_items_job_no_example_id_turn"), "items", ["job_no", "example_id", "turn"])


def downgrade() -> None:
    if op.get_bind().scalar(sa.text("SELECT count(*) FROM (SELECT 1 FROM items WHERE turn > 0 LIMIT 1) AS several")):
        message = "The ledger has dialogues of which several turns are spoken, which older tables cannot hold."
        raise ServiceError(ErrorCode.LEDGER_SCHEMA, message, "Keep this version, or restore a backup of the older ledger.")
    if op.get_context().dialect.name == "sqlite":
        _rebuild(turns=False)
        return
    op.drop_constraint(op.f("uq_items_job_no_example_id_turn"), "items", type_="unique")
    op.create_unique_constraint(op.f("uq_items_job_no_example_id"), "items", ["job_no", "example_id"])
    op.drop_column("items", "turn")


def _rebuild(*, turns: bool) -> None:
    """SQLite cannot change a table's constraints: the rows move to a new table, which takes its name."""
    turn = [sa.Column("turn", sa.Integer(), server_default=sa.text("0"), nullable=False)] if turns else []
    unique = ("job_no", "example_id", "turn") if turns else ("job_no", "example_id")
    op.create_table(
        "items_moved",
        sa.Column("job_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("example_id", sa.Text(), nullable=False),
        sa.Column("shard_no", sa.Integer(), nullable=False),
        sa.Column("state", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempts", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        *turn,
        sa.CheckConstraint("state BETWEEN 0 AND 4", name=op.f("ck_items_state")),
        sa.PrimaryKeyConstraint("job_no", "idx", name=op.f("pk_items")),
        sa.UniqueConstraint(*unique, name=op.f("uq_items_" + "_".join(unique))),
        sqlite_with_rowid=False,
    )
    op.execute(f"INSERT INTO items_moved ({_COLUMNS}) SELECT {_COLUMNS} FROM items")  # noqa: S608 - names of ours
    op.drop_table("items")
    op.rename_table("items_moved", "items")
    op.create_index(
        "ix_items_failed",
        "items",
        ["job_no", "error_code", "idx"],
        unique=False,
        sqlite_where=sa.text("state IN (2, 3)"),
        postgresql_where=sa.text("state IN (2, 3)"),
    )
