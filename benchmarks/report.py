"""What every benchmark writes: a result, row by row, and tables of it; and the options that all have. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def commit() -> str:
    """The commit that is measured, with `+` when the tree has changes; NIGHTJAR_COMMIT names it where there is
    no repository."""
    if named := os.environ.get("NIGHTJAR_COMMIT"):
        return named
    if shutil.which("git") is None:
        return ""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda")
    made.add_argument("--tiny", action="store_true", help="tiny sizes for a CPU; the figures mean nothing")
    made.add_argument("--json", type=Path, help="the result; default: a file of its name in $OUT, or here")
    return made


def numbers(text: str) -> list[int]:
    """The type of an option such as `16,64`."""
    return [int(number) for number in text.split(",")]


def words(text: str) -> list[str]:
    """The type of an option such as `frame,lm`."""
    return text.split(",")


class Result:
    """The rows, faults and facts of one run."""

    def __init__(self, name: str, options: argparse.Namespace, device: str, **facts: Any) -> None:
        self.options = options
        self.path: Path = options.json or Path(os.environ.get("OUT", ".")) / f"{name}.json"
        self.rows: list[Row] = []
        self.faults: dict[str, str] = {}
        self.found: dict[str, Any] = {"commit": commit(), "device": device, **facts}
        self.found |= {"faults": self.faults, "rows": self.rows}

    def add(self, row: Row) -> None:
        """Prints and keeps a row; its first field names the part."""
        self.rows.append(row)
        short = {name: value for name, value in row.items() if not isinstance(value, dict)}
        print(json.dumps({name: _rounded(value) for name, value in short.items()}), flush=True)
        self.write()

    def keep(self, **facts: Any) -> None:
        self.found |= facts
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def attempt(self, part: str, work: Callable[[], object]) -> None:
        """A part that fails is reported and does not stop the others."""
        try:
            work()
        except Exception:  # noqa: BLE001 - one run on a borrowed machine must bring home whatever it can
            self.faults[part] = traceback.format_exc()
            print(self.faults[part], flush=True)
        self.write()

    def end(self, *columns: str) -> int:
        """Prints these columns of the rows, and what failed; the exit status."""
        print(table(self.rows, columns))
        print(f"faults: {', '.join(self.faults) or 'none'}")
        return 1 if self.faults else 0


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as lines, of those columns that some row has; `name.key` is a value inside a row's field."""

    def value(row: Row, column: str) -> Any:
        for name in column.split("."):
            row = row.get(name) if isinstance(row, dict) else None  # pyright: ignore[reportAssignmentType]
        return row

    def cell(found: Any) -> str:
        if isinstance(found, float):
            return f"{found:,.0f}" if abs(found) >= 1000 else f"{found:,.2f}"
        return "" if found is None else str(found)

    shown = [column for column in columns if any(value(row, column) is not None for row in rows)]
    lines = [shown, *([cell(value(row, column)) for column in shown] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(shown))]
    return "\n".join(
        "  ".join(one.rjust(width) for one, width in zip(line, widths, strict=True)) for line in lines
    )


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Figure:
    """One value of the CPU. `limit` is what the machine does for the bare work in the same run; `share` = value
    / limit."""

    name: str
    value: float
    unit: str
    aim: str = ""
    limit: float | None = None
    limit_name: str = ""

    @property
    def share(self) -> float | None:
        return self.value / self.limit if self.limit else None


def report(title: str, name: str, figures: Sequence[Figure]) -> None:
    """Prints figures as a table, and writes `results/<name>.json` with commit, device and date."""
    from rich.console import Console  # A GPU machine may have no more than the models need.
    from rich.table import Table

    table = Table(title=title)
    for heading in ("figure", "value", "aim", "machine's limit", "share"):
        table.add_column(heading, overflow="fold")
    for figure in figures:
        limit = f"{figure.limit:,.1f} {figure.unit} ({figure.limit_name})" if figure.limit else ""
        share = f"{figure.share:.0%}" if figure.share else ""
        table.add_row(figure.name, f"{figure.value:,.1f} {figure.unit}", figure.aim, limit, share)
    Console(width=140).print(table)
    device = platform.processor() or platform.machine()
    facts = {"commit": commit(), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "device": device}
    rows = [asdict(figure) | {"share": figure.share} for figure in figures]
    (RESULTS / f"{name}.json").write_text(json.dumps({**facts, "figures": rows}, indent=1) + "\n")
