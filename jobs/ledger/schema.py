"""The tables of the ledger, with portable types; `migrations/` brings a database to this shape.

Times are UTC epoch seconds of the database's clock. Lock order on PostgreSQL: job, then shards by number,
then items; whoever changes an item holds the lock of its shard, so shard counters are exact.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from jobs.ledger.records import ItemState, JobState, ShardState
from jobs.ledger.transaction import words

#: `items.state` as it is stored.
ITEM_STATE_NUMBERS = {
    ItemState.PENDING: 0,
    ItemState.DONE: 1,
    ItemState.FAILED: 2,
    ItemState.DEAD: 3,
    ItemState.SKIPPED: 4,
}
ITEM_STATES = {number: state for state, number in ITEM_STATE_NUMBERS.items()}

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _one_of(states: type[StrEnum]) -> str:
    return f"state IN ({words(*states)})"


def _counter(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))


def _partial_index(name: str, *columns: sa.Column[Any], where: str) -> None:
    sa.Index(name, *columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


jobs = sa.Table(
    "jobs",
    metadata,
    # The short key of the tables that have a row for each item: with the id instead, they would be twice as
    # large and half as fast.
    sa.Column("no", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("state_reason", sa.Text, nullable=False, server_default=""),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("weight", sa.Integer, nullable=False),
    sa.Column("spec", sa.JSON, nullable=False),
    sa.Column("spec_sha", sa.Text, nullable=False),
    sa.Column("input_uri", sa.Text, nullable=False),
    sa.Column("input_sha256", sa.Text, nullable=False),
    sa.Column("store_url", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("idempotency_key", sa.Text, nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("max_in_flight", sa.Integer),
    sa.Column("error_budget", sa.Double),
    # What had been done and failed at the last resume: the error budget counts from there.
    _counter("budget_from_done"),
    _counter("budget_from_failed"),
    _counter("total_items"),
    _counter("total_shards"),
    _counter("rejected_lines"),
    _counter("lines_read"),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double),
    sa.Column("finished_at", sa.Double),
    # The `finished_at` of the end whose manifest is in the store; another one, or NULL: it has to be written.
    sa.Column("manifest_finished_at", sa.Double),
    # The `finished_at` of the end that was reported to the operator's hook; how often that was tried for the
    # present end, and when the next try is due: while one sends, that is the time at which it counts as lost.
    sa.Column("notified_finished_at", sa.Double),
    sa.Column("notify_attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.Column("notify_due_at", sa.Double),
    # What the store says of itself.
    sa.Column("store_identity", sa.Text),
    sa.UniqueConstraint("id"),
    sa.UniqueConstraint("idempotency_key"),
    sa.CheckConstraint(_one_of(JobState), name="state"),
    sa.CheckConstraint("weight > 0", name="weight"),
    sa.CheckConstraint("max_attempts > 0", name="max_attempts"),
)

shards = sa.Table(
    "shards",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("job_no", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False, server_default=ShardState.READY.value),
    # Bounds of its items' indexes: its items are those in between that name it.
    sa.Column("first_index", sa.BigInteger, nullable=False),
    sa.Column("last_index", sa.BigInteger, nullable=False),
    sa.Column("n_items", sa.Integer, nullable=False),
    _counter("n_done"),
    _counter("n_failed"),
    _counter("n_skipped"),
    _counter("audio_ms"),
    _counter("engine_ms"),
    _counter("bytes_out"),
    sa.Column("estimated_ms", sa.BigInteger, nullable=False),
    _counter("epoch"),
    # n_done and n_failed when the present lease began: tells whether it made progress.
    _counter("claimed_done"),
    _counter("claimed_failed"),
    # Leases in a row that crashed without progress.
    _counter("attempts"),
    # Leases in a row that met a service that was down; only for backoff.
    _counter("outages"),
    sa.Column("not_before", sa.Double),
    sa.Column("enqueued_epoch", sa.BigInteger),
    sa.Column("enqueued_at", sa.Double),
    sa.Column("worker_id", sa.Text),
    sa.Column("lease_until", sa.Double),
    sa.Column("heartbeat_at", sa.Double),
    sa.Column("input_key", sa.Text, nullable=False),
    sa.Column("input_sha256", sa.Text, nullable=False),
    sa.Column("manifest_key", sa.Text),
    sa.Column("manifest_sha256", sa.Text),
    sa.CheckConstraint(_one_of(ShardState), name="state"),
    sa.CheckConstraint("n_done + n_failed + n_skipped <= n_items", name="counters"),
    sa.CheckConstraint("n_done >= 0 AND n_failed >= 0 AND n_skipped >= 0", name="counters_positive"),
    sa.CheckConstraint("(state = 'leased') = (lease_until IS NOT NULL)", name="leased_has_lease"),
)
_partial_index("ix_shards_ready", shards.c.job_id, shards.c.no, where="state = 'ready'")
_partial_index("ix_shards_queued", shards.c.job_id, shards.c.enqueued_at, where="state = 'queued'")
_partial_index("ix_shards_leased", shards.c.job_id, shards.c.lease_until, where="state = 'leased'")

items = sa.Table(
    "items",
    metadata,
    sa.Column("job_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("idx", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("example_id", sa.Text, nullable=False),
    sa.Column("shard_no", sa.Integer, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("attempts", sa.SmallInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("error_code", sa.Text),
    sa.Column("error_message", sa.Text),
    # Which of its dialogue's spoken turns it is: each dialogue has one 0, so the first items keep example ids
    # apart.
    sa.Column("turn", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.UniqueConstraint("job_no", "example_id", "turn"),
    sa.CheckConstraint("state BETWEEN 0 AND 4", name="state"),
    sqlite_with_rowid=False,
)
_partial_index("ix_items_failed", items.c.job_no, items.c.error_code, items.c.idx, where="state IN (2, 3)")

artifacts = sa.Table(
    "artifacts",
    metadata,
    sa.Column("job_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("idx", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("duration_ms", sa.BigInteger, nullable=False),
    sa.Column("sample_rate", sa.Integer, nullable=False),
    sa.Column("samples", sa.BigInteger, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("worker_id", sa.Text),
    sa.Column("meta", sa.JSON, nullable=False),
    # When it was committed.
    sa.Column("made_at", sa.Double),
    # Of an artifact in a pack: the key of the pack, and where the artifact's bytes begin in it.
    sa.Column("pack", sa.Text),
    sa.Column("pack_offset", sa.BigInteger),
    sqlite_with_rowid=False,
)

# What the checks said of each draw of an item that ended.
draws = sa.Table(
    "draws",
    metadata,
    sa.Column("job_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("idx", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("draw", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    # NULL: it passed.
    sa.Column("code", sa.Text),
    sa.Column("kept", sa.Boolean, nullable=False),
    sa.Column("duration_ms", sa.BigInteger, nullable=False),
    # Name -> [value, passed, detail]; see `records.Score`.
    sa.Column("scores", sa.JSON, nullable=False),
    sqlite_with_rowid=False,
)

#: The checks whose scores have a column of their own, in `scores`.
SCORE_COLUMNS = (
    "ended",
    "duration",
    "clipped",
    "silence",
    "pause",
    "loudness",
    "wer",
    "cer",
    "distillmos",
    "dnsmos",
    "similarity",
)

# What was measured of the audio of an item, as numbers that filters compare: the draw that is kept says it
# again, with its details.
scores = sa.Table(
    "scores",
    metadata,
    sa.Column("job_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("idx", sa.BigInteger, primary_key=True, autoincrement=False),
    # Which draw is kept.
    sa.Column("draw", sa.SmallInteger, nullable=False),
    # NULL: not measured.
    *(sa.Column(name, sa.Double) for name in SCORE_COLUMNS),
    # Name -> value of the scores without a column.
    sa.Column("others", sa.JSON(none_as_null=True)),
    sqlite_with_rowid=False,
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("shard_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("worker_id", sa.Text, nullable=False),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
    # done, partial, released, refused, failed, expired or cancelled; NULL while it runs.
    sa.Column("outcome", sa.Text),
    _counter("n_ok"),
    _counter("n_failed"),
    sa.Column("error_code", sa.Text),
    sa.Column("error_message", sa.Text),
)
_partial_index("ix_attempts_ended_at", attempts.c.ended_at, where="ended_at IS NOT NULL")

item_errors = sa.Table(
    "item_errors",
    metadata,
    sa.Column("job_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("idx", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("code", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("retryable", sa.Boolean, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
)

rejected_lines = sa.Table(
    "rejected_lines",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("line", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("code", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("example_id", sa.Text),
)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("gpu", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("slots", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    # Why it is quarantined, or which job it cannot run and why.
    sa.Column("state_reason", sa.Text, nullable=False, server_default=""),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("heartbeat_at", sa.Double, nullable=False),
)

# Jobs that were deleted, or are being deleted: what a worker that lost its lease still writes of them belongs
# to nothing.
deleted_jobs = sa.Table(
    "deleted_jobs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("store_url", sa.Text, nullable=False),
    sa.Column("deleted_at", sa.Double, nullable=False),
    sa.Column("store_identity", sa.Text),
)

schedules = sa.Table(
    "schedules",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("night", sa.Text, primary_key=True),
    sa.Column("ran_at", sa.Double, nullable=False),
)
