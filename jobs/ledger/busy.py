"""When a job was worked on: the times in which one of its shards was leased. Plain SQL, which `glance` runs without SQLAlchemy."""

from __future__ import annotations

#: Between two leases so much is the handing out of work; more is a gap in which nobody worked.
GAP_SECONDS = 10.0
#: UTC epoch seconds by each engine's clock.
NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS DOUBLE PRECISION)",
}


def busy_spans(engine: str, jobs: str) -> str:
    """SQL for (job, start, end) of every time in which shards of `jobs` were leased, in order; `jobs` is a condition on `attempts.job_id`.

    Times that overlap or lie no more than `GAP_SECONDS` apart are one. A lease that runs counts up to now, or to where it ran out.
    """
    now = NOW[engine]
    before = "PARTITION BY job_id ORDER BY began, ended ROWS BETWEEN UNBOUNDED PRECEDING AND"
    return f"""
    WITH leases AS (
        SELECT attempts.job_id, started_at AS began,
            CASE WHEN ended_at IS NOT NULL THEN ended_at WHEN lease_until < {now} THEN lease_until ELSE {now} END AS ended
        FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
        WHERE attempts.job_id {jobs}
    ), marked AS (
        SELECT job_id, began, ended, CASE WHEN began <= max(ended) OVER ({before} 1 PRECEDING) + {GAP_SECONDS} THEN 0 ELSE 1 END AS fresh
        FROM leases
    ), numbered AS (
        SELECT job_id, began, ended, sum(fresh) OVER ({before} CURRENT ROW) AS span FROM marked
    )
    SELECT job_id, min(began) AS began, max(ended) AS ended FROM numbered GROUP BY job_id, span ORDER BY job_id, began
    """  # noqa: S608 - words of ours


#: Workers that live and take shards of :model, of any state but those that have ended.
LIVE_WORKERS = {
    engine: f"SELECT count(*) FROM workers WHERE state NOT IN ('retired', 'lost') AND heartbeat_at >= {now} - 60"  # noqa: S608
    " AND (model = '' OR model = :model)"
    for engine, now in NOW.items()
}
