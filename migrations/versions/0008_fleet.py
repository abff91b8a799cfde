"""Which end of a job was reported to the operator's hook, why a worker is quarantined, which jobs were deleted, and when leases ended."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("notified_finished_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("notify_attempts", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("jobs", sa.Column("notify_due_at", sa.Double(), nullable=True))
    op.execute("UPDATE jobs SET notified_finished_at = finished_at")
    op.add_column("workers", sa.Column("state_reason", sa.Text(), server_default="", nullable=False))
    op.create_table(
        "deleted_jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("store_url", sa.Text(), nullable=False),
        sa.Column("deleted_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deleted_jobs")),
    )
    op.create_index(
        "ix_attempts_ended_at",
        "attempts",
        ["ended_at"],
        sqlite_where=sa.text("ended_at IS NOT NULL"),
        postgresql_where=sa.text("ended_at IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_attempts_ended_at", "attempts")
    op.drop_table("deleted_jobs")
    op.drop_column("workers", "state_reason")
    op.drop_column("jobs", "notify_due_at")
    op.drop_column("jobs", "notify_attempts")
    op.drop_column("jobs", "notified_finished_at")
