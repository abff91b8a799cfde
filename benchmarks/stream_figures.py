"""Figures of streams under load: percentiles, one row per load, medians over seeds, the table, and the
lines of the plot."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.plots import Line, svg

Row = dict[str, Any]
#: First PCM byte of Qwen3-TTS on one H200 in milliseconds, p95: what is aimed at and what is a must, by
#: requests a second and by clients.
GOALS = {
    "rate": {10: (18, 30), 20: (25, 45), 50: (40, 80), 100: (80, 180)},
    "clients": {1: (12, 20), 8: (20, 40), 32: (35, 80), 64: (50, 120), 128: (80, 200)},
}
_SIZES = ("0b6", "1b7")
_HEADINGS = (
    "size",
    "load",
    "protocol",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "must",
    "underrun",
    "u95 ms",
    "rtf",
    "audio-s/s",
    "batch",
    "requests",
    "failed",
    "cores",
    "GPU",
)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of all values do not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else None


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95, p99 and the maximum, in milliseconds."""
    found = {str(round(100 * share)): percentile(seconds, share) for share in (0.5, 0.95, 0.99, 1.0)}
    return {
        name if name != "100" else "max": None if value is None else round(1000 * value, 2)
        for name, value in found.items()
    }


def row_of(found: Sequence[dict[str, Any]], count_from: float, count_until: float, sized: bool = True) -> Row:
    """The figures of one load: what its processes of clients heard of the requests that were sent in the
    span."""
    sent = [one for process in found for one in process["heard"] if count_from <= one["sent"] < count_until]
    streams, whole = [one for one in sent if not one["batch"]], [one for one in sent if one["batch"]]
    begun = [one for one in streams if one["first"] is not None]
    done = [one for one in streams if one["failure"] == ""]
    audio = {name: sum(process[name] for process in found) for name in ("stream_audio_s", "batch_audio_s")}
    seconds = count_until - count_from
    failures = Counter(one["failure"] for one in sent if one["failure"] not in ("", "cancelled", "cut off"))
    underruns = [1000 * wait for one in begun for wait in one["underruns"]]
    row: Row = {
        "first_pcm_ms": percentiles_ms([one["first"] for one in begun]),
        "rtf": _median([one["took"] / one["audio"] for one in done if one["audio"]]),
        "underrun_share": sum(1 for one in begun if one["underruns"]) / len(begun) if begun else None,
        "underruns": len(underruns),
        "underrun_ms": {
            "50": percentile(underruns, 0.5),
            "95": percentile(underruns, 0.95),
            "max": max(underruns, default=None),
        },
        "audio_s_per_s": audio["stream_audio_s"] / seconds,
        "requests": len(sent),
        "requests_per_s": len(streams) / seconds,
        "failures": dict(failures),
        "cancelled": sum(1 for one in sent if one["failure"] == "cancelled"),
        "cut_off": sum(1 for one in sent if one["failure"] == "cut off"),
        "too_short": sum(1 for one in done if one["audio"] < 0.8 * one["asked_audio"]) if sized else 0,
        "client_late_ms": percentiles_ms([one["late"] for one in streams]),
    }
    if whole:
        row["batch_audio_s_per_s"] = audio["batch_audio_s"] / seconds
        row["batch_requests"] = len(whole)
    return row


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def over_seeds(rows: Sequence[Row]) -> Row:
    """One row of several: the median of each figure, the sum of each count."""
    if len(rows) == 1:
        return rows[0]
    return {name: _joined(name, [row[name] for row in rows if row.get(name) is not None]) for name in rows[0]}


def _joined(name: str, values: list[Any]) -> Any:
    if not values:
        return None
    if isinstance(values[0], dict):
        if name == "failures":
            return dict(sum((Counter(value) for value in values), Counter[str]()))
        names = dict.fromkeys(inner for value in values for inner in value)
        return {
            inner: _joined(inner, [value[inner] for value in values if value.get(inner) is not None])
            for inner in names
        }
    if isinstance(values[0], bool | str):
        return values[0]
    if isinstance(values[0], list):
        return values[0]
    return sum(values) if isinstance(values[0], int) else statistics.median(values)


def goals_of(row: Row) -> tuple[int, int] | None:
    """What a row aims at and must reach, in milliseconds; None where nothing is set for its load."""
    if row.get("listen") or row.get("batch_clients") or row.get("cancel") or row.get("size") not in _SIZES:
        return None
    return GOALS["rate"].get(row["rate"]) if row["mode"] == "open" else GOALS["clients"].get(row["clients"])


def load_of(row: Row) -> str:
    """Such as `open 10/s`, `closed 64` or `listen 384 + 256 whole`."""
    told = (
        f"open {row['rate']:g}/s"
        if row["mode"] == "open"
        else f"{'listen' if row.get('listen') else 'closed'} {row['clients']}"
    )
    return (
        told
        + (f" + {row['batch_clients']} whole" if row.get("batch_clients") else "")
        + (f" cancel {row['cancel']:.0%}" if row.get("cancel") else "")
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as lines; a row without a figure leaves its place empty."""
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    def form(value: float | None, spec: str) -> str:
        return "" if value is None else format(value, spec)

    first, goals, busy = row["first_pcm_ms"], goals_of(row), row.get("gpu_busy_nvml") or [None]
    return (
        str(row.get("size", "")),
        load_of(row),
        row["protocol"],
        *(form(first[name], ".1f") for name in ("50", "95", "99")),
        str(goals[1]) if goals else "",
        form(row["underrun_share"], ".2%"),
        form(row["underrun_ms"]["95"], ".0f"),
        form(row["rtf"], ".3f"),
        form(row["audio_s_per_s"], ".0f"),
        form(row.get("batch_audio_s_per_s"), ".0f"),
        str(row["requests"]),
        " ".join(f"{count}x {code}" for code, count in row["failures"].items()) or "0",
        form(row.get("cpu_cores"), ".2f"),
        form(busy[0], ".0%"),
    )


def thread_lines(row: Row, count: int = 8) -> list[str]:
    """The busiest threads of the server in a row."""
    shares = sorted((row.get("threads") or {}).items(), key=lambda one: -one[1])
    return [f"  {share:6.1%} of a core  {name}" for name, share in shares[:count] if share >= 0.01]


def lines_of(rows: Sequence[Row], mode: str) -> list[Line]:
    """p95 of the first PCM byte by load, for every size and protocol of a mode, and the goals beside it."""
    load = "rate" if mode == "open" else "clients"
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        plain = not (row.get("listen") or row.get("batch_clients") or row.get("cancel"))
        if row["mode"] == mode and plain and row["first_pcm_ms"]["95"]:
            name = ", ".join(filter(None, (row.get("system"), str(row.get("size", "")), row["protocol"])))
            found.setdefault(name, {})[row[load]] = row["first_pcm_ms"]["95"]
    if not found:
        return []
    lines = [Line(name, tuple(sorted(points.items()))) for name, points in found.items()]
    for at, name in enumerate(("aim", "must") if any(row.get("size") in _SIZES for row in rows) else ()):
        lines.append(
            Line(name, tuple((float(x), float(goals[at])) for x, goals in GOALS[load].items()), dashed=True)
        )
    return lines


def plot(result: dict[str, Any], mode: str) -> str:
    """p95 over load as SVG. Raises ValueError where the result has no row of this mode."""
    x_name = "requests a second (open loop)" if mode == "open" else "clients (closed loop)"
    title = f"First audio, p95, {result.get('device') or 'unknown device'}, commit {result.get('commit') or 'unknown'}"
    return svg(title, x_name, "milliseconds", lines_of(result["rows"], mode))
