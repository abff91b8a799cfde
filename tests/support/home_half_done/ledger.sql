BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0006');
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
INSERT INTO "artifacts" VALUES(1,0,'audio','jobs/01m82cxvbf9gd73qc850cvphp6/audio/00000/000000000-talk.flac','cb8c37183e69feb8536e0fa384ac57d1cbf58889bb3dd4ffaaf54b9553d47c7e',782,90,16000,1440,8920143249168976922,1,'worker-1','{}',1.79537699993398642541e+09);
INSERT INTO "artifacts" VALUES(1,1,'audio','jobs/01m82cxvbf9gd73qc850cvphp6/audio/00000/000000001-talk.flac','8024176af28cf0e2e58758207cfe9e9208aa2e524d0b295486237152c4749f8b',1025,90,16000,1440,5788918733227816787,1,'worker-1','{}',1.79537699993398642541e+09);
INSERT INTO "artifacts" VALUES(1,2,'audio','jobs/01m82cxvbf9gd73qc850cvphp6/audio/00000/000000002-ask.flac','4bbe3a5dfc36f787ac7e889b1bdbdff90d82830d19f3888b9be1fa6c25eaa52d',1054,100,16000,1600,934756459478596367,1,'worker-1','{}',1.79537700000101470947e+09);
INSERT INTO "artifacts" VALUES(1,4,'audio','jobs/01m82cxvbf9gd73qc850cvphp6/audio/00000/000000004-late.flac','f1e701737430de464018e4ef25b1329d36525bfc5de7f35eab43f63ef5f83c2a',1638,160,16000,2560,5971507820719945154,1,'worker-1','{}',1.79537700208798789978e+09);
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
INSERT INTO "attempts" VALUES('01m82cxvbf9gd73qc850cvphp6',0,1,'worker-1',1.79537699987601041796e+09,1.79537699995301675793e+09,'done',2,0,NULL,NULL);
INSERT INTO "attempts" VALUES('01m82cxvbf9gd73qc850cvphp6',1,1,'worker-1',1.79537699996898913383e+09,1.79537700006301403042e+09,'done',1,1,NULL,NULL);
INSERT INTO "attempts" VALUES('01m82cxvbf9gd73qc850cvphp6',2,1,'worker-1',1.79537700008401584625e+09,NULL,NULL,0,0,NULL,NULL);
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
INSERT INTO "item_errors" VALUES(1,3,1,'synth.nan','The fake engine was asked to fail.',0,1.79537700004000067713e+09);
CREATE TABLE "items" (
	job_no INTEGER NOT NULL, 
	idx BIGINT NOT NULL, 
	example_id TEXT NOT NULL, 
	shard_no INTEGER NOT NULL, 
	state SMALLINT DEFAULT 0 NOT NULL, 
	attempts SMALLINT DEFAULT 0 NOT NULL, 
	error_code TEXT, 
	error_message TEXT, 
	turn INTEGER DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_items PRIMARY KEY (job_no, idx), 
	CONSTRAINT ck_items_state CHECK (state BETWEEN 0 AND 4), 
	CONSTRAINT uq_items_job_no_example_id_turn UNIQUE (job_no, example_id, turn)
)
 WITHOUT ROWID

