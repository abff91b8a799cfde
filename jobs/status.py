"""Figures, text lines and JSON views (`--json`) of the ledger's records.

Each view names its schema; fields are added, never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from jobs.formatting import JsonObject, bytes_text, counted, printable, seconds_text
from jobs.ledger.records import INPUT_FORMAT, OPEN_SHARDS, Decision, ItemRow, Job, JobState, RejectedLine
from jobs.ledger.status import GAP_SECONDS, RECENT_SECONDS, JobStatus, MeasuredItems, WorkerStatus
from pipelines.errors import ErrorCode

if TYPE_CHECKING:
    from jobs.provenance import Provenance

#: The message of `status`, `watch` and `wait` for a job without a worker.
NO_WORKER = (
    "no live worker takes this job (see `nightjar workers`); start one with `nightjar worker` or `nightjar dev`, "
    "or repeat its `nightjar run`"
)
#: With fewer ended shards the ETA has no error estimate.
MIN_SHARDS = 3
#: States in which a job continues without a person.
_ACTIVE = frozenset({JobState.READY, JobState.RUNNING})


def utc(seconds: float | None) -> str | None:
    """Epoch seconds as ISO 8601, or None."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def elapsed_seconds(status: JobStatus) -> float:
    """Time from the first claim to the end, or to now; 0 before the first claim."""
    if status.job.started_at is None:
        return 0.0
    return max(0.0, (status.job.finished_at or status.now) - status.job.started_at)


def items_per_second(status: JobStatus) -> float:
    """Ended items per second in which workers held shards."""
    seconds = status.busy_seconds
    return status.items.ended / seconds if seconds > 0 else 0.0


def waits_for_workers(status: JobStatus) -> bool:
    """Whether the job waits only for a worker: no live worker takes its shards."""
    return status.workers == 0 and status.job.state in _ACTIVE and status.items.pending > 0


def eta_seconds(status: JobStatus) -> float | None:
    """Time that the pending items take at the rate so far; 0 at the end, None while unknown."""
    if status.job.state.final:
        return 0.0
    rate = items_per_second(status)
    return status.items.pending / rate if rate > 0 and status.job.state in _ACTIVE else None


def eta_error_seconds(status: JobStatus) -> float | None:
    """Half the width of the ETA's 95 % prediction interval; None if too few shards have ended.

    With n shards ended, k left, and mean m and standard deviation s of an item's engine time over the
    ended ones, the ETA's relative error is t * s / m * sqrt(1 / k + 1 / n), t from Student's distribution
    for n - 1 degrees of freedom (the prediction interval of a mean: Hahn, 1969). It covers differences
    between shards, not changes in the number of workers.
    """
    eta = eta_seconds(status)
    spread = status.spread
    if status.job.state.final or eta is None or spread.shards < MIN_SHARDS or spread.item_ms <= 0:
        return None
    to_go = sum(status.shards.get(state, 0) for state in OPEN_SHARDS)
    mean = spread.item_ms / spread.shards
    variance = max(0.0, (spread.item_ms_squared - spread.shards * mean * mean) / (spread.shards - 1))
    relative = math.sqrt(variance) / mean * math.sqrt(1 / max(1, to_go) + 1 / spread.shards)
    # The 97.5 % quantile of Student's t, by its expansion in 1 / freedom (Abramowitz and Stegun 26.7.5).
    z = 1.959964
    freedom = spread.shards - 1
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return eta * student * relative


def cost(status: JobStatus, price_per_gpu_hour: float | None) -> float | None:
    """Engine time so far at the price of a GPU hour, in the price's currency."""
    return None if price_per_gpu_hour is None else status.engine_ms / 3_600_000 * price_per_gpu_hour


def cost_at_end(status: JobStatus, price_per_gpu_hour: float | None) -> float | None:
    """The cost at the end, if pending items cost as much as ended ones; None while unknown."""
    spent = cost(status, price_per_gpu_hour)
    ended = status.items.ended
    if spent is None or not ended:
        return None
    return spent * (ended + status.items.pending) / ended


def rtfx(status: JobStatus) -> float | None:
    """RTFx: seconds of audio per second in which workers held shards; None without audio."""
    seconds = status.busy_seconds
    return status.audio_ms / 1000 / seconds if seconds > 0 and status.audio_ms else None


def energy_view(status: JobStatus) -> dict[str, float]:
    """Energy of the GPUs for a second of audio; empty while unknown."""
    known = status.energy_mj and status.audio_ms
    return {"joules_per_audio_s": round(status.energy_mj / status.audio_ms, 4)} if known else {}


def optional_view(status: JobStatus) -> JsonObject:
    """What the views of a job have only if it is known: the energy, and the decisions of people."""
    return energy_view(status) | ({"decisions": status.decisions} if status.decisions else {})


def energy_text(status: JobStatus) -> str:
    """A text that continues a sentence, such as `, 0.195 J per audio-second`; empty while unknown."""
    return "".join(f", {joules:.3f} J per audio-second" for joules in energy_view(status).values())


