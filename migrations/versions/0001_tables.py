"""The tables as they are: a new ledger gets those of `jobs.ledger.schema` and the newest revision. Later
files change older ledgers."""

revision = "0001"
down_revision = None


def upgrade() -> None:
    """No ledger is older."""
