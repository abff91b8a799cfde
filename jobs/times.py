"""The times and sizes of the protocol between ledger, dispatcher and workers. They are constants, not
settings.

A variable such as `NIGHTJAR_TIMES__LEASE_SECONDS` replaces one, for tests and for the embedded worker, which
uses shorter times (`jobs.embedded`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

PREFIX = "NIGHTJAR_TIMES__"
#: The maximum lease. A shard may run longer, since heartbeats extend its lease; a lease that ends later was
#: written by a wrong clock.
LONGEST_LEASE_SECONDS = 6 * 3600.0


class Times(msgspec.Struct, frozen=True, rename=lambda name: f"{PREFIX}{name.upper()}"):
    """The value of `Settings.times`; every installation uses the defaults."""

    #: A shard without a heartbeat for this long is given to another worker. Heartbeats are much more
    #: frequent.
    lease_seconds: float = 60.0
    heartbeat_seconds: float = 15.0
    #: Shards that a worker runs at the same time; None: as many as keep its engine full.
    shards_in_flight: int | None = None
    #: Maximum outcomes of one commit, and maximum time that an outcome waits for it.
    commit_items: int = 256
    commit_seconds: float = 2.0
    #: A pack is stored at this size, or when an item has waited this long. Each shard has two packs in
    #: memory.
    pack_bytes: int = 16 << 20
    pack_seconds: float = 15.0
    #: Processes that write to S3, started when needed; None: by the number of cores; 0: the worker's own
    #: threads write.
    writer_processes: int | None = None
    #: The maximum pause before a dead worker is restarted, and the pause of a worker that keeps failing while
    #: others work.
    restart_seconds: float = 10.0
    quarantine_seconds: float = 600.0
    #: The time between two runs of the dispatcher, and of the reconciler.
    dispatch_seconds: float = 5.0
    reconcile_seconds: float = 30.0
    #: Maximum number of queued and leased shards, as a multiple of the shards that the live workers can run.
    window_factor: int = 2
    #: A message that no worker has claimed for this long counts as lost.
    queued_timeout_seconds: float = 600.0
    #: Pause before a failed shard runs again; doubles with each attempt, up to 300 s.
    backoff_seconds: float = 1.0
    #: Maximum estimated audio seconds and maximum items of a shard, which is about a minute of engine time.
    shard_seconds: float = 100_000.0
    shard_items: int = 8192


def read_times(variables: Mapping[str, str] = os.environ) -> Times:
    """The times of this process."""
    return msgspec.convert(dict(variables), Times, strict=False)
