"""`python -m benchmarks.structure`: tokens, files and lines of each room, what a user meets (settings, commands, options
of `run`), Protocols, small files, circles of imports, imports upward; with `--item MODEL` also the path of an item.

Tokens are Python's, without comments, line ends and indentation.

A circle is a group of modules that reach each other by imports which run when a module is imported; `deferred circles`
also follow imports inside functions. Imports under `TYPE_CHECKING` count for neither. An import upward breaks the order
of the rooms.

The path of an item is the files and functions of ours that a further item crosses, in any thread and process of a
`nightjar run` on a CPU: the command itself, its worker, the engine's process, the writers, the checks. These are the
functions whose calls rise by one or more for each further item between a run of few items and one of more, and those that
the engine's thread calls in every frame, since each item needs frames. (In a batch the number of frames depends on the
longest item, so it rises by chance.)

What runs once for a command, a shard's start or a model's opening is left out, and so is what runs once for a time: polls,
heartbeats, commits of several items. The run of few items waits before its first one, so that it lasts longer than the run
of more and polls do not rise. A function is a `def`; one that runs only while a module is imported (a decorator) is not
counted, nor are lambdas, comprehensions and methods that a library generates.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
#: From the top down: a room imports itself and rooms after it.
ROOMS = ("tests", "benchmarks", "nightjar", "worker", "jobs", "migrations", "pipelines", "kernels")
#: Rooms that are installed.
PRODUCT = ROOMS[2:]
SMALL, LARGE = 50, 600
#: Items of the two runs that are compared, at most the slots of an engine on a CPU.
FEW, MORE = 8, 32
#: Part of the expected calls that is enough: the codec may decode two items in one group, and a process that is killed loses
#: the calls of its last tenth of a second.
ENOUGH = 0.75
LAYOUT_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
Edges = Mapping[str, set[str]]


def sources(tree: Path) -> dict[str, Path]:
    """Module name to path, of the files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, Path] = {}
    for path in map(Path, sorted(listed)):
        if path.parts[0] in ROOMS and (tree / path).is_file():
            found[".".join(path.with_suffix("").parts).removesuffix(".__init__")] = tree / path
    return found


def imports(module: str, path: Path, modules: set[str]) -> Iterator[tuple[str, bool]]:
    """The modules of ours that a file imports, and whether it does so when it is imported itself."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) - child.level + 1] if child.level else []
                base = ".".join([*above, *filter(None, [child.module])])
                # `from package import module` needs the module, `from module import name` the one that has
                # the name.
                names = [f"{base}.{alias.name}" for alias in child.names]
                yield from ((name if name in modules else base, at_import) for name in names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from (found for other in child.orelse for found in walk(other, at_import))
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, at_import and not later)

    found = walk(ast.parse(path.read_text(encoding="utf-8")), True)
    yield from ((name, at_import) for name, at_import in found if name in modules and name != module)


def circles(edges: Edges) -> list[list[str]]:
    """Groups of two modules or more that reach each other."""
    reached = {module: _reached(module, edges) for module in edges}
    groups = {tuple(sorted(two for two in reached[one] if one in reached[two])) for one in edges}
    return sorted(list(group) for group in groups if len(group) > 1)


def _reached(module: str, edges: Edges) -> set[str]:
    seen, open_ = set[str](), [module]
    while open_:
        new = edges[open_.pop()] - seen
        seen |= new
        open_ += new
    return seen


def count_tokens(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type not in LAYOUT_TOKENS for token in tokenize.tokenize(file.readline))


def count_protocols(path: Path) -> int:
    """Classes that have `Protocol`, or a `Protocol[...]`, among their bases."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    bases = (map(ast.unparse, node.bases) for node in nodes if isinstance(node, ast.ClassDef))
    return sum(any(base.partition("[")[0] == "Protocol" for base in each) for each in bases)


def count_settings(model: Any) -> int:
    """The keys that a user can set: those of nested groups, and of one entry of a mapping of groups
    (`schedules`), included."""
    count = 0
    for field in model.model_fields.values():
        types = field.annotation, *typing.get_args(field.annotation)
        groups = [one for one in types if hasattr(one, "model_fields")]
        count += count_settings(groups[0]) if groups else 1
    return count


