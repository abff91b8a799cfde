"""The tables of the ledger, with portable types; `migrations/` brings a database to this shape.

Times are UTC epoch seconds of the database's clock. Lock order on PostgreSQL: job, then shards by number,
then items; whoever changes an item holds the lock of its shard, so shard counters are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def _keys(kind: type[Any], *names: str) -> Iterator[sa.Column[Any]]:
    """Columns of the primary key."""
    return (sa.Column(name, kind, primary_key=True, autoincrement=False) for name in names)


def _columns(kind: type[Any], *names: str, default: str | None = None) -> Iterator[sa.Column[Any]]:
    """Columns that every row has."""
    return (sa.Column(name, kind, nullable=False, server_default=default) for name in names)


def _optional(kind: type[Any], *names: str) -> Iterator[sa.Column[Any]]:
    return (sa.Column(name, kind) for name in names)


def _counters(*names: str, kind: type[Any] = sa.BigInteger) -> Iterator[sa.Column[Any]]:
    return (sa.Column(name, kind, nullable=False, server_default=sa.text("0")) for name in names)


def _one_of(states: type[StrEnum]) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"state IN ({words(*states)})", name="state")


def _partial_index(name: str, *columns: sa.Column[Any], where: str) -> None:
    sa.Index(name, *columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


jobs = sa.Table(
    "jobs",
    metadata,
    # The short key of the tables that have a row for each item: with the id instead, they would be twice as
    # large and half as fast.
    sa.Column("no", sa.Integer, primary_key=True),
    *_columns(sa.Text, "id", "name", "state", "spec_sha", "input_uri", "input_sha256"),
    *_columns(sa.Text, "store_url", "owner", "idempotency_key"),
    *_columns(sa.Text, "state_reason", default=""),
    # What the store says of itself.
    *_optional(sa.Text, "store_identity"),
    *_columns(sa.JSON, "spec", "labels"),
    *_columns(sa.Integer, "priority", "weight", "max_attempts"),
    *_optional(sa.Integer, "max_in_flight"),
    *_optional(sa.Double, "error_budget"),
    # What had been done and failed at the last resume: the error budget counts from there.
    *_counters("budget_from_done", "budget_from_failed"),
    *_counters("total_items", "total_shards", "rejected_lines", "lines_read"),
    *_columns(sa.Double, "created_at"),
    *_optional(sa.Double, "started_at", "finished_at"),
    # The `finished_at` of the end whose manifest is in the store; another one, or NULL: it has to be written.
    *_optional(sa.Double, "manifest_finished_at"),
    # The `finished_at` of the end that was reported to the operator's hook; how often that was tried for the
    # present end, and when the next try is due: while one sends, that is the time at which it counts as lost.
    *_optional(sa.Double, "notified_finished_at", "notify_due_at"),
    *_counters("notify_attempts", kind=sa.Integer),
    sa.UniqueConstraint("id"),
    sa.UniqueConstraint("idempotency_key"),
    _one_of(JobState),
    sa.CheckConstraint("weight > 0", name="weight"),
    sa.CheckConstraint("max_attempts > 0", name="max_attempts"),
)

shards = sa.Table(
    "shards",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    *_keys(sa.Integer, "no"),
    *_columns(sa.Integer, "job_no", "n_items"),
    *_columns(sa.Text, "state", default=ShardState.READY.value),
    # Bounds of its items' indexes: its items are those in between that name it.
    *_columns(sa.BigInteger, "first_index", "last_index", "estimated_ms"),
    *_counters("n_done", "n_failed", "n_skipped", "audio_ms", "engine_ms", "bytes_out", "epoch"),
    # n_done and n_failed when the present lease began: tells whether it made progress.
    *_counters("claimed_done", "claimed_failed"),
    # Leases in a row that crashed without progress, and those that met a service that was down; the latter
    # only for backoff.
    *_counters("attempts", "outages"),
    *_optional(sa.BigInteger, "enqueued_epoch"),
    *_optional(sa.Double, "not_before", "enqueued_at", "lease_until", "heartbeat_at"),
    *_columns(sa.Text, "input_key", "input_sha256"),
    *_optional(sa.Text, "worker_id", "manifest_key", "manifest_sha256"),
    _one_of(ShardState),
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
    *_keys(sa.Integer, "job_no"),
    *_keys(sa.BigInteger, "idx"),
    *_columns(sa.Text, "example_id"),
    *_columns(sa.Integer, "shard_no"),
    *_counters("state", "attempts", kind=sa.SmallInteger),
    *_optional(sa.Text, "error_code", "error_message"),
    # Which of its dialogue's spoken turns it is: each dialogue has one 0, so the first items keep example ids
    # apart.
    *_counters("turn", kind=sa.Integer),
    sa.UniqueConstraint("job_no", "example_id", "turn"),
    sa.CheckConstraint("state BETWEEN 0 AND 4", name="state"),
    sqlite_with_rowid=False,
)
_partial_index("ix_items_failed", items.c.job_no, items.c.error_code, items.c.idx, where="state IN (2, 3)")

artifacts = sa.Table(
    "artifacts",
    metadata,
    *_keys(sa.Integer, "job_no"),
    *_keys(sa.BigInteger, "idx"),
    *_keys(sa.Text, "kind"),
    *_columns(sa.Text, "key", "sha256"),
    *_columns(sa.BigInteger, "bytes", "duration_ms", "samples", "seed", "epoch"),
    *_columns(sa.Integer, "sample_rate"),
    *_columns(sa.JSON, "meta"),
    # When it was committed, and by whom.
    *_optional(sa.Double, "made_at"),
    *_optional(sa.Text, "worker_id"),
    # Of an artifact in a pack: the key of the pack, and where the artifact's bytes begin in it.
    *_optional(sa.Text, "pack"),
    *_optional(sa.BigInteger, "pack_offset"),
    sqlite_with_rowid=False,
)

# What the checks said of each draw of an item that ended.
draws = sa.Table(
    "draws",
    metadata,
    *_keys(sa.Integer, "job_no"),
    *_keys(sa.BigInteger, "idx"),
    *_keys(sa.SmallInteger, "draw"),
    *_columns(sa.BigInteger, "seed", "duration_ms"),
    # NULL: it passed.
    *_optional(sa.Text, "code"),
    *_columns(sa.Boolean, "kept"),
    # Name -> [value, passed, detail]; see `records.Score`.
    *_columns(sa.JSON, "scores"),
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
    *_keys(sa.Integer, "job_no"),
    *_keys(sa.BigInteger, "idx"),
    # Which draw is kept.
    *_columns(sa.SmallInteger, "draw"),
    # NULL: not measured.
    *_optional(sa.Double, *SCORE_COLUMNS),
    # Name -> value of the scores without a column.
    *_optional(sa.JSON, "others"),
    sqlite_with_rowid=False,
)

attempts = sa.Table(
    "attempts",
    metadata,
    *_keys(sa.Text, "job_id"),
    *_keys(sa.Integer, "shard_no"),
    *_keys(sa.BigInteger, "epoch"),
    *_columns(sa.Text, "worker_id"),
    *_columns(sa.Double, "started_at"),
    # NULL while it runs. Outcome: done, partial, released, refused, failed, expired or cancelled.
    *_optional(sa.Double, "ended_at"),
    *_optional(sa.Text, "outcome", "error_code", "error_message"),
    *_counters("n_ok", "n_failed"),
)
_partial_index("ix_attempts_ended_at", attempts.c.ended_at, where="ended_at IS NOT NULL")

item_errors = sa.Table(
    "item_errors",
    metadata,
    *_keys(sa.Integer, "job_no"),
    *_keys(sa.BigInteger, "idx", "epoch"),
    *_columns(sa.Text, "code", "message"),
    *_columns(sa.Boolean, "retryable"),
    *_columns(sa.Double, "at"),
)

rejected_lines = sa.Table(
    "rejected_lines",
    metadata,
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.id"), primary_key=True),
    *_keys(sa.BigInteger, "line"),
    *_columns(sa.Text, "code", "message"),
    *_optional(sa.Text, "example_id"),
)

workers = sa.Table(
    "workers",
    metadata,
    *_keys(sa.Text, "id"),
    *_columns(sa.Text, "host", "gpu", "model", "version", "state"),
    # Why it is quarantined, or which job it cannot run and why.
    *_columns(sa.Text, "state_reason", default=""),
    *_columns(sa.Integer, "pid", "slots"),
    *_columns(sa.Double, "started_at", "heartbeat_at"),
)

# Jobs that were deleted, or are being deleted: what a worker that lost its lease still writes of them belongs
# to nothing.
deleted_jobs = sa.Table(
    "deleted_jobs",
    metadata,
    *_keys(sa.Text, "id"),
    *_columns(sa.Text, "store_url"),
    *_optional(sa.Text, "store_identity"),
    *_columns(sa.Double, "deleted_at"),
)

schedules = sa.Table(
    "schedules",
    metadata,
    *_keys(sa.Text, "name", "night"),
    *_columns(sa.Double, "ran_at"),
)
