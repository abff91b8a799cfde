BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0003');
CREATE TABLE artifacts (
	job_no INTEGER NOT NULL, 
	idx BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	sha256 TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	duration_ms BIGINT NOT NULL, 
	sample_rate INTEGER NOT NULL, 
	samples BIGINT NOT NULL, 
	seed BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	worker_id TEXT, 
	meta JSON NOT NULL, made_at DOUBLE, 
	CONSTRAINT pk_artifacts PRIMARY KEY (job_no, idx, kind)
)
 WITHOUT ROWID

;
INSERT INTO "artifacts" VALUES(1,0,'audio','jobs/01m81yarqm5nn48j0r341j7eng/audio/00000/000000000-both.flac','3294936e30bcee19a3dee6c8ddc07e2a197e8be3734b5570162676d78b7bc2d9',16466,900,24000,21600,1930335921736509491,1,'host-4223-6d82b3ce','{"frames":72,"finish_reason":"stop","loudness_lufs":-23.0}',1.79536169722998428343e+09);
INSERT INTO "artifacts" VALUES(1,1,'audio','jobs/01m81yarqm5nn48j0r341j7eng/audio/00000/000000001-asked.flac','d292f11ad81e5d1f2fd53de7953f614457458fdbf65b4e9051d9089f8f65ae4d',15840,925,24000,22200,6231713393815073734,1,'host-4223-6d82b3ce','{"frames":74,"finish_reason":"stop","loudness_lufs":-23.0}',1.79536169722998428343e+09);
CREATE TABLE attempts (
	job_id TEXT NOT NULL, 
	shard_no INTEGER NOT NULL, 
	epoch BIGINT NOT NULL, 
	worker_id TEXT NOT NULL, 
	started_at DOUBLE NOT NULL, 
	ended_at DOUBLE, 
	outcome TEXT, 
	n_ok BIGINT DEFAULT 0 NOT NULL, 
	n_failed BIGINT DEFAULT 0 NOT NULL, 
	error_code TEXT, 
	error_message TEXT, 
	CONSTRAINT pk_attempts PRIMARY KEY (job_id, shard_no, epoch)
);
INSERT INTO "attempts" VALUES('01m81yarqm5nn48j0r341j7eng',0,1,'host-4223-6d82b3ce',1.79536169553299093247e+09,1.79536169724000239369e+09,'done',2,0,NULL,NULL);
CREATE TABLE draws (
	job_no INTEGER NOT NULL, 
	idx BIGINT NOT NULL, 
	draw SMALLINT NOT NULL, 
	seed BIGINT NOT NULL, 
	code TEXT, 
	kept BOOLEAN NOT NULL, 
	duration_ms BIGINT NOT NULL, 
	scores JSON NOT NULL, 
	CONSTRAINT pk_draws PRIMARY KEY (job_no, idx, draw)
)
 WITHOUT ROWID

;
CREATE TABLE item_errors (
	job_no INTEGER NOT NULL, 
	idx BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	code TEXT NOT NULL, 
	message TEXT NOT NULL, 
	retryable BOOLEAN NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_item_errors PRIMARY KEY (job_no, idx, epoch)
);
CREATE TABLE items (
	job_no INTEGER NOT NULL, 
	idx BIGINT NOT NULL, 
	example_id TEXT NOT NULL, 
	shard_no INTEGER NOT NULL, 
	state SMALLINT DEFAULT 0 NOT NULL, 
	attempts SMALLINT DEFAULT 0 NOT NULL, 
	error_code TEXT, 
	error_message TEXT, 
	CONSTRAINT pk_items PRIMARY KEY (job_no, idx), 
	CONSTRAINT ck_items_state CHECK (state BETWEEN 0 AND 4), 
	CONSTRAINT uq_items_job_no_example_id UNIQUE (job_no, example_id)
)
 WITHOUT ROWID

