"""What a benchmark reports: figures beside the machine's own limit, measured in the same run."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `limit` is what the machine does for the bare work in the same run; `share` =
    value / limit."""

    name: str
    value: float
    unit: str
    aim: str = ""
    limit: float | None = None
    limit_name: str = ""

    @property
    def share(self) -> float | None:
        return self.value / self.limit if self.limit else None


def commit() -> str:
    """The commit that was measured, with `+` when the tree had changes."""
    if shutil.which("git") is None:
        return ""
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return head + ("+" if dirty else "")


def show(title: str, figures: Sequence[Figure]) -> None:
    # A GPU machine may have no more than the models need.
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for heading in ("figure", "value", "aim", "machine's limit", "share"):
        table.add_column(heading, overflow="fold")
    for figure in figures:
        limit = f"{figure.limit:,.1f} {figure.unit} ({figure.limit_name})" if figure.limit else ""
        share = f"{figure.share:.0%}" if figure.share else ""
        table.add_row(figure.name, f"{figure.value:,.1f} {figure.unit}", figure.aim, limit, share)
    Console(width=140).print(table)


def write(name: str, figures: Sequence[Figure], device: str = "") -> Path:
    """Writes `results/<name>.json` with commit, device and date."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    rows = [asdict(figure) | {"share": figure.share} for figure in figures]
    facts = {
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device or platform.processor() or platform.machine(),
    }
    path.write_text(json.dumps({**facts, "figures": rows}, indent=1) + "\n")
    return path
