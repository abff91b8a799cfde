"""`python -m benchmarks.structure`: tokens, files, lines and Protocols of each room; what a user meets (settings, commands,
options of `run`); circles of imports; with `--item MODEL` also the path of an item.

Tokens are Python's, without comments, line ends and indentation. A circle is a group of modules that reach each other by
imports which run when a module is imported.

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
import subprocess
import sys
import tempfile
import time
import tokenize
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import networkx

from benchmarks.common import ROOT, parser, read, table

#: Rooms that are installed, from the top down.
PRODUCT = ("nightjar", "worker", "jobs", "migrations", "pipelines", "kernels")
ROOMS = ("tests", "benchmarks", *PRODUCT)
#: Lines of a file that is large.
LARGE = 600
#: Items of the two runs that are compared, at most the slots of an engine on a CPU.
FEW, MORE = 8, 32
#: Part of the expected calls that is enough: the codec may decode two items in one group, and a process that is killed loses
#: the calls of its last tenth of a second.
ENOUGH = 0.75
LAYOUT_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def sources() -> dict[str, Path]:
    """Module name to path, of the files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [path for path in map(Path, sorted(listed.splitlines())) if path.parts[0] in ROOMS]
    named = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path for path in paths}
    return {name: path for name, path in named.items() if path.is_file()}


def imports(module: str, modules: dict[str, Path]) -> Iterator[str]:
    """What a module imports when it is imported itself."""
    path = modules[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) - child.level + 1] if child.level else []
                base = ".".join([*above, *filter(None, [child.module])])
                # `from package import module` needs the module, `from module import name` the one that has the name.
                names = [f"{base}.{alias.name}" for alias in child.names]
                yield from (name if name in modules else base for name in names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from (name for other in child.orelse for name in walk(other))
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child)

    return walk(ast.parse(path.read_text(encoding="utf-8")))


def circles(modules: dict[str, Path]) -> list[list[str]]:
    """Groups of two modules or more that reach each other."""
    graph = networkx.DiGraph()
    for module in modules:
        graph.add_edges_from((module, name) for name in set(imports(module, modules)) & modules.keys())
    return sorted(sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1)


def count_tokens(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type not in LAYOUT_TOKENS for token in tokenize.tokenize(file.readline))


def count_protocols(path: Path) -> int:
    """Classes that have `Protocol`, or a `Protocol[...]`, among their bases."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    bases = (map(ast.unparse, node.bases) for node in nodes if isinstance(node, ast.ClassDef))
    return sum(any(base.partition("[")[0] == "Protocol" for base in each) for each in bases)


def rooms(modules: dict[str, Path]) -> list[dict[str, Any]]:
    """Counts of each room, of the product and of all."""
    rows: list[dict[str, Any]] = []
    for name, chosen in {**{room: (room,) for room in ROOMS}, "product": PRODUCT, "all": ROOMS}.items():
        paths = [path for module, path in modules.items() if module.partition(".")[0] in chosen]
        lines = [len(path.read_text("utf-8").splitlines()) for path in paths]
        counts = {"tokens": sum(map(count_tokens, paths)), "protocols": sum(map(count_protocols, paths))}
        large = sum(count > LARGE for count in lines)
        rows.append({"room": name, **counts, "files": len(paths), "lines": sum(lines), "large_files": large})
    return rows


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
    """What a user meets."""
    from jobs.settings import Settings

    # By name: no other room may import the command line.
    command_line = importlib.import_module("jobs.cli")

    def commands(command: click.Command) -> int:
        return sum(map(commands, command.commands.values())) if isinstance(command, click.Group) else 1

    cli, context = command_line.cli, click.Context(command_line.cli)
    leaves = [cli.get_command(context, name) for name in command_line.COMMANDS]
    run = cli.get_command(context, "run")
    options = sum(isinstance(parameter, click.Option) for parameter in run.params)
    return {
        "settings": count_settings(Settings),
        "commands": sum(map(commands, leaves)),
        "options_of_run": options,
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
            raise SystemExit(f"The run with {model} ended with {done.returncode}:\n{error}")
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


def main() -> int:
    options = read(parser(__doc__, ""), item=str)
    modules = sources()
    found: dict[str, Any] = {"rooms": rooms(modules), "circles": circles(modules), "surface": surface()}
    found["items"] = [item_path(model) for model in options.item]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["rooms"], ("room", "tokens", "protocols", "files", "lines", "large_files")))
    print(", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in found["surface"].items()))
    for item in found["items"]:
        print(f"item of {item['model']}: {item['functions']} functions in {item['files']} files")
        for room, count in item["functions_by_room"].items():
            print(f"  {room}: {count} functions in {item['files_by_room'][room]} files")
    print("\n  ".join([f"circles: {len(found['circles'])}", *map(str, found["circles"])]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