def status_lines(
    state: JobStatus,
    price_per_gpu_hour: float | None = None,
    waits: str = NO_WORKER,
    bold: Callable[[str], str] = str,
) -> Iterator[str]:
    """Yields a job's status in a few lines of text; `waits`: the message if no worker is live; `bold` marks the
    state."""
    job = state.job
    items = state.items
    reason = f" ({printable(job.state_reason)})" if job.state_reason else ""
    named = f"  {printable(job.name)}" if job.name else ""
    yield f"{job.id}  {bold(job.state.value)}{reason}{named}"
    if job.labels:
        yield f"labels  {printable(labels_text(job.labels))}"
    skipped = f", {items.skipped} skipped" if items.skipped else ""
    yield f"items   {items.done} done, {items.failed} failed, {items.pending} pending, {items.total} in all{skipped}"
    if state.decisions:
        yield f"decided {', '.join(f'{count} {name}' for name, count in state.decisions.items())}"
    if state.quarantined_workers:
        yield f"workers {state.workers} live, {state.quarantined_workers} quarantined (`nightjar workers` says why)"
    if state.outage is not None:
        yield f"waits   {state.outage.code.value}: {printable(state.outage.message)}"
    if waits_for_workers(state):
        yield f"waits   {waits}"
    if job.rejected_lines:
        yield f"input   {counted(job.rejected_lines, 'line')} refused"
    if state.measured.items:
        yield f"checks  {measured_text(state.measured)}"
    speed = f", RTFx {factor:.1f}" if (factor := rtfx(state)) else ""
    yield f"audio   {_hours(state.audio_ms / 1000)}{speed}, {bytes_text(state.bytes_out)}"
    elapsed = elapsed_seconds(state)
    busy = state.busy_seconds
    idle = f" of work in {seconds_text(elapsed)}" if elapsed - busy > GAP_SECONDS else ""
    pace = f"time    {seconds_text(busy if idle else elapsed)}{idle}, {items_per_second(state):.2f} items/s"
    if not job.state.final and (eta := eta_seconds(state)) is not None:
        error = eta_error_seconds(state)
        pace += f", {seconds_text(eta)} left{'' if error is None else f' (± {seconds_text(error)})'}"
    yield pace
    yield f"engine  {_hours(state.engine_ms / 1000)} busy{energy_text(state)}"
    price = cost(state, price_per_gpu_hour)
    if price is not None:
        at_end = None if state.job.state.final else cost_at_end(state, price_per_gpu_hour)
        ahead = "" if at_end is None else f", about {at_end:.2f} at the end"
        yield f"cost    {price:.2f}{ahead}, at {price_per_gpu_hour:g} per engine hour"


def measured_view(found: MeasuredItems) -> JsonObject:
    """The items that meters have measured, as a part of other views."""
    return _fields(found, "items", "failed", "failure_rate", "interval", "max_failure_rate", "above")


def measured_text(found: MeasuredItems) -> str:
    """The failure rate of the items that meters have measured, such as `2 of 40 measured items failed a draw: 5.0% (1.4% to
    16.5%)`."""
    low, high = found.interval
    mark = f", above {100 * (found.max_failure_rate or 0):g}%" if found.above else ""
    rate = f"{found.failure_rate:.1%} ({low:.1%} to {high:.1%})"
    return f"{found.failed} of {found.items} measured items failed a draw: {rate}{mark}"


