"""The JSON views of the ledger's records: what `--json` prints. Each object names its schema; fields are added, never changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from jobs.ledger.records import INPUT_FORMAT, ItemRow, Job, JobState, RejectedLine, ShardState
from jobs.ledger.status import RECENT_SECONDS, JobStatus, WorkerStatus
from pipelines.errors import ErrorCode

if TYPE_CHECKING:
    from jobs.provenance import Provenance

#: Fewer ended shards say nothing of how shards differ.
FEWEST_SHARDS = 3
#: States that go on without a person.
_MOVING = frozenset({JobState.READY, JobState.RUNNING})


def utc(seconds: float | None) -> str | None:
    """Epoch seconds as ISO 8601, or None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def elapsed_seconds(status: JobStatus) -> float:
    """Time from the first claim to the end, or to now; 0 before the first claim."""
    if status.job.started_at is None:
        return 0.0
    return max(0.0, (status.job.finished_at or status.now) - status.job.started_at)


def busy_seconds(status: JobStatus) -> float:
    """Time in which workers held shards of the job: without pauses, and without the time between its end and a retry."""
    return elapsed_seconds(status) if status.busy_seconds is None else status.busy_seconds


def items_per_second(status: JobStatus) -> float:
    """Items that ended, over the time in which workers held shards."""
    seconds = busy_seconds(status)
    return (status.items.done + status.items.failed) / seconds if seconds > 0 else 0.0


def lacks_workers(status: JobStatus) -> bool:
    """Whether the job waits for nothing but a worker: none lives that would take its shards."""
    return status.workers == 0 and status.job.state in _MOVING and status.items.pending > 0


def eta_seconds(status: JobStatus) -> float | None:
    """Time the open items will take at the rate so far; 0 at the end, None while nobody can know."""
    if status.job.state.final:
        return 0.0
    rate = items_per_second(status)
    return status.items.pending / rate if rate > 0 and status.job.state in _MOVING else None


def eta_error_seconds(status: JobStatus) -> float | None:
    """Half the width of the ETA's 95 % prediction interval; None where too few shards have ended to tell.

    With n shards ended, k to go, and mean m and standard deviation s of an item's engine time over the ended ones, the ETA's
    relative error is t * s / m * sqrt(1 / k + 1 / n), t from Student's distribution for n - 1 degrees of freedom (the prediction
    interval of a mean: Hahn, 1969). It covers that shards differ, not that workers come or go.
    """
    eta, spread = eta_seconds(status), status.spread
    if status.job.state.final or eta is None or spread.shards < FEWEST_SHARDS or spread.item_ms <= 0:
        return None
    to_go = sum(status.shards.get(state, 0) for state in (ShardState.READY, ShardState.QUEUED, ShardState.LEASED))
    mean = spread.item_ms / spread.shards
    variance = max(0.0, (spread.item_ms_squared - spread.shards * mean * mean) / (spread.shards - 1))
    relative = math.sqrt(variance) / mean * math.sqrt(1 / max(1, to_go) + 1 / spread.shards)
    return eta * _student(spread.shards - 1) * relative


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion in 1 / freedom (Abramowitz and Stegun 26.7.5)."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def cost(status: JobStatus, price_per_gpu_hour: float | None) -> float | None:
    """Engine time so far at the price of a GPU hour, in the price's currency."""
    return None if price_per_gpu_hour is None else status.engine_ms / 3_600_000 * price_per_gpu_hour


def cost_at_end(status: JobStatus, price_per_gpu_hour: float | None) -> float | None:
    """What the job will have cost, where open items cost as those that ended; None while nobody can know."""
    spent, ended = cost(status, price_per_gpu_hour), status.items.done + status.items.failed
    if spent is None or not ended:
        return None
    return spent * (ended + status.items.pending) / ended


def rtfx(status: JobStatus) -> float | None:
    """RTFx: seconds of audio made in a second in which workers held shards; None before there is any."""
    seconds = busy_seconds(status)
    return status.audio_ms / 1000 / seconds if seconds > 0 and status.audio_ms else None


def status_view(
    status: JobStatus, price_per_gpu_hour: float | None = None, errors: Mapping[ErrorCode, int] | None = None
) -> dict[str, Any]:
    """`nightjar.status/1`; `errors` counts failed items and rejected lines by code."""
    job, items = status.job, status.items
    view: dict[str, Any] = {
        "schema": "nightjar.status/1",
        "job": job.id,
        "name": job.name,
        "state": job.state.value,
        "state_reason": job.state_reason,
        "waiting_for": None if status.outage is None else {"code": status.outage.code.value, "message": status.outage.message},
        "items": {"total": items.total, "done": items.done, "failed": items.failed, "skipped": items.skipped, "pending": items.pending},
        "shards": {state.value: count for state, count in status.shards.items()},
        "rejected_lines": job.rejected_lines,
        "audio_seconds": round(status.audio_ms / 1000, 3),
        "audio_hours": round(status.audio_ms / 3_600_000, 6),
        "engine_seconds": round(status.engine_ms / 1000, 3),
        "gpu_seconds": round(status.engine_ms / 1000, 3),
        "elapsed_seconds": round(elapsed_seconds(status), 3),
        "busy_seconds": round(busy_seconds(status), 3),
        "workers": status.workers,
        "quarantined_workers": status.quarantined_workers,
        "labels": dict(job.labels),
        "items_per_second": round(items_per_second(status), 3),
        "rtfx": _rounded(rtfx(status)),
        # The name of `rtfx` before RTF and RTFx were told apart.
        "real_time_factor": _rounded(rtfx(status)),
        "eta_seconds": _rounded(eta_seconds(status)),
        "eta_error_seconds": _rounded(eta_error_seconds(status)),
        "bytes": status.bytes_out,
        "model": job.spec.model,
        "store": job.store_url,
        "created_at": utc(job.created_at),
        "started_at": utc(job.started_at),
        "finished_at": utc(job.finished_at),
    }
    if price_per_gpu_hour is not None:
        view["price_per_gpu_hour"] = price_per_gpu_hour
        view["cost"] = _rounded(cost(status, price_per_gpu_hour))
        view["cost_at_end"] = _rounded(cost_at_end(status, price_per_gpu_hour))
    if errors is not None:
        view["errors"] = {code.value: count for code, count in errors.items()}
    return view


