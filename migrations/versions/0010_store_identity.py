"""By what a job's store is known, so that an empty folder or bucket in its place is not taken for it."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("store_identity", sa.Text(), nullable=True))
    op.add_column("deleted_jobs", sa.Column("store_identity", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("deleted_jobs", "store_identity")
    op.drop_column("jobs", "store_identity")
