"""What the quality checks said of each draw."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "draws",
        sa.Column("job_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("draw", sa.SmallInteger(), autoincrement=False, nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("code", sa.Text(), nullable=True),
        sa.Column("kept", sa.Boolean(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.Column("scores", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_no", "idx", "draw", name=op.f("pk_draws")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("draws")