def job_view(job: Job, made_with: Sequence[Provenance] | None, command: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """`nightjar.job/1`: what a job is made with. `made_with`: the records of the kinds of workers that took part; None: the store did not
    give them. `command` makes the job again, as far as `notes` do not say otherwise."""
    # The other views pay for no store.
    from jobs.layout import job_prefix

    return {
        "schema": "nightjar.job/1",
        "job": job.id,
        "name": job.name,
        "state": job.state.value,
        "state_reason": job.state_reason,
        "owner": job.owner,
        "priority": job.priority,
        "weight": job.weight,
        "max_attempts": job.max_attempts,
        "max_in_flight": job.max_in_flight,
        "error_budget": job.error_budget,
        "labels": dict(job.labels),
        "spec": msgspec.to_builtins(job.spec),
        "spec_sha": job.spec_sha,
        "input": {
            "uri": job.input_uri,
            "sha256": job.input_sha256,
            "format": job.labels.get(INPUT_FORMAT, "dialogues"),
            "lines": job.lines_read,
            "rejected_lines": job.rejected_lines,
        },
        "items": job.total_items,
        "shards": job.total_shards,
        "store": job.store_url,
        "prefix": job_prefix(job.id),
        "packed": job.spec.pack is True,
        "created_at": utc(job.created_at),
        "started_at": utc(job.started_at),
        "finished_at": utc(job.finished_at),
        "made_with": None if made_with is None else [msgspec.to_builtins(record) for record in made_with],
        "command": list(command),
        "command_notes": list(notes),
    }


def worker_view(worker: WorkerStatus) -> dict[str, Any]:
    """`nightjar.worker/1`: a worker with the shards that it holds and what it made in the last `recent.seconds` (`jobs.ledger.status`)."""
    recent = worker.recent
    return {
        "schema": "nightjar.worker/1",
        "worker": worker.id,
        "host": worker.host,
        "pid": worker.pid,
        "gpu": worker.gpu or None,
        "model": worker.model or None,
        "version": worker.version,
        "slots": worker.slots,
        "state": worker.state,
        "reason": worker.state_reason or None,
        "started_at": utc(worker.started_at),
        "heartbeat_at": utc(worker.heartbeat_at),
        "silent_seconds": round(worker.silent_seconds, 3),
        "shards": [
            {
                "job": held.job_id,
                "job_name": held.job_name,
                "shard": held.shard_no,
                "items": held.items,
                "ended_items": held.ended_items,
                "claimed_at": utc(held.claimed_at),
            }
            for held in worker.held
        ],
        "recent": {
            "seconds": RECENT_SECONDS,
            "items_done": recent.items_done,
            "items_failed": recent.items_failed,
            "audio_seconds": round(recent.audio_seconds, 3),
            "busy_seconds": round(recent.busy_seconds, 3),
        },
        "rtfx": _rounded(recent.rtfx),
    }


def item_view(job_id: str, item: ItemRow, line: int | None = None) -> dict[str, Any]:
    """`nightjar.item/1`: an item with its line of the input and its audio; the audio's fields are null while there is none. `id`
    names the turn too, where several of a dialogue are spoken; `turn` counts these from 0."""
    artifact = item.artifact
    return {
        "schema": "nightjar.item/1",
        "job": job_id,
        "example_id": item.example_id,
        "id": item.id,
        "turn": item.turn,
        "index": item.index,
        "line": line,
        "state": item.state.value,
        "attempts": item.attempts,
        "error_code": item.error_code.value if item.error_code else None,
        "error_message": item.error_message,
        "key": artifact.key if artifact else None,
        "sha256": artifact.sha256 if artifact else None,
        "bytes": artifact.bytes if artifact else None,
        "pack": artifact.pack if artifact else None,
        "pack_offset": artifact.pack_offset if artifact else None,
        "duration_ms": artifact.duration_ms if artifact else None,
        "sample_rate": artifact.sample_rate if artifact else None,
        "seed": artifact.seed if artifact else None,
    }


def line_error_view(job_id: str, line: RejectedLine) -> dict[str, Any]:
    """`nightjar.job_error/1` of an input line that became no item."""
    return _job_error(job_id, "line", line.code, line.message, line.example_id, line=line.line)


def item_error_view(job_id: str, item: ItemRow, line: int | None = None) -> dict[str, Any]:
    """`nightjar.job_error/1` of an item that failed, with its line of the input."""
    return _job_error(job_id, "item", item.error_code, item.error_message, item.example_id, line=line, index=item.index, id=item.id)


def _job_error(
    job_id: str,
    kind: str,
    code: ErrorCode | None,
    message: str | None,
    example_id: str | None,
    line: int | None = None,
    index: int | None = None,
    id: str | None = None,
) -> dict[str, Any]:
    return {
        "schema": "nightjar.job_error/1",
        "job": job_id,
        "kind": kind,
        "line": line,
        "index": index,
        "example_id": example_id,
        "id": example_id if id is None else id,
        "code": code.value if code else None,
        "message": message,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
