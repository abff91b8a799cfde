"""The first revision. A new ledger gets the tables of `jobs.ledger.schema` and the newest revision; later revisions
migrate older ledgers."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Does nothing, because no ledger is older than this revision."""