def _hours(seconds: float) -> str:
    """A time such as `41 s`; from ten minutes on with hours: `20 min 5 s (0.33 h)`."""
    return seconds_text(seconds) + (f" ({seconds / 3600:.2f} h)" if seconds >= 600 else "")


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels such as `corpus=evening, owner=night`, sorted by key."""
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _fields(value: object, *names: str) -> JsonObject:
    """Fields of a record under their own names; those that end in `_at` as ISO 8601."""
    found = {name: getattr(value, name) for name in names}
    return {name: utc(field) if name.endswith("_at") else field for name, field in found.items()}


def status_view(
    status: JobStatus, price_per_gpu_hour: float | None = None, errors: Mapping[ErrorCode, int] | None = None
) -> JsonObject:
    """`nightjar.status/1`; `errors` counts failed items and rejected lines by code."""
    job = status.job
    speed = _rounded(rtfx(status))
    view = {
        "schema": "nightjar.status/1",
        "job": job.id,
        **_fields(job, "name", "state", "state_reason"),
        "waiting_for": None if status.outage is None else _fields(status.outage, "code", "message"),
        "items": _fields(status.items, "total", "done", "failed", "skipped", "pending"),
        "shards": dict(status.shards),
        "rejected_lines": job.rejected_lines,
        "audio_seconds": _rounded(status.audio_ms / 1000),
        "audio_hours": round(status.audio_ms / 3_600_000, 6),
        "engine_seconds": _rounded(status.engine_ms / 1000),
        "gpu_seconds": _rounded(status.engine_ms / 1000),
        "elapsed_seconds": _rounded(elapsed_seconds(status)),
        "busy_seconds": _rounded(status.busy_seconds),
        **_fields(status, "workers", "quarantined_workers"),
        "labels": dict(job.labels),
        "items_per_second": _rounded(items_per_second(status)),
        "rtfx": speed,
        # The earlier name of `rtfx`, kept for programs that read it.
        "real_time_factor": speed,
        "eta_seconds": _rounded(eta_seconds(status)),
        "eta_error_seconds": _rounded(eta_error_seconds(status)),
        "bytes": status.bytes_out,
        "model": job.spec.model,
        "store": job.store_url,
        **_fields(job, "created_at", "started_at", "finished_at"),
    }
    if status.measured.items:
        view["measured"] = measured_view(status.measured)
    view |= optional_view(status)
    if price_per_gpu_hour is not None:
        view |= {
            "price_per_gpu_hour": price_per_gpu_hour,
            "cost": _rounded(cost(status, price_per_gpu_hour)),
            "cost_at_end": _rounded(cost_at_end(status, price_per_gpu_hour)),
        }
    return view if errors is None else {**view, "errors": dict(errors)}


def job_view(
    job: Job, made_with: Sequence[Provenance] | None, command: Sequence[str], notes: Sequence[str]
) -> JsonObject:
    """`nightjar.job/1`: the settings and versions of a job. `made_with`: the provenance records of its
    workers, one for each kind of worker; None: they cannot be read. `command` makes the job again, with the
    exceptions in `notes`."""
    # Imported late, because the other views need no store.
    from jobs.layout import job_prefix

    return {
        "schema": "nightjar.job/1",
        "job": job.id,
        **_fields(
            job,
            "name",
            "state",
            "state_reason",
            "owner",
            "priority",
            "weight",
            "max_attempts",
            "max_in_flight",
            "error_budget",
        ),
        "labels": dict(job.labels),
        **_fields(job, "spec", "spec_sha"),
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
        **_fields(job, "created_at", "started_at", "finished_at"),
        "made_with": made_with,
        "command": command,
        "command_notes": notes,
    }


def worker_view(worker: WorkerStatus) -> JsonObject:
    """`nightjar.worker/1`: a worker with its shards, and its results of the last `recent.seconds`."""
    recent = worker.recent
    return {
        "schema": "nightjar.worker/1",
        "worker": worker.id,
        **_fields(worker, "host", "pid"),
        "gpu": worker.gpu or None,
        "model": worker.model or None,
        **_fields(worker, "version", "slots", "state"),
        "reason": worker.state_reason or None,
        **_fields(worker, "started_at", "heartbeat_at"),
        "silent_seconds": _rounded(worker.silent_seconds),
        "shards": [
            _fields(one, "job", "job_name", "shard", "items", "ended_items", "claimed_at")
            for one in worker.held
        ],
        "recent": {
            "seconds": RECENT_SECONDS,
            **_fields(recent, "items_done", "items_failed"),
            "audio_seconds": _rounded(recent.audio_seconds),
            "busy_seconds": _rounded(recent.busy_seconds),
        },
        "rtfx": _rounded(recent.rtfx),
    }


#: Fields of an item's audio in its view; null without audio.
_AUDIO_FIELDS = ("key", "sha256", "bytes", "pack", "pack_offset", "duration_ms", "sample_rate", "seed")


def item_view(job_id: str, item: ItemRow, line: int | None) -> JsonObject:
    """`nightjar.item/1`: an item with its input line and its audio. `id` includes the turn if several turns
    of a dialogue are spoken; `turn` counts them from 0."""
    return {
        "schema": "nightjar.item/1",
        "job": job_id,
        **_fields(item, "example_id", "id", "turn", "index"),
        "line": line,
        **_fields(item, "state", "attempts", "error_code", "error_message"),
        **{name: getattr(item.artifact, name, None) for name in _AUDIO_FIELDS},
        **({"decision": decision_view(item.decision)} if item.decision else {}),
    }


def decision_view(decision: Decision) -> JsonObject:
    """A person's decision about an item."""
    return _fields(decision, "accepted", "person", "decided_at", "reason")


def error_view(job_id: str, failed: ItemRow | RejectedLine, line: int | None) -> JsonObject:
    """`nightjar.job_error/1` of a failed item or a refused line, with the number of its input line."""
    is_item = isinstance(failed, ItemRow)
    return {
        "schema": "nightjar.job_error/1",
        "job": job_id,
        "kind": "item" if is_item else "line",
        "line": line,
        "index": failed.index if is_item else None,
        "example_id": failed.example_id,
        "id": failed.id if is_item else failed.example_id,
        "code": failed.error_code if is_item else failed.code,
        "message": failed.error_message if is_item else failed.message,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
