"""Plots of benchmark results as SVG, without a plotting library: batch size against RTFx.

python -m benchmarks.plots benchmarks/results/qwen3_tts_h100.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 80, 190, 40, 50
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#7b4b94", "#c77d1e", "#555555", "#0f9b8e", "#a33b20")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot: (x, y) in order of x, both positive. `dashed` for what is computed, not
    measured."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


def lines_of(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """Throughput by slots for every size and part of a result, and the roofline of the whole."""
    found: dict[str, dict[float, float]] = {}
    floors: dict[str, dict[float, float]] = {}
    names = {"all": "whole", "lm": "without the codec", "reference": "reference"}
    for row in rows:
        if (
            row.get("part") not in names
            or not row.get("slots")
            or not row.get("audio_s_per_s")
            or row.get("more_text")
        ):
            continue
        name = f"{row['size']}, {names[row['part']]}" + (", reproducible" if row.get("reproducible") else "")
        found.setdefault(name, {})[row["slots"]] = row["audio_s_per_s"]
        if row["part"] == "all" and row.get("floor_ms"):
            floors.setdefault(f"{row['size']}, roofline", {})[row["slots"]] = (
                row["slots"] / row["floor_ms"] * 1000 / 12.5
            )
    measured = [Line(name, tuple(sorted(points.items()))) for name, points in found.items()]
    return measured + [
        Line(name, tuple(sorted(points.items())), dashed=True) for name, points in floors.items()
    ]


def _ticks(least: float, most: float, base: float) -> list[float]:
    """Powers of `base` that enclose both."""
    first, last = math.floor(math.log(least, base) + 1e-9), math.ceil(math.log(most, base) - 1e-9)
    return [base**power for power in range(first, max(last, first + 1) + 1)]


def svg(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """A plot with logarithmic axes: x by powers of two, y by powers of ten. Raises ValueError without a
    point."""
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError("there is nothing to plot")
    xs = _ticks(min(x for x, _ in points), max(x for x, _ in points), 2)
    ys = _ticks(min(y for _, y in points), max(y for _, y in points), 10)

    def place(value: float, ticks: Sequence[float], start: float, end: float) -> float:
        share = (math.log(value) - math.log(ticks[0])) / (math.log(ticks[-1]) - math.log(ticks[0]))
        return round(start + share * (end - start), 1)

    def across(x: float) -> float:
        return place(x, xs, LEFT, WIDTH - RIGHT)

    def up(y: float) -> float:
        return place(y, ys, HEIGHT - BOTTOM, TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="16" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(TOP + HEIGHT - BOTTOM) / 2})">{escape(y_name)}</text>',
    ]
    for x in xs:
        parts.append(f'<path d="M{across(x)} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{across(x)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for y in ys:
        parts.append(f'<path d="M{LEFT} {up(y)}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(y) + 4}" text-anchor="end">{y:,g}</text>')
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        path = " ".join(f"{across(x)},{up(y)}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed:
            parts += [
                f'<circle cx="{across(x)}" cy="{up(y)}" r="3" fill="{colour}"/>' for x, y in line.points
            ]
        height = TOP + 12 + 18 * index
        parts.append(
            f'<path d="M{WIDTH - RIGHT + 12} {height - 4}h22" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        parts.append(f'<text x="{WIDTH - RIGHT + 40}" y="{height}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def plot(result: dict[str, Any]) -> str:
    """Batch size against throughput, of one result of `benchmarks.qwen3_tts`."""
    title = f"Qwen3-TTS, {result['device']}, commit {result.get('commit') or 'unknown'}"
    return svg(
        title,
        "utterances at a time (slots, or rows of the reference)",
        "RTFx (audio seconds per second)",
        lines_of(result["rows"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "results", nargs="+", type=Path, help="JSON files; each plot is written beside its file"
    )
    for path in parser.parse_args().results:
        if not path.exists():
            print(f"{path} does not exist")
            continue
        path.with_suffix(".svg").write_text(
            plot(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
