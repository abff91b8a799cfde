"""The path of an item: `nightjar run`, and which of our files and functions run once or more for each item.

A function is counted whose calls rise by one or more for each further item, between a run of few items and
one of more, in any thread and any process of the command: the command itself, its worker, the engine's
process, the writers, the checks. What runs once for a command, a shard's start or a model's opening is
left out. A function is a `def`; one that runs only while a module is imported (a decorator) is not
counted, nor are lambdas, comprehensions and methods that a library generates. The figure is the median of
some pairs of runs, because a heartbeat may or may not fall into a short run.
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
#: Items of the two runs that are compared.
FEW, MORE = 2, 8


def line(number: int) -> dict[str, Any]:
    """A line of the input; each has another text."""
    text = f"This is line {number}, and it goes on for a bit."
    return {
        "example_id": f"item-{number}",
        "messages": [["system", "text", "A calm voice."], ["user", "text", text]],
    }


#: Python runs `sitecustomize` at its start, in every process: it counts the calls of each function outside of
#: imports. The counts are written at a process's end and several times a second, because a process of ours
#: may be killed.
TRACE = """
import atexit, os, sys, threading, time
ROOT, INTO = os.environ["ITEM_PATH_ROOT"] + os.sep, os.environ["ITEM_PATH_INTO"]
ours, counts = {}, {}

def in_import(frame):
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False

def note(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    known = ours.get(code)
    if known is None:
        # 1: a function, no class body
        ours[code] = known = code.co_filename.startswith(ROOT) and not code.co_name.startswith("<") and bool(code.co_flags & 1)
    if known and (code in counts or not in_import(frame)):
        counts[code] = counts.get(code, 0) + 1

def write():
    rows = [(code.co_filename[len(ROOT):], code.co_firstlineno, code.co_qualname, count) for code, count in list(counts.items())]
    lines = ["\\t".join(map(str, row)) + "\\n" for row in rows]
    path = os.path.join(INTO, str(os.getpid()))
    with open(path + ".new", "w") as file:
        file.writelines(lines)
    os.replace(path + ".new", path)

def keep_writing():
    sys.setprofile(None)
    while True:
        time.sleep(0.1)
        write()

def begin():
    counts.clear()
    threading.Thread(target=keep_writing, daemon=True).start()

atexit.register(write)
os.register_at_fork(after_in_child=begin)
begin()
threading.setprofile(note)
sys.setprofile(note)
"""


def calls(model: str, items: int) -> Counter[tuple[str, str]]:
    """Runs so many items; the calls of each (file, function), with the function's first line in its name."""
    with tempfile.TemporaryDirectory(prefix="item-path-") as name:
        folder = Path(name)
        notes = folder / "notes"
        for made in (notes, folder / "site"):
            made.mkdir()
        (folder / "site" / "sitecustomize.py").write_text(TRACE)
        (folder / "input.jsonl").write_text(
            "".join(json.dumps(line(number)) + "\n" for number in range(items))
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
        environment |= {
            "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
            "ITEM_PATH_ROOT": str(ROOT),
            "ITEM_PATH_INTO": str(notes),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "jobs",
            "run",
            "input.jsonl",
            "--model",
            str(Path(model).resolve()) if Path(model).is_dir() else model,
            "--seed",
            "7",
            "--json",
        ]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise click.ClickException(
                f"The run with {model} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            )
        found = Counter[tuple[str, str]]()
        for path in notes.iterdir():
            for file, first, function, count in (text.split("\t") for text in path.read_text().splitlines()):
                if path.suffix != ".new" and file.split(os.sep)[0] in ROOMS:
                    found[file, f"{function}:{first}"] += int(count)
    return found


def trace(model: str) -> set[tuple[str, str]]:
    """The (file, function) that run once or more for each item."""
    few, more = calls(model, FEW), calls(model, MORE)
    return {function for function, count in more.items() if count - few[function] >= MORE - FEW}


def by_room(files: Iterable[str]) -> dict[str, int]:
    counts = Counter(file.split(os.sep)[0] for file in files)
    return {room: counts[room] for room in ROOMS if counts[room]}


def measure(model: str, runs: int) -> dict[str, Any]:
    """Files and functions of an item's path: the median run, by room, and how far the runs differ."""
    paths = sorted((trace(model) for _ in range(runs)), key=len)
    path = paths[len(paths) // 2]
    files = {file for file, _ in path}
    return {
        "model": Path(model).name,
        "files": len(files),
        "functions": len(path),
        "files_by_room": by_room(files),
        "functions_by_room": by_room(file for file, _ in path),
        "functions_of_each_run": [len(one) for one in paths],
        "path": {file: sorted(function for of, function in path if of == file) for file in sorted(files)},
    }


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    default=["hibari"],
    show_default=True,
    help="A model's name or checkpoint folder; may be repeated.",
)
@click.option("--runs", default=3, show_default=True, help="Pairs of runs of each model.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures, and every function's name, as JSON here.",
)
def main(models: tuple[str, ...], runs: int, out: Path | None) -> None:
    """Counts the files and functions that run for each item of `nightjar run`."""
    found = [measure(model, runs) for model in models]
    table = Table(title="The path of an item")
    for heading in ("model", "files", "functions", "files by room", "functions by room"):
        table.add_column(heading, overflow="fold")
    for one in found:
        rooms = [
            ", ".join(f"{room} {count}" for room, count in one[key].items())
            for key in ("files_by_room", "functions_by_room")
        ]
        table.add_row(one["model"], str(one["files"]), str(one["functions"]), *rooms)
    Console(width=140).print(table)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
