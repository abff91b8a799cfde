"""Where artifacts that share an object, a pack, are in it; NULL for those that are objects of their own."""

import sqlalchemy as sa
from alembic import op

from pipelines.errors import ErrorCode, ServiceError

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("artifacts", sa.Column("pack", sa.Text(), nullable=True))
    op.add_column("artifacts", sa.Column("pack_offset", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    if op.get_bind().scalar(sa.text("SELECT count(*) FROM (SELECT 1 FROM artifacts WHERE pack IS NOT NULL LIMIT 1) AS packed")):
        message = "The ledger has audio in packs, which older tables cannot find."
        raise ServiceError(ErrorCode.LEDGER_SCHEMA, message, "Keep this version, or restore a backup of the older ledger.")
    op.drop_column("artifacts", "pack_offset")
    op.drop_column("artifacts", "pack")
