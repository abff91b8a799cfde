"""The times and sizes of the protocol between ledger, dispatcher and workers. They are constants: nobody
has to choose them.

A variable such as `NIGHTJAR_TIMES__LEASE_SECONDS` replaces one, for tests and for the quick worker of one
host (`jobs.embedded`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

PREFIX = "NIGHTJAR_TIMES__"
#: A shard may run longer, by heartbeats; a lease that ends later than this was written by a clock that went
#: wrong.
LONGEST_LEASE_SECONDS = 6 * 3600.0


class Times(msgspec.Struct, frozen=True):
    """What `Settings.times` holds; the defaults are those of every installation."""

    #: A shard without a heartbeat for so long is given to another worker. Heartbeats come well before.
    lease_seconds: float = 60.0
    heartbeat_seconds: float = 15.0
    #: Shards that a worker runs at the same time; None: as many as keep its engine full.
    shards_in_flight: int | None = None
    #: Outcomes of one commit, and how long one waits for it.
    commit_items: int = 256
    commit_seconds: float = 2.0
    #: A pack is stored at this size, and when an item has waited for so long. Two for each shard are in
    #: memory.
    pack_bytes: int = 16 << 20
    pack_seconds: float = 15.0
    #: Processes that write to S3, which start when they are needed; None: by the cores, 0: the worker's own
    #: threads write.
    writer_processes: int | None = None
    #: The longest pause before a worker that died is started again, and that of one that failed again and
    #: again while others work.
    restart_seconds: float = 10.0
    quarantine_seconds: float = 600.0
    #: Between two runs of the dispatcher, and of the reconciler.
    dispatch_seconds: float = 5.0
    reconcile_seconds: float = 30.0
    #: Shards queued or leased for each shard that the live workers can use.
    window_factor: int = 2
    #: A message that no worker claimed for so long counts as lost.
    queued_timeout_seconds: float = 600.0
    #: Pause before a failed shard runs again; doubles with each attempt, up to 300 s.
    backoff_seconds: float = 1.0
    #: Estimated audio seconds and items of a shard at most; a shard is about a minute of engine time.
    shard_seconds: float = 100_000.0
    shard_items: int = 8192


def read_times(variables: Mapping[str, str] = os.environ) -> Times:
    """The times of this process."""
    given = {
        name: variables[variable]
        for name in Times.__struct_fields__
        if (variable := f"{PREFIX}{name.upper()}") in variables
    }
    return msgspec.convert(given, Times, strict=False)