def surface() -> dict[str, int]:
    """What a user meets, of the code that is imported here."""
    from jobs.settings import Settings

    # By name: no other room may import the command line.
    command_line = importlib.import_module("jobs.cli")

    def commands(command: click.Command) -> int:
        return sum(map(commands, command.commands.values())) if isinstance(command, click.Group) else 1

    cli, context = command_line.cli, click.Context(command_line.cli)
    leaves = [cli.get_command(context, name) for name in command_line.COMMANDS]
    run = cli.get_command(context, "run")
    options = sum(isinstance(parameter, click.Option) for parameter in run.params)
    counts = count_settings(Settings), sum(map(commands, leaves)), options
    return dict(zip(("settings", "commands", "options_of_run"), counts, strict=True))


def sizes(tree: Path, paths: list[Path]) -> dict[str, Any]:
    """Files, lines, and the files that are small or large."""
    lines = {str(path.relative_to(tree)): len(path.read_text("utf-8").splitlines()) for path in paths}
    small = [path for path, count in lines.items() if count <= SMALL]
    return {
        "tokens": sum(map(count_tokens, paths)),
        "protocols": sum(map(count_protocols, paths)),
        "files": len(lines),
        "lines": sum(lines.values()),
        "median_lines": statistics.median(lines.values()),
        "small_files": len(small),
        "small_modules": [path for path in small if not path.endswith("__init__.py")],
        "large_files": [path for path, count in lines.items() if count > LARGE],
    }


def measure(tree: Path) -> dict[str, Any]:
    modules = sources(tree)
    at_import: dict[str, set[str]] = {name: set() for name in modules}
    anywhere: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for other, early in imports(name, path, set(modules)):
            anywhere[name].add(other)
            if early:
                at_import[name].add(other)
    place = {name: ROOMS.index(name.partition(".")[0]) for name in modules}
    pairs = [(name, other) for name in sorted(anywhere) for other in sorted(anywhere[name])]
    upward = [f"{name} -> {other}" for name, other in pairs if place[other] < place[name]]
    groups = {**{room: [room] for room in ROOMS}, "product": PRODUCT, "all": ROOMS}
    chosen = {
        name: [path for module, path in modules.items() if ROOMS[place[module]] in rooms]
        for name, rooms in groups.items()
    }
    return {
        "rooms": {name: sizes(tree, paths) for name, paths in chosen.items() if paths},
        "circles": circles(at_import),
        "deferred_circles": circles(anywhere),
        "imports_upward": upward,
    }


