"""The rows of `benchmarks.job_gpu`: a job's steady rate, what it used meanwhile, and the table.

`python -m benchmarks.job_rows RESULT.json PART.json PART.json` puts what several calls on one kind of
machine found into one file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import Row
from benchmarks.job_paths import Finished
from benchmarks.qwen3_load import FRAMES_PER_SECOND


@dataclass(frozen=True, slots=True)
class Commit:
    """What one commit of the ledger added: items and their seconds of audio."""

    at: float
    items: int
    audio_seconds: float


def steady(commits: Sequence[Commit], slots: int) -> dict[str, Any]:
    """The rate between the ramp and the tail, and the span it was measured in; {} where the job was too
    short for one.

    The ramp are the first 2 * slots items, the tail the last 1.5 * slots. Both ends of the span are
    commits, so that what one commit gathered is never counted without its time.
    """
    total, done = sum(commit.items for commit in commits), 0
    first = last = None
    for index, commit in enumerate(commits):
        done += commit.items
        if first is None and done >= 2 * slots:
            first = index
        if total - done >= 1.5 * slots:
            last = index
    if first is None or last is None or last <= first:
        return {}
    since, until = commits[first].at, commits[last].at
    audio = sum(commit.audio_seconds for commit in commits[first + 1 : last + 1])
    items = sum(commit.items for commit in commits[first + 1 : last + 1])
    return {
        "audio_s_per_s": audio / (until - since),
        "items_per_s": items / (until - since),
        "since": since,
        "until": until,
    }


def ended(frames: Sequence[int], finished: Finished) -> Row:
    """How a job ended, and how long it took."""
    return {
        "items": len(frames),
        "status": finished.status,
        "failed": finished.made.failed,
        "repeated_draws": finished.made.repeated_draws,
        "asked_audio_s": sum(frames) / FRAMES_PER_SECOND,
        "made_audio_s": sum(seconds for _, _, seconds in finished.made.commits),
        "first_audio_s": finished.first_audio_seconds,
        "command_s": finished.seconds,
    }


def used(finished: Finished, since: float, until: float, gpus: int) -> Row:
    """What the command's processes, the services and the host did in a span; cores and memory also by GPU."""
    row = finished.use.between(since, until) | finished.host.between(since, until)
    if finished.beside is not None:
        beside = finished.beside.between(since, until)
        row |= {
            "services_cores": beside["cores_of"],
            "services_busiest_thread_of": beside["busiest_thread_of"],
        }
        row |= {"services_processes": beside["processes_of"], "services_memory_gib": beside["memory_gib_of"]}
    row |= {"cpu_cores_per_gpu": row["cpu_cores"] / gpus, "memory_gib_per_gpu": row["memory_gib"] / gpus}
    return row


def slots_of(said: Sequence[str]) -> int | None:
    """The slots of a worker's engine by its own words, `engine ready: ..., 512 slots`; None where it does
    not say."""
    found = (re.search(r"engine ready: .*?(\d+) slots", line) for line in said)
    return next((int(one[1]) for one in found if one), None)


def compare_with_one_gpu(rows: Sequence[Row]) -> None:
    """Adds to each row of several GPUs how many times the same of one GPU it is, where that was measured."""
    ones = {
        _variant(row): row["job_audio_s_per_s"]
        for row in rows
        if row["gpus"] == 1 and "job_audio_s_per_s" in row
    }
    for row in rows:
        if row["gpus"] > 1 and "job_audio_s_per_s" in row and (one := ones.get(_variant(row))):
            row["times_one_gpu"] = row["job_audio_s_per_s"] / one


def compare_with_engine(rows: Sequence[Row]) -> None:
    """Adds to each row of a job the engine's rate on as many GPUs and the job's share of it, where that
    was measured."""
    engines = {
        (row["size"], row["gpus"]): row["engine_audio_s_per_s"] for row in rows if row["path"] == "engine"
    }
    for row in rows:
        if "job_audio_s_per_s" in row and (rate := engines.get((row["size"], row["gpus"]))):
            row |= {"engine_audio_s_per_s": rate, "share": row["job_audio_s_per_s"] / rate}


def _variant(row: Row) -> tuple[Any, ...]:
    path = "folder" if row["path"] == "memory" else row["path"]
    return path, row["size"], row.get("qa")


def table(rows: Sequence[Row]) -> str:
    """The rows as lines; a row without a figure leaves its place empty."""

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    titles = (
        f"{'audio-s/s':>10}{'engine':>9}{'share':>7}{'times 1':>8}{'first s':>9}{'cores':>7}{'failed':>8}"
    )
    lines = [f"{'path':8}{'size':8}{'GPUs':>5}{'slots':>6} {'qa':6}{'start':6}{titles}"]
    for row in rows:
        if "faults" in row:
            lines.append(_fault_line(row))
            continue
        name = f"{row['path']:8}{row['size']:8}{row['gpus']:5}{row['slots'] or '':>6} {row.get('qa', ''):6}{row.get('start', ''):6}"
        rates = f"{cell(row.get('job_audio_s_per_s'), 10, ',.0f')}{cell(row.get('engine_audio_s_per_s'), 9, ',.0f')}"
        shares = f"{cell(row.get('share'), 7, '.0%')}{cell(row.get('times_one_gpu'), 8, '.2f')}"
        rest = f"{cell(row.get('first_audio_s'), 9, '.1f')}{cell(row.get('cpu_cores'), 7, '.2f')}{cell(row.get('failed'), 8, 'd')}"
        lines.append(f"{name}{rates}{shares}{rest}  {row.get('verdict', '')}".rstrip())
    return "\n".join(lines)


def _fault_line(row: Row) -> str:
    kept = "nothing lost" if row["nothing_lost"] else "SOMETHING IS LOST"
    what = (
        f"{row['done']} of {row['items']} done, {row['failed']} failed, {row['other_bytes']} with other bytes"
    )
    quarantine = "quarantined" if row["quarantined"] else "not quarantined"
    return f"faults  {row['size']:8}{row['gpus']:5}  {len(row['faults'])} faults: {kept}; {what}; the lost GPU's worker is {quarantine}"


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several: facts of the first that has them, all rows and faults. Raises `ValueError`
    for other code or device."""
    for name in ("commit", "device"):
        if len(values := {part[name] for part in parts}) > 1:
            raise ValueError(f"The parts have different values of {name!r}: {sorted(values)}.")
    whole: dict[str, Any] = {}
    for part in reversed(parts):
        whole |= part
    whole["faults"] = {name: text for part in parts for name, text in part["faults"].items()}
    for name in ("left_out", "rows"):
        whole[name] = [one for part in parts for one in part[name]]
    return whole


def main(arguments: Sequence[str]) -> None:
    result, *parts = map(Path, arguments)
    whole = merged([json.loads(path.read_text(encoding="utf-8")) for path in parts])
    result.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(table(whole["rows"]))


if __name__ == "__main__":
    main(sys.argv[1:])
