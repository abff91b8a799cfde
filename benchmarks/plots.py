"""The plots of docs/precision.md as SVG, from the result of `benchmarks.precision`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks.common import Row
from benchmarks.fp8 import LIMIT, worst

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 190, 70, 44, 46
_COLORS = ("#1f6f8b", "#c8553d", "#7a5195", "#3d8b4f")
_AXIS, _GRID = "#555", "#ddd"


def _text(
    x: float, y: float, words: str, anchor: str = "start", color: str = "#222", weight: str = "normal"
) -> str:
    # A white edge keeps it readable on a line.
    style = f'text-anchor="{anchor}" fill="{color}" font-weight="{weight}" paint-order="stroke" stroke="#fff"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str = _GRID, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" {more}/>'


def _picture(title: str, height: float, parts: Sequence[str]) -> str:
    size = f'width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13" role="img">'
    )
    ground = f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>'
    named = f"<title>{escape(title)}</title>"
    return "\n".join([head, named, ground, _text(12, 24, title, weight="bold"), *parts, "</svg>", ""])


def bars(title: str, axis: str, values: Mapping[str, float], limit: float, limit_name: str) -> str:
    """Horizontal bars from 0, and a line at `limit`."""
    most = math.ceil(max([*values.values(), limit]))
    scale, step = (_WIDTH - _LEFT - _RIGHT) / most, 22
    end = _TOP + 18 + step * len(values)
    made, labels = list[str](), list[str]()
    for tick in range(0, most + 1, max(1, most // 10)):
        x = _LEFT + tick * scale
        made += [_line(x, _TOP + 12, x, end), _text(x, end + 16, str(tick), "middle", _AXIS)]
    for at, (name, value) in enumerate(values.items()):
        y, color = _TOP + 16 + at * step, _COLORS[value > limit]
        made.append(
            f'<rect x="{_LEFT}" y="{y}" width="{value * scale:.1f}" height="{step - 6}" fill="{color}"/>'
        )
        labels.append(_text(_LEFT - 8, y + 13, name, "end"))
        labels.append(_text(_LEFT + value * scale + 5, y + 13, f"{value:.1f}"))
    x = _LEFT + limit * scale
    made.append(_line(x, _TOP + 8, x, end, "#000", 'stroke-dasharray="5 4"'))
    made += [_text(x, _TOP + 4, limit_name, "middle"), _text(_LEFT, end + 34, axis, color=_AXIS)]
    made += labels
    return _picture(title, end + _BOTTOM, made)


def lines(title: str, axis: str, xs: Sequence[float], series: Mapping[str, Sequence[float]]) -> str:
    """Lines over `xs` with a logarithmic scale of decades."""
    left, right, height = 70, _WIDTH - 170, 260
    logs = {name: [math.log10(value) for value in values] for name, values in series.items()}
    low = math.floor(min(map(min, logs.values())))
    high = max(math.ceil(max(map(max, logs.values()))), low + 1)
    wide = (right - left) / max(xs[-1] - xs[0], 1)

    def y_of(log: float) -> float:
        return _TOP + height * (high - log) / (high - low)

    made = list[str]()
    for decade in range(low, high + 1):
        y = y_of(decade)
        made += [_line(left, y, right, y), _text(left - 8, y + 4, f"{10.0**decade:g}", "end", _AXIS)]
    for x in xs:
        made.append(_text(left + (x - xs[0]) * wide, _TOP + height + 18, f"{x:g}", "middle", _AXIS))
    for at, (name, values) in enumerate(logs.items()):
        color = _COLORS[at % len(_COLORS)]
        places = [(left + (x - xs[0]) * wide, y_of(value)) for x, value in zip(xs, values, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        made.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        made += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        made.append(_text(right + 10, places[-1][1] + 4, name, color=color))
    made.append(_text(left, _TOP + height + 36, axis, color=_AXIS))
    return _picture(title, _TOP + height + _BOTTOM, made)


def draw(found: Row, folder: Path) -> int:
    """Writes the plots of a result, each of the last model of its rows: the largest."""
    rows: dict[str, list[Row]] = {"products": [], "codec": [], "drift": []}
    for row in found["rows"]:
        rows[row["part"]].append(row)
    errors = {
        ("codec, " if row["part"] == "codec" else "") + row["of"]: worst(row)
        for of in (rows["products"], rows["codec"])
        for row in of
        if row["precision"] == "fp8" and row["model"] == of[-1]["model"] and row.get("scale", 1.0) == 1.0
    }
    title = f"Error against float32 with one part in fp8, {rows['products'][-1]['model']}"
    picture = bars(title, "times bfloat16's own error", errors, LIMIT, "limit")
    (folder / "precision-parts.svg").write_text(picture, encoding="utf-8")
    model, series = rows["drift"][-1]["model"], dict[str, list[float]]()
    for row in rows["drift"]:
        if row["model"] == model and row["precision"] != "float32":
            series[f"{row['precision']} {row['of']}".strip()] = [one["first_kl"] for one in row["windows"]]
    title = f"Divergence of code 0 from float32 in nats, speech fed with its own codes, {model}"
    begins = [one["from"] for one in rows["drift"][-1]["windows"]]
    picture = lines(title, "first of 100 frames", begins, series)
    (folder / "precision-drift.svg").write_text(picture, encoding="utf-8")
    return 0