;
INSERT INTO "items" VALUES(1,0,'talk',0,1,1,NULL,NULL,0);
INSERT INTO "items" VALUES(1,1,'talk',0,1,1,NULL,NULL,1);
INSERT INTO "items" VALUES(1,2,'ask',1,1,1,NULL,NULL,0);
INSERT INTO "items" VALUES(1,3,'broken',1,2,1,'synth.nan','The fake engine was asked to fail.',0);
INSERT INTO "items" VALUES(1,4,'late',2,1,1,NULL,NULL,0);
INSERT INTO "items" VALUES(1,5,'last',2,0,0,NULL,NULL,0);
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
	cancel_requested_at DOUBLE, manifest_finished_at DOUBLE, 
	CONSTRAINT pk_jobs PRIMARY KEY (no), 
	CONSTRAINT ck_jobs_state CHECK (state IN ('ingesting', 'ready', 'running', 'paused', 'cancelling', 'cancelled', 'completed', 'completed_with_errors', 'failed')), 
	CONSTRAINT ck_jobs_max_attempts CHECK (max_attempts > 0), 
	CONSTRAINT ck_jobs_weight CHECK (weight > 0), 
	CONSTRAINT uq_jobs_id UNIQUE (id), 
	CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "jobs" VALUES(1,'01m82cxvbf9gd73qc850cvphp6','before','running','',0,1,'{"model": "hibari", "model_revision": "0.2.1", "generation": {}, "seed": 7, "format": "flac", "quality": null, "speak": "user"}','7c3ecf1f5f7fd18e3e53d983621fbf60fb843331b925292a6a0f028caf2c6ebe','/data/in.jsonl','df5d090da80d67a948bb862712c06984a88ff11fe75153cf8d95afca33eae696','home:','','{"split": "dev"}','dce34f45228f8362cc6b21edbd7576f96f92f436ef2afe2f76d1b6262ef176b0',3,NULL,NULL,0,0,6,3,1,6,1.79537699979300951957e+09,1.79537699986301517484e+09,NULL,NULL,NULL,NULL);
CREATE TABLE rejected_lines (
	job_id TEXT NOT NULL, 
	line BIGINT NOT NULL, 
	code TEXT NOT NULL, 
	message TEXT NOT NULL, 
	example_id TEXT, 
	CONSTRAINT pk_rejected_lines PRIMARY KEY (job_id, line), 
	CONSTRAINT fk_rejected_lines_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO "rejected_lines" VALUES('01m82cxvbf9gd73qc850cvphp6',6,'input.bad_json','The line is not JSON: JSON is malformed: object keys must be strings (byte 1). Write one JSON object a line.',NULL);
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
INSERT INTO "shards" VALUES('01m82cxvbf9gd73qc850cvphp6',0,1,'done',0,1,2,2,0,0,180,13,1807,544,1,0,0,0,0,NULL,NULL,NULL,NULL,NULL,NULL,'jobs/01m82cxvbf9gd73qc850cvphp6/input/000000.jsonl.zst','e98e35bc1e74329224b88169adb6f8c89dc8538e62755906ee055db78596ea84','jobs/01m82cxvbf9gd73qc850cvphp6/manifest/000000.jsonl','540caefcbc0f1db76eb8bba39a02d66509eb837cd61bcdd43d1f1a8f4d599d7c');
INSERT INTO "shards" VALUES('01m82cxvbf9gd73qc850cvphp6',1,1,'done',2,3,2,1,1,0,100,0,1054,1564,1,0,0,0,0,NULL,NULL,NULL,NULL,NULL,NULL,'jobs/01m82cxvbf9gd73qc850cvphp6/input/000001.jsonl.zst','949292f3bfbd7399ea724cc3b6ed1ac8ca6f7683aa5d4670afaf57505068de2e','jobs/01m82cxvbf9gd73qc850cvphp6/manifest/000001.jsonl','346708826033e2449c6322dee598a3ee940c23b937eaaea10f88908ab574b027');
INSERT INTO "shards" VALUES('01m82cxvbf9gd73qc850cvphp6',2,1,'leased',4,5,2,1,0,0,160,0,1638,1020,1,0,0,0,0,NULL,NULL,NULL,'worker-1',1.79537706008401584624e+09,1.79537700008401584625e+09,'jobs/01m82cxvbf9gd73qc850cvphp6/input/000002.jsonl.zst','4fe155d4dfdf84234dc5bcfb4af62fdd74c10761eb68b6c813d6bcba90242c4c',NULL,NULL);
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
INSERT INTO "workers" VALUES('worker-1','host',1,'','','test',2,'up',1.79537699976198959349e+09,1.79537699976198959349e+09);
CREATE INDEX ix_shards_leased ON shards (job_id, lease_until) WHERE state = 'leased';
CREATE INDEX ix_shards_queued ON shards (job_id, enqueued_at) WHERE state = 'queued';
CREATE INDEX ix_shards_ready ON shards (job_id, no) WHERE state = 'ready';
CREATE INDEX ix_items_failed ON items (job_no, error_code, idx) WHERE state IN (2, 3);
COMMIT;
