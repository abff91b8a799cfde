"""The decisions of people."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds the table, without rows."""
    by_key = "WITHOUT ROWID" if op.get_context().dialect.name == "sqlite" else ""
    columns = """
    job_no INTEGER NOT NULL,
    idx BIGINT NOT NULL,
    no INTEGER NOT NULL,
    accepted BOOLEAN NOT NULL,
    person TEXT NOT NULL,
    decided_at DOUBLE PRECISION NOT NULL,
    reason TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    CONSTRAINT pk_decisions PRIMARY KEY (job_no, idx, no)
    """
    op.execute(f"CREATE TABLE decisions ({columns}) {by_key}")