#: The function that passes an item to the engine, and the one that makes a frame of all items.
FEED, FRAME = "ShardRun.feed", "EngineCore.step"
#: Python runs `sitecustomize` at its start, in every process: it counts the calls of each function outside of
#: imports, and those on the engine's thread. The counts are written at a process's end and several times a second,
#: because a process of ours may be killed.
TRACE = """
import atexit, os, sys, threading, time
ROOT, INTO = os.environ["ITEM_PATH_ROOT"] + os.sep, os.environ["ITEM_PATH_INTO"]
FEED, FRAME, WAIT = os.environ["ITEM_PATH_FEED"], os.environ["ITEM_PATH_FRAME"], float(os.environ["ITEM_PATH_WAIT"])
ours, counts, in_frames, engine = {}, {}, {}, set()

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
        counts[code] = count = counts.get(code, 0) + 1
        thread = threading.get_ident()
        if count == 1 and code.co_qualname == FEED:
            time.sleep(WAIT)
        if code.co_qualname == FRAME:
            engine.add(thread)
        if thread in engine:
            in_frames[code] = in_frames.get(code, 0) + 1

def write():
    rows = [
        (code.co_filename[len(ROOT):], code.co_firstlineno, code.co_qualname, count, in_frames.get(code, 0))
        for code, count in list(counts.items())
    ]
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


def line(number: int) -> dict[str, Any]:
    """A line of the input; each has another text."""
    text = f"This is line {number}, and it continues for a bit."
    messages = [["system", "text", "A calm voice."], ["user", "text", text]]
    return {"example_id": f"item-{number}", "messages": messages}


#: A file, and a function with its first line.
Function = tuple[str, str]


def calls(model: str, items: int, wait_seconds: float = 0) -> tuple[Counter[Function], set[Function]]:
    """Runs `items` items, the first one after `wait_seconds`. Returns the calls of each function, and the functions that
    every frame calls."""
    with tempfile.TemporaryDirectory(prefix="item-path-") as name:
        folder = Path(name)
        notes = folder / "notes"
        for made in (notes, folder / "site"):
            made.mkdir()
        (folder / "site" / "sitecustomize.py").write_text(TRACE)
        lines = (json.dumps(line(number)) + "\n" for number in range(items))
        (folder / "input.jsonl").write_text("".join(lines))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SPEECH_")}
        environment |= {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        environment |= {"ITEM_PATH_ROOT": str(ROOT), "ITEM_PATH_INTO": str(notes)}
        environment |= {"ITEM_PATH_FEED": FEED, "ITEM_PATH_FRAME": FRAME, "ITEM_PATH_WAIT": str(wait_seconds)}
        given = str(Path(model).resolve()) if Path(model).is_dir() else model
        words = ["run", "input.jsonl", "--model", given, "--seed", "7", "--json"]
        given_to: dict[str, Any] = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, "-m", "jobs", *words], check=False, **given_to)
        if done.returncode:
            error = done.stderr[-2000:]
            raise click.ClickException(f"The run with {model} ended with {done.returncode}:\n{error}")
        found, in_frames = Counter[Function](), Counter[Function]()
        for path in notes.iterdir():
            for file, first, function, count, framed in (
                text.split("\t") for text in path.read_text().splitlines()
            ):
                if path.suffix != ".new" and file.split(os.sep)[0] in PRODUCT:
                    found[file, f"{function}:{first}"] += int(count)
                    in_frames[file, f"{function}:{first}"] += int(framed)
        frames = sum(count for (_, function), count in in_frames.items() if function.startswith(f"{FRAME}:"))
        return found, {function for function, count in in_frames.items() if count >= ENOUGH * frames > 0}


def trace(model: str) -> set[Function]:
    """The functions that a further item crosses."""
    began_at = time.monotonic()
    more, in_frames = calls(model, MORE)
    few, _ = calls(model, FEW, (time.monotonic() - began_at) / 2)
    enough = ENOUGH * (MORE - FEW)
    return in_frames | {function for function, count in more.items() if count - few[function] >= enough}


def by_room(files: Iterable[str]) -> dict[str, int]:
    counts = Counter(file.split(os.sep)[0] for file in files)
    return {room: counts[room] for room in PRODUCT if counts[room]}


def item_path(model: str) -> dict[str, Any]:
    """Files and functions of an item's path, by room."""
    path = trace(model)
    files = {file for file, _ in path}
    return {
        "model": Path(model).name,
        "files": len(files),
        "functions": len(path),
        "files_by_room": by_room(files),
        "functions_by_room": by_room(file for file, _ in path),
        "path": {file: sorted(function for of, function in path if of == file) for file in sorted(files)},
    }


@click.command()
@click.option("--tree", default=ROOT, type=click.Path(path_type=Path), help="The checkout to look at.")
@click.option(
    "--item", "models", multiple=True, help="Also the path of an item of a model or a checkpoint folder."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write everything as JSON here.")
def main(tree: Path, models: tuple[str, ...], out: Path | None) -> None:
    """Prints the shape of the tree. What a user meets and the path of an item are those of the code that
    runs this."""
    found = measure(tree)
    found |= {"surface": surface(), "items": [item_path(model) for model in models]}
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    table = Table(title="Python files by room")
    headings = (
        "room",
        "tokens",
        "Protocols",
        "files",
        "lines",
        "median",
        f"<= {SMALL} lines",
        "without __init__",
    )
    for heading in (*headings, f"> {LARGE} lines"):
        table.add_column(heading)
    names = ("tokens", "protocols", "files", "lines", "median_lines", "small_files")
    for room, row in found["rooms"].items():
        counts = *(row[name] for name in names), len(row["small_modules"]), len(row["large_files"])
        texts = (f"{count:,g}" if isinstance(count, float) else f"{count:,}" for count in counts)
        table.add_row(room, *texts)
    Console(width=140).print(table)
    print(", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in found["surface"].items()))
    for item in found.pop("items"):
        print(f"item of {item['model']}: {item['functions']} functions in {item['files']} files")
        for room, count in item["functions_by_room"].items():
            print(f"  {room}: {count} functions in {item['files_by_room'][room]} files")
    for name, lines in found.items():
        if isinstance(lines, list):
            print("\n  ".join([f"{name.replace('_', ' ')}: {len(lines)}", *map(str, lines)]))


if __name__ == "__main__":
    main()
