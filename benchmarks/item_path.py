"""The way of one item: `nightjar run` over one line, and which of our files and functions ran for it.

Counted are the files and functions of this project's packages in which a call was seen, in any thread and any process of the
command: the command itself, its worker, the processes of the checks. A function is a `def`; one that runs only while a module is
imported (a decorator) is not counted, nor are lambdas, comprehensions and methods that a library generates. Start, the report and
the end of the run are part of the way. Each model is run a few times, because a heartbeat may or may not fall into a short run;
the figure is the median.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("nightjar", "worker", "jobs", "pipelines", "kernels")
LINE = {
    "example_id": "one",
    "messages": [["system", "text", "A calm voice."], ["user", "text", "This is a line, and it goes on for a bit."]],
}

#: Python runs `sitecustomize` at its start, in every process: it notes each function once, at its first call outside of an import.
#: Written at once, because a process of ours may be killed.
TRACE = """
import os, sys, threading
ROOT, INTO = os.environ["ITEM_PATH_ROOT"] + os.sep, os.environ["ITEM_PATH_INTO"]
seen, out = set(), []

def note(frame, event, _):
    if event != "call" or (code := frame.f_code) in seen:
        return
    if not code.co_filename.startswith(ROOT) or code.co_name.startswith("<") or not code.co_flags & 1:  # 1: a function, no class body
        seen.add(code)
        return
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return
    seen.add(code)
    if not out or out[0] != os.getpid():
        out[:] = os.getpid(), os.open(os.path.join(INTO, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    line = f"{code.co_filename[len(ROOT):]}\\t{code.co_firstlineno}\\t{code.co_qualname}\\n"
    os.write(out[1], line.encode())

threading.setprofile(note)
sys.setprofile(note)
"""


def trace(model: str) -> set[tuple[str, str]]:
    """Runs one item; the (file, function) that ran, with the function's first line in its name."""
    with tempfile.TemporaryDirectory(prefix="item-path-") as name:
        folder = Path(name)
        notes = folder / "notes"
        for made in (notes, folder / "site"):
            made.mkdir()
        (folder / "site" / "sitecustomize.py").write_text(TRACE)
        (folder / "input.jsonl").write_text(json.dumps(LINE) + "\n")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
        environment |= {
            "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
            "ITEM_PATH_ROOT": str(ROOT),
            "ITEM_PATH_INTO": str(notes),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "jobs", "run", "input.jsonl", "--model", model, "--seed", "7", "--json"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"The run with {model} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        lines = [line.split("\t") for path in notes.iterdir() for line in path.read_text().splitlines()]
    return {(file, f"{function}:{first}") for file, first, function in lines if file.split(os.sep)[0] in ROOMS}


def by_room(files: Iterable[str]) -> dict[str, int]:
    counts = Counter(file.split(os.sep)[0] for file in files)
    return {room: counts[room] for room in ROOMS if counts[room]}


def measure(model: str, runs: int) -> dict[str, Any]:
    """Files and functions of one item's way: the median run, by room, and how far the runs differ."""
    ways = sorted((trace(model) for _ in range(runs)), key=len)
    way = ways[len(ways) // 2]
    files = {file for file, _ in way}
    return {
        "model": Path(model).name,
        "files": len(files),
        "functions": len(way),
        "files_by_room": by_room(files),
        "functions_by_room": by_room(file for file, _ in way),
        "functions_of_each_run": [len(one) for one in ways],
        "way": {file: sorted(function for of, function in way if of == file) for file in sorted(files)},
    }


@click.command()
@click.option(
    "--model", "models", multiple=True, default=["hibari"], show_default=True, help="A model's name or checkpoint folder; may be repeated."
)
@click.option("--runs", default=3, show_default=True, help="Runs of each model.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures, and every function's name, as JSON here.")
def main(models: tuple[str, ...], runs: int, out: Path | None) -> None:
    """Counts the files and functions that one item passes on its way through `nightjar run`."""
    found = [measure(model, runs) for model in models]
    table = Table(title="The way of one item")
    for heading in ("model", "files", "functions", "files by room", "functions by room"):
        table.add_column(heading, overflow="fold")
    for one in found:
        rooms = [", ".join(f"{room} {count}" for room, count in one[key].items()) for key in ("files_by_room", "functions_by_room")]
        table.add_row(one["model"], str(one["files"]), str(one["functions"]), *rooms)
    Console(width=140).print(table)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
