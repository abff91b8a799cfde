"""Which end of a job the manifest in its store is of; jobs that had ended before are taken to have theirs."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("manifest_finished_at", sa.Double(), nullable=True))
    op.execute("UPDATE jobs SET manifest_finished_at = finished_at")


def downgrade() -> None:
    op.drop_column("jobs", "manifest_finished_at")
