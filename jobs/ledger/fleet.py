"""The workers that the ledger knows, what each of them does, and how fast, in plain SQL: read as `status` is, without SQLAlchemy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.ledger.location import killed_workers
from jobs.ledger.states import LIVE_SECONDS, LOST, RETIRED
from jobs.ledger.status import NOW, Reader

#: What a worker did lately is what its leases made that ended in these seconds, or have not ended.
RECENT_SECONDS = 600.0
#: Workers that were lost before are shown only with those that retired.
LOST_SECONDS = 24 * 3600.0

_COLUMNS = ("id", "host", "pid", "gpu", "model", "version", "slots", "state", "state_reason", "started_at", "heartbeat_at")
_WORKERS = f"SELECT {', '.join(_COLUMNS)} FROM workers"  # noqa: S608 - names of ours
_PRESENT = f"""
WHERE state NOT IN ('{RETIRED}', '{LOST}') OR (state = '{LOST}' AND heartbeat_at >= <now> - {LOST_SECONDS})
"""
_HELD = """
SELECT shards.worker_id, jobs.id, jobs.name, shards.no, shards.n_items, shards.n_done, shards.n_failed, shards.claimed_done,
    shards.claimed_failed, shards.audio_ms, attempts.started_at
FROM shards
JOIN jobs ON jobs.id = shards.job_id
JOIN attempts ON attempts.job_id = shards.job_id AND attempts.shard_no = shards.no AND attempts.epoch = shards.epoch
WHERE shards.state = 'leased' ORDER BY attempts.started_at, jobs.id, shards.no
"""
_ENDED = f"""
SELECT attempts.worker_id, attempts.started_at, attempts.ended_at, attempts.n_ok, attempts.n_failed, shards.audio_ms, shards.n_done
FROM attempts JOIN shards ON shards.job_id = attempts.job_id AND shards.no = attempts.shard_no
WHERE attempts.ended_at >= <now> - {RECENT_SECONDS}
"""  # noqa: S608 - numbers of ours


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard in flight in a worker."""

    job_id: str
    job_name: str
    shard_no: int
    items: int
    #: Of its items, also those that ended under earlier leases.
    ended_items: int
    claimed_at: float


@dataclass(frozen=True, slots=True)
class RecentWork:
    """What a worker made under the leases that ended lately and those that it has."""

    items_done: int = 0
    items_failed: int = 0
    audio_seconds: float = 0.0
    #: Time in which it held at least one of these leases.
    busy_seconds: float = 0.0

    @property
    def rtfx(self) -> float | None:
        """Audio seconds in a second in which it held a shard; None before there are any."""
        return self.audio_seconds / self.busy_seconds if self.audio_seconds and self.busy_seconds else None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker process, or a GPU whose worker is quarantined, with what it does."""

    id: str
    host: str
    pid: int
    gpu: str
    #: The only model that it serves; empty: whatever the jobs ask for.
    model: str
    version: str
    slots: int
    #: `up`, `draining`, `quarantined`, `lost` or `retired`.
    state: str
    #: Why it is quarantined, or which job it cannot run and why.
    state_reason: str
    started_at: float
    heartbeat_at: float
    #: Since the last heartbeat, by the ledger's clock.
    silent_seconds: float
    held: tuple[HeldShard, ...]
    recent: RecentWork


@dataclass(slots=True)
class _Leases:
    """What is known of a worker's leases."""

    done: int = 0
    failed: int = 0
    audio_ms: float = 0.0
    times: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    held: list[HeldShard] = field(default_factory=list[HeldShard])

    def add(self, started_at: float, ended_at: float, done: int, failed: int, audio_ms: float) -> None:
        self.done, self.failed, self.audio_ms = self.done + done, self.failed + failed, self.audio_ms + audio_ms
        self.times.append((started_at, ended_at))


def worker_statuses(reader: Reader, *, everyone: bool = False) -> list[WorkerStatus]:
    """The workers, the newest first; `everyone`: also those that retired, and those that were lost more than a day ago."""
    now, clock = reader.now, NOW[reader.engine]
    leases: dict[str, _Leases] = {}
    for worker_id, started_at, ended_at, done, failed, audio_ms, made in reader.execute(_ENDED.replace("<now>", clock), {}).fetchall():
        leases.setdefault(worker_id, _Leases()).add(started_at, ended_at, done, failed, _share(audio_ms, done, made))
    for worker_id, job_id, name, no, items, made, failed, before, failed_before, audio_ms, since in reader.execute(_HELD, {}).fetchall():
        of_worker = leases.setdefault(worker_id, _Leases())
        of_worker.add(since, now, made - before, max(0, failed - failed_before), _share(audio_ms, made - before, made))
        of_worker.held.append(HeldShard(job_id, name, no, items, made + failed, since))
    where = "" if everyone else _PRESENT.replace("<now>", clock)
    rows = reader.execute(f"{_WORKERS} {where} ORDER BY started_at DESC, id", {}).fetchall()
    killed = killed_workers(reader.place)
    return [_status(row, now, leases.get(row[0], _Leases()), killed) for row in rows]


def _status(row: Sequence[Any], now: float, leases: _Leases, killed: Sequence[tuple[str, int]]) -> WorkerStatus:
    values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    values["silent_seconds"] = max(0.0, now - values["heartbeat_at"])
    is_gone = values["silent_seconds"] > LIVE_SECONDS or (values["host"], values["pid"]) in killed
    if is_gone and values["state"] != RETIRED:
        # The next pass of a reconciler says so too; there may be no worker left that makes one.
        values["state"] = LOST
    recent = RecentWork(leases.done, leases.failed, leases.audio_ms / 1000, _covered(leases.times))
    return WorkerStatus(**values, held=tuple(leases.held), recent=recent)


def _share(audio_ms: int, done: int, made: int) -> float:
    """A lease's part of the audio of its shard, by items: the ledger counts audio by shard."""
    return audio_ms * done / made if made else 0.0


def _covered(times: list[tuple[float, float]]) -> float:
    """Seconds that at least one of these times covers."""
    covered, end = 0.0, float("-inf")
    for begin, until in sorted(times):
        covered += max(0.0, until - max(begin, end))
        end = max(end, until)
    return covered
