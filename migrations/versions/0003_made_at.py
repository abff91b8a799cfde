"""When each artifact was committed; NULL for those of before."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("artifacts", sa.Column("made_at", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("artifacts", "made_at")