;
INSERT INTO "items" VALUES(1,0,'both',0,1,1,NULL,NULL);
INSERT INTO "items" VALUES(1,1,'asked',0,1,1,NULL,NULL);
CREATE TABLE jobs (
	no INTEGER NOT NULL, 
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	state TEXT NOT NULL, 
	state_reason TEXT DEFAULT '' NOT NULL, 
	priority INTEGER NOT NULL, 
	weight INTEGER NOT NULL, 
	spec JSON NOT NULL, 
	spec_sha TEXT NOT NULL, 
	input_uri TEXT NOT NULL, 
	input_sha256 TEXT NOT NULL, 
	store_url TEXT NOT NULL, 
	owner TEXT NOT NULL, 
	labels JSON NOT NULL, 
	idempotency_key TEXT NOT NULL, 
	max_attempts INTEGER NOT NULL, 
	max_in_flight INTEGER, 
	error_budget DOUBLE, 
	budget_from_done BIGINT DEFAULT 0 NOT NULL, 
	budget_from_failed BIGINT DEFAULT 0 NOT NULL, 
	total_items BIGINT DEFAULT 0 NOT NULL, 
	total_shards BIGINT DEFAULT 0 NOT NULL, 
	rejected_lines BIGINT DEFAULT 0 NOT NULL, 
	lines_read BIGINT DEFAULT 0 NOT NULL, 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	paused_at DOUBLE, 
	cancel_requested_at DOUBLE, 
	CONSTRAINT pk_jobs PRIMARY KEY (no), 
	CONSTRAINT ck_jobs_state CHECK (state IN ('ingesting', 'ready', 'running', 'paused', 'cancelling', 'cancelled', 'completed', 'completed_with_errors', 'failed')), 
	CONSTRAINT ck_jobs_max_attempts CHECK (max_attempts > 0), 
	CONSTRAINT ck_jobs_weight CHECK (weight > 0), 
	CONSTRAINT uq_jobs_id UNIQUE (id), 
	CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "jobs" VALUES(1,'01m81yarqm5nn48j0r341j7eng','','completed','',0,1,'{"model": "hibari", "model_revision": "0.2.1", "generation": {}, "seed": 5, "format": "flac", "quality": null}','08c8ace6736d4f9afd5e42791d3c5faab7d8faf9aeb9e948d4c09c1d3cfb1c26','in.jsonl','86d4c5abdcb444dd466a55cae6c966a674ab47fb4f8dadaf6280ec75a1093f23','{store}','owner','{}','42ce9450133af28fc425a03890b6803db19b666ecf772c7b4719fd484bc9166e',3,NULL,NULL,0,0,2,1,0,2,1.79536169445401883127e+09,1.79536169552900791166e+09,1795361697.24302,NULL,NULL);
CREATE TABLE rejected_lines (
	job_id TEXT NOT NULL, 
	line BIGINT NOT NULL, 
	code TEXT NOT NULL, 
	message TEXT NOT NULL, 
	example_id TEXT, 
	CONSTRAINT pk_rejected_lines PRIMARY KEY (job_id, line), 
	CONSTRAINT fk_rejected_lines_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE schedules (
	name TEXT NOT NULL, 
	night TEXT NOT NULL, 
	ran_at DOUBLE NOT NULL, 
	CONSTRAINT pk_schedules PRIMARY KEY (name, night)
);
CREATE TABLE shards (
	job_id TEXT NOT NULL, 
	no INTEGER NOT NULL, 
	job_no INTEGER NOT NULL, 
	state TEXT DEFAULT 'ready' NOT NULL, 
	first_index BIGINT NOT NULL, 
	last_index BIGINT NOT NULL, 
	n_items INTEGER NOT NULL, 
	n_done BIGINT DEFAULT 0 NOT NULL, 
	n_failed BIGINT DEFAULT 0 NOT NULL, 
	n_skipped BIGINT DEFAULT 0 NOT NULL, 
	audio_ms BIGINT DEFAULT 0 NOT NULL, 
	engine_ms BIGINT DEFAULT 0 NOT NULL, 
	bytes_out BIGINT DEFAULT 0 NOT NULL, 
	estimated_ms BIGINT NOT NULL, 
	epoch BIGINT DEFAULT 0 NOT NULL, 
	claimed_done BIGINT DEFAULT 0 NOT NULL, 
	claimed_failed BIGINT DEFAULT 0 NOT NULL, 
	attempts BIGINT DEFAULT 0 NOT NULL, 
	outages BIGINT DEFAULT 0 NOT NULL, 
	not_before DOUBLE, 
	enqueued_epoch BIGINT, 
	enqueued_at DOUBLE, 
	worker_id TEXT, 
	lease_until DOUBLE, 
	heartbeat_at DOUBLE, 
	input_key TEXT NOT NULL, 
	input_sha256 TEXT NOT NULL, 
	manifest_key TEXT, 
	manifest_sha256 TEXT, 
	CONSTRAINT pk_shards PRIMARY KEY (job_id, no), 
	CONSTRAINT ck_shards_leased_has_lease CHECK ((state = 'leased') = (lease_until IS NOT NULL)), 
	CONSTRAINT ck_shards_state CHECK (state IN ('ready', 'queued', 'leased', 'done', 'dead', 'cancelled')), 
	CONSTRAINT ck_shards_counters CHECK (n_done + n_failed + n_skipped <= n_items), 
	CONSTRAINT ck_shards_counters_positive CHECK (n_done >= 0 AND n_failed >= 0 AND n_skipped >= 0), 
	CONSTRAINT fk_shards_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO "shards" VALUES('01m81yarqm5nn48j0r341j7eng',0,1,'done',0,1,2,2,0,0,1825,649,32306,612,1,0,0,0,0,NULL,NULL,NULL,NULL,NULL,NULL,'jobs/01m81yarqm5nn48j0r341j7eng/input/000000.jsonl.zst','ca7793fb1914e05a100fa15d31a45b598adfe3d7dcb022e1e42ec8c559c7f5d5','jobs/01m81yarqm5nn48j0r341j7eng/manifest/000000.jsonl','1eccb50fb381cbe6f7bf5966cb9f0c1169fdda2196a4b94614437013a88b5201');
CREATE TABLE workers (
	id TEXT NOT NULL, 
	host TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	gpu TEXT NOT NULL, 
	model TEXT NOT NULL, 
	version TEXT NOT NULL, 
	slots INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	started_at DOUBLE NOT NULL, 
	heartbeat_at DOUBLE NOT NULL, 
	CONSTRAINT pk_workers PRIMARY KEY (id)
);
INSERT INTO "workers" VALUES('host-4223-6d82b3ce','host',4223,'','','0.1.0',2,'retired',1.79536169547899818414e+09,1.7953616984990179539e+09);
CREATE INDEX ix_shards_leased ON shards (job_id, lease_until) WHERE state = 'leased';
CREATE INDEX ix_shards_queued ON shards (job_id, enqueued_at) WHERE state = 'queued';
CREATE INDEX ix_shards_ready ON shards (job_id, no) WHERE state = 'ready';
CREATE INDEX ix_items_failed ON items (job_no, error_code, idx) WHERE state IN (2, 3);
COMMIT;
