"""The tables of the ledger in plain SQL; `migrations/` brings an older database to this shape.

Times are UTC epoch seconds of the database's clock. Lock order on PostgreSQL: job, then shards by number,
then items. A change of an item requires the lock of its shard, so shard counters are exact.
"""

from __future__ import annotations

#: Placeholder -> SQL of each database: an auto-increment number, and a table stored in the index of its
#: primary key.
DIALECTS = {
    "sqlite": {"<number>": "INTEGER", "<by key>": "WITHOUT ROWID"},
    "postgresql": {"<number>": "SERIAL", "<by key>": ""},
}
#: Statements; each ends with a semicolon at the end of a line.
TABLES = """
CREATE TABLE jobs (
    -- Short key for the tables with a row per item, which would be twice as large and half as fast with the
    -- id.
    no <number> NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    spec_sha TEXT NOT NULL,
    input_uri TEXT NOT NULL,
    input_sha256 TEXT NOT NULL,
    store_url TEXT NOT NULL,
    owner TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    state_reason TEXT DEFAULT '' NOT NULL,
    -- Identity of the store, see `ObjectStore.establish`.
    store_identity TEXT,
    spec JSON NOT NULL,
    labels JSON NOT NULL,
    priority INTEGER NOT NULL,
    weight INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    max_in_flight INTEGER,
    error_budget DOUBLE PRECISION,
    -- Items done and failed at the last resume, from which the error budget counts.
    budget_from_done BIGINT DEFAULT 0 NOT NULL,
    budget_from_failed BIGINT DEFAULT 0 NOT NULL,
    total_items BIGINT DEFAULT 0 NOT NULL,
    total_shards BIGINT DEFAULT 0 NOT NULL,
    rejected_lines BIGINT DEFAULT 0 NOT NULL,
    lines_read BIGINT DEFAULT 0 NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    started_at DOUBLE PRECISION,
    finished_at DOUBLE PRECISION,
    -- The `finished_at` whose manifest is in the store. If it differs or is NULL, the manifest is missing.
    manifest_finished_at DOUBLE PRECISION,
    -- The `finished_at` that was reported to the operator's hook.
    notified_finished_at DOUBLE PRECISION,
    -- When the next try of a report is due. While a try runs: when it counts as lost.
    notify_due_at DOUBLE PRECISION,
    -- Number of tries to report the present end.
    notify_attempts INTEGER DEFAULT 0 NOT NULL,
    CONSTRAINT pk_jobs PRIMARY KEY (no),
    CONSTRAINT uq_jobs_id UNIQUE (id),
    CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key),
    CONSTRAINT ck_jobs_state CHECK (state IN (
        'ingesting', 'ready', 'running', 'paused', 'cancelling', 'cancelled', 'completed', 'completed_with_errors', 'failed'
    )),
    CONSTRAINT ck_jobs_weight CHECK (weight > 0),
    CONSTRAINT ck_jobs_max_attempts CHECK (max_attempts > 0)
);
CREATE TABLE shards (
    job_id TEXT NOT NULL,
    no INTEGER NOT NULL,
    job_no INTEGER NOT NULL,
    n_items INTEGER NOT NULL,
    state TEXT DEFAULT 'ready' NOT NULL,
    -- Bounds of the indexes of its items. Items of other shards may lie between them.
    first_index BIGINT NOT NULL,
    last_index BIGINT NOT NULL,
    estimated_ms BIGINT NOT NULL,
    n_done BIGINT DEFAULT 0 NOT NULL,
    n_failed BIGINT DEFAULT 0 NOT NULL,
    n_skipped BIGINT DEFAULT 0 NOT NULL,
    audio_ms BIGINT DEFAULT 0 NOT NULL,
    engine_ms BIGINT DEFAULT 0 NOT NULL,
    -- Energy of the GPUs for this shard in millijoules; 0: unknown.
    energy_mj BIGINT DEFAULT 0 NOT NULL,
    bytes_out BIGINT DEFAULT 0 NOT NULL,
    epoch BIGINT DEFAULT 0 NOT NULL,
    -- n_done and n_failed at the start of the present lease, to see whether it made progress.
    claimed_done BIGINT DEFAULT 0 NOT NULL,
    claimed_failed BIGINT DEFAULT 0 NOT NULL,
    -- Number of consecutive leases that crashed without progress.
    attempts BIGINT DEFAULT 0 NOT NULL,
    -- Number of consecutive leases that failed because a service was down; used only for the backoff.
    outages BIGINT DEFAULT 0 NOT NULL,
    enqueued_epoch BIGINT,
    not_before DOUBLE PRECISION,
    enqueued_at DOUBLE PRECISION,
    lease_until DOUBLE PRECISION,
    heartbeat_at DOUBLE PRECISION,
    input_key TEXT NOT NULL,
    input_sha256 TEXT NOT NULL,
    worker_id TEXT,
    manifest_key TEXT,
    manifest_sha256 TEXT,
    CONSTRAINT pk_shards PRIMARY KEY (job_id, no),
    CONSTRAINT ck_shards_state CHECK (state IN ('ready', 'queued', 'leased', 'done', 'dead', 'cancelled')),
    CONSTRAINT ck_shards_counters CHECK (n_done + n_failed + n_skipped <= n_items),
    CONSTRAINT ck_shards_counters_positive CHECK (n_done >= 0 AND n_failed >= 0 AND n_skipped >= 0),
    CONSTRAINT ck_shards_leased_has_lease CHECK ((state = 'leased') = (lease_until IS NOT NULL)),
    CONSTRAINT fk_shards_job_id_jobs FOREIGN KEY (job_id) REFERENCES jobs (id)
);
CREATE INDEX ix_shards_ready ON shards (job_id, no) WHERE state = 'ready';
CREATE INDEX ix_shards_queued ON shards (job_id, enqueued_at) WHERE state = 'queued';
CREATE INDEX ix_shards_leased ON shards (job_id, lease_until) WHERE state = 'leased';
CREATE TABLE items (
    job_no INTEGER NOT NULL,
    idx BIGINT NOT NULL,
    example_id TEXT NOT NULL,
    shard_no INTEGER NOT NULL,
    -- One of ITEM_STATES.
    state SMALLINT DEFAULT 0 NOT NULL,
    attempts SMALLINT DEFAULT 0 NOT NULL,
    error_code TEXT,
    error_message TEXT,
    -- Number of the spoken turn within its dialogue. Each dialogue has a turn 0, so two dialogues cannot have
    -- the same example id.
    turn INTEGER DEFAULT 0 NOT NULL,
    CONSTRAINT pk_items PRIMARY KEY (job_no, idx),
    CONSTRAINT uq_items_job_no_example_id_turn UNIQUE (job_no, example_id, turn),
    CONSTRAINT ck_items_state CHECK (state BETWEEN 0 AND 4)
) <by key>;
CREATE INDEX ix_items_failed ON items (job_no, error_code, idx) WHERE state IN (2, 3);
CREATE TABLE artifacts (
    job_no INTEGER NOT NULL,
    idx BIGINT NOT NULL,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    bytes BIGINT NOT NULL,
    duration_ms BIGINT NOT NULL,
    samples BIGINT NOT NULL,
    seed BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    sample_rate INTEGER NOT NULL,
    meta JSON NOT NULL,
    -- Time and worker of the commit.
    made_at DOUBLE PRECISION,
    worker_id TEXT,
    -- Key of the pack that contains the artifact, and the offset of its bytes there.
    pack TEXT,
    pack_offset BIGINT,
    CONSTRAINT pk_artifacts PRIMARY KEY (job_no, idx, kind)
) <by key>;
-- Check results of each draw of an ended item.
CREATE TABLE draws (
    job_no INTEGER NOT NULL,
    idx BIGINT NOT NULL,
    draw SMALLINT NOT NULL,
    seed BIGINT NOT NULL,
    duration_ms BIGINT NOT NULL,
    -- Why it was rejected; NULL: it passed.
    code TEXT,
    kept BOOLEAN NOT NULL,
    -- Name -> [value, passed, detail]: see `records.Score`.
    scores JSON NOT NULL,
    CONSTRAINT pk_draws PRIMARY KEY (job_no, idx, draw)
) <by key>;
-- Scores of the kept audio of an item, as numbers that filters compare. `draws` has them with details.
CREATE TABLE scores (
    job_no INTEGER NOT NULL,
    idx BIGINT NOT NULL,
    -- The kept draw.
    draw SMALLINT NOT NULL,
    -- SCORE_COLUMNS. NULL: not measured.
    ended DOUBLE PRECISION,
    duration DOUBLE PRECISION,
    clipped DOUBLE PRECISION,
    silence DOUBLE PRECISION,
    pause DOUBLE PRECISION,
    loudness DOUBLE PRECISION,
    wer DOUBLE PRECISION,
    cer DOUBLE PRECISION,
    distillmos DOUBLE PRECISION,
    dnsmos DOUBLE PRECISION,
    similarity DOUBLE PRECISION,
    -- Name -> value of scores without a column.
    others JSON,
    CONSTRAINT pk_scores PRIMARY KEY (job_no, idx)
) <by key>;
-- What people decided about the audio of items; the last one of an item counts.
CREATE TABLE decisions (
    job_no INTEGER NOT NULL,
    idx BIGINT NOT NULL,
    -- From 1 within its item.
    no INTEGER NOT NULL,
    accepted BOOLEAN NOT NULL,
    person TEXT NOT NULL,
    decided_at DOUBLE PRECISION NOT NULL,
    reason TEXT NOT NULL,
    -- Of the audio; empty: the item had none. If the item has other audio, the decision is void.
    sha256 TEXT NOT NULL,
    CONSTRAINT pk_decisions PRIMARY KEY (job_no, idx, no)
) <by key>;
CREATE TABLE attempts (
    job_id TEXT NOT NULL,
    shard_no INTEGER NOT NULL,
    epoch BIGINT NOT NULL,
    worker_id TEXT NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    -- NULL while the lease runs. Outcome: done, partial, released, refused, failed, expired or cancelled.
    ended_at DOUBLE PRECISION,
    outcome TEXT,
    error_code TEXT,
    error_message TEXT,
    n_ok BIGINT DEFAULT 0 NOT NULL,
    n_failed BIGINT DEFAULT 0 NOT NULL,
    CONSTRAINT pk_attempts PRIMARY KEY (job_id, shard_no, epoch)
);
CREATE INDEX ix_attempts_ended_at ON attempts (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE item_errors (
    job_no INTEGER NOT NULL,
    idx BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    code TEXT NOT NULL,
    message TEXT NOT NULL,
    retryable BOOLEAN NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_item_errors PRIMARY KEY (job_no, idx, epoch)
);
CREATE TABLE rejected_lines (
    job_id TEXT NOT NULL,
    line BIGINT NOT NULL,
    code TEXT NOT NULL,
    message TEXT NOT NULL,
    example_id TEXT,
    CONSTRAINT pk_rejected_lines PRIMARY KEY (job_id, line),
    CONSTRAINT fk_rejected_lines_job_id_jobs FOREIGN KEY (job_id) REFERENCES jobs (id)
);
CREATE TABLE workers (
    id TEXT NOT NULL,
    host TEXT NOT NULL,
    gpu TEXT NOT NULL,
    model TEXT NOT NULL,
    version TEXT NOT NULL,
    state TEXT NOT NULL,
    -- Why it is quarantined, or which job it cannot run and why.
    state_reason TEXT DEFAULT '' NOT NULL,
    pid INTEGER NOT NULL,
    slots INTEGER NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    heartbeat_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_workers PRIMARY KEY (id)
);
-- Jobs that were deleted, or are being deleted. A worker that lost its lease may still write objects of such
-- a job.
CREATE TABLE deleted_jobs (
    id TEXT NOT NULL,
    store_url TEXT NOT NULL,
    store_identity TEXT,
    deleted_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_deleted_jobs PRIMARY KEY (id)
);
CREATE TABLE schedules (
    name TEXT NOT NULL,
    night TEXT NOT NULL,
    ran_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_schedules PRIMARY KEY (name, night)
);
"""
#: Table -> the column by whose ranges the rows of a job are deleted; tables that refer to others come first.
ROWS_OF_JOBS = {
    "item_errors": "idx",
    "decisions": "idx",
    "scores": "idx",
    "draws": "idx",
    "artifacts": "idx",
    "items": "idx",
    "attempts": "shard_no",
    "rejected_lines": "line",
    "shards": "no",
}


def statements(engine: str) -> list[str]:
    """The statements that create the tables of a new ledger on `sqlite` or `postgresql`."""
    text = TABLES
    for placeholder, sql in DIALECTS[engine].items():
        text = text.replace(placeholder, sql)
    return text.strip().removesuffix(";").split(";\n")
