"""The energy of shards."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the column, which is 0 for earlier work: unknown."""
    op.add_column("shards", sa.Column("energy_mj", sa.BigInteger, server_default="0", nullable=False))
