"""Which part of a host comes first to what it can do, by the figures of a job's row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: From this share of what a part can do, it holds the others up.
FULL = 0.9


def shares(row: Mapping[str, Any], cores: int, disk_mb_per_s: float | None = None) -> dict[str, float]:
    """How much of what each part can do was in use, 0 to about 1, the largest first.

    `row`: as `JobBench` makes it. A thread can use one core, so the busiest thread of a process is a part
    of its own. `disk_mb_per_s`: what one program wrote to the disk alone.
    """
    found: dict[str, float] = {}
    if busy := row.get("gpu_busy_nvml", [])[: row["gpus"]]:
        found["the GPUs"] = sum(busy) / len(busy)
    services: Mapping[str, float] = row.get("services_cores", {})
    found["all cores"] = (row["cpu_cores"] + sum(services.values())) / cores
    for name, used in {
        **row.get("busiest_thread_of", {}),
        **row.get("services_busiest_thread_of", {}),
    }.items():
        found[f"one thread of {name}"] = used
    if disk_mb_per_s and "disk_mb_per_s" in row:
        found["the disk"] = row["disk_mb_per_s"] / disk_mb_per_s
    for name, share in row.get("waited_for", {}).items():
        if name != "cpu":  # of that, all cores and the threads tell more
            found[f"waiting for {'a disk' if name == 'io' else name}"] = share
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def verdict(found: Mapping[str, float]) -> str:
    """A sentence: the parts that are full, or which one is closest to it."""
    full = [f"{name} ({share:.0%})" for name, share in found.items() if share >= FULL]
    if full:
        return f"Full: {', '.join(full)}."
    if not found:
        return "Nothing was measured."
    name, share = max(found.items(), key=lambda one: one[1])
    return f"Nothing is full; the closest is {name} ({share:.0%})."
