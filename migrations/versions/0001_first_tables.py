"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_jobs()
    _create_shards()
    _create_items()
    _create_artifacts()
    _create_attempts()
    _create_item_errors()
    _create_rejected_lines()
    _create_workers()
    _create_schedules()


def downgrade() -> None:
    for table in ("schedules", "workers", "rejected_lines", "item_errors", "attempts", "artifacts", "items", "shards", "jobs"):
        op.drop_table(table)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("no", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("state_reason", sa.Text(), server_default="", nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_sha", sa.Text(), nullable=False),
        sa.Column("input_uri", sa.Text(), nullable=False),
        sa.Column("input_sha256", sa.Text(), nullable=False),
        sa.Column("store_url", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("max_in_flight", sa.Integer(), nullable=True),
        sa.Column("error_budget", sa.Double(), nullable=True),
        sa.Column("budget_from_done", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("budget_from_failed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("total_items", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("total_shards", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("rejected_lines", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lines_read", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("paused_at", sa.Double(), nullable=True),
        sa.Column("cancel_requested_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "state IN ('ingesting', 'ready', 'running', 'paused', 'cancelling', 'cancelled', 'completed', "
            "'completed_with_errors', 'failed')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint("max_attempts > 0", name=op.f("ck_jobs_max_attempts")),
        sa.CheckConstraint("weight > 0", name=op.f("ck_jobs_weight")),
        sa.PrimaryKeyConstraint("no", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
    )


def _create_shards() -> None:
    op.create_table(
        "shards",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("job_no", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="ready", nullable=False),
        sa.Column("first_index", sa.BigInteger(), nullable=False),
        sa.Column("last_index", sa.BigInteger(), nullable=False),
        sa.Column("n_items", sa.Integer(), nullable=False),
        sa.Column("n_done", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("n_failed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("n_skipped", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("audio_ms", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("engine_ms", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("bytes_out", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("estimated_ms", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("claimed_done", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("claimed_failed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("outages", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=True),
        sa.Column("enqueued_epoch", sa.BigInteger(), nullable=True),
        sa.Column("enqueued_at", sa.Double(), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("input_key", sa.Text(), nullable=False),
        sa.Column("input_sha256", sa.Text(), nullable=False),
        sa.Column("manifest_key", sa.Text(), nullable=True),
        sa.Column("manifest_sha256", sa.Text(), nullable=True),
        sa.CheckConstraint("(state = 'leased') = (lease_until IS NOT NULL)", name=op.f("ck_shards_leased_has_lease")),
        sa.CheckConstraint("state IN ('ready', 'queued', 'leased', 'done', 'dead', 'cancelled')", name=op.f("ck_shards_state")),
        sa.CheckConstraint("n_done + n_failed + n_skipped <= n_items", name=op.f("ck_shards_counters")),
        sa.CheckConstraint("n_done >= 0 AND n_failed >= 0 AND n_skipped >= 0", name=op.f("ck_shards_counters_positive")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_shards_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "no", name=op.f("pk_shards")),
    )
    op.create_index(
        "ix_shards_leased",
        "shards",
        ["job_id", "lease_until"],
        unique=False,
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_index(
        "ix_shards_queued",
        "shards",
        ["job_id", "enqueued_at"],
        unique=False,
        sqlite_where=sa.text("state = 'queued'"),
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_index(
        "ix_shards_ready",
        "shards",
        ["job_id", "no"],
        unique=False,
        sqlite_where=sa.text("state = 'ready'"),
        postgresql_where=sa.text("state = 'ready'"),
    )


def _create_items() -> None:
    op.create_table(
        "items",
        sa.Column("job_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("example_id", sa.Text(), nullable=False),
        sa.Column("shard_no", sa.Integer(), nullable=False),
        sa.Column("state", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempts", sa.SmallInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.CheckConstraint("state BETWEEN 0 AND 4", name=op.f("ck_items_state")),
        sa.PrimaryKeyConstraint("job_no", "idx", name=op.f("pk_items")),
        sa.UniqueConstraint("job_no", "example_id", name=op.f("uq_items_job_no_example_id")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_items_failed",
        "items",
        ["job_no", "error_code", "idx"],
        unique=False,
        sqlite_where=sa.text("state IN (2, 3)"),
        postgresql_where=sa.text("state IN (2, 3)"),
    )


def _create_artifacts() -> None:
    op.create_table(
        "artifacts",
        sa.Column("job_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.Column("sample_rate", sa.Integer(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("meta", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_no", "idx", "kind", name=op.f("pk_artifacts")),
        sqlite_with_rowid=False,
    )


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("shard_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("n_ok", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("n_failed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "shard_no", "epoch", name=op.f("pk_attempts")),
    )


def _create_item_errors() -> None:
    op.create_table(
        "item_errors",
        sa.Column("job_no", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("retryable", sa.Boolean(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job_no", "idx", "epoch", name=op.f("pk_item_errors")),
    )


def _create_rejected_lines() -> None:
    op.create_table(
        "rejected_lines",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("line", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("example_id", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rejected_lines_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", "line", name=op.f("pk_rejected_lines")),
    )


def _create_workers() -> None:
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )


def _create_schedules() -> None:
    op.create_table(
        "schedules",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("night", sa.Text(), nullable=False),
        sa.Column("ran_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", "night", name=op.f("pk_schedules")),
    )
