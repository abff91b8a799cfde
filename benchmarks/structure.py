"""`python -m benchmarks.structure`: tokens, files, lines and Protocols of each room; what a user meets (settings,
commands, options of `run`); circles of imports; with `--item MODEL` also the path of an item.

Tokens are Python's, without comments, line ends and indentation. A circle is a group of modules that reach each other by
imports which run when a module is imported.

The path of an item is the functions and files of ours that a further item crosses, in any thread and process
of a `nightjar run` on a CPU: the functions whose calls rise by one or more for each further item between a
run of few items and one of more, and those that the engine's thread calls in every frame, since each item
needs frames. What runs once for a command, a shard, or a time (polls, heartbeats) is left out: the run of few
items waits before its first one, so that it lasts longer than the run of more and polls do not rise.
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
from pathlib import Path
from typing import Any

import click
import grimp
import networkx

from benchmarks.common import ROOT, environment_with, parser, read, table

#: Rooms that are installed, from the top down.
PRODUCT = ("nightjar", "worker", "jobs", "migrations", "pipelines", "kernels")
ROOMS = ("tests", "benchmarks", *PRODUCT)
#: Lines of a file that is large.
LARGE = 600
#: Items of the two runs that are compared, and the part of the expected calls that is enough: a process that is killed loses
#: the calls of its last tenth of a second.
FEW, MORE, ENOUGH = 8, 32, 0.75
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


def late_imports(path: Path) -> set[int]:
    """The lines of the imports in functions, which run later than the module is imported."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = (node for function in functions for node in ast.walk(function))
    return {node.lineno for node in inner if isinstance(node, ast.Import | ast.ImportFrom)}


def circles(modules: dict[str, Path]) -> list[list[str]]:
    """Groups of two modules or more that reach each other."""
    imports = grimp.build_graph(*ROOMS, exclude_type_checking_imports=True, cache_dir=None)
    graph = networkx.DiGraph()
    for module in imports.modules & modules.keys():
        late = late_imports(modules[module])
        for name in imports.find_modules_directly_imported_by(module):
            lines = imports.get_import_details(importer=module, imported=name)
            if {line["line_number"] for line in lines} - late:
                graph.add_edge(module, name)
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


#: Runs at the start of every process of ours: it counts the calls of each function, and writes them several times a second,
#: because a process may be killed. The first item waits for some seconds.
TRACE = """
import atexit, os, sys, threading, time
ROOT, INTO, WAIT = os.environ["TRACE_ROOT"] + os.sep, os.environ["TRACE_INTO"], float(os.environ["TRACE_WAIT"])
counts, in_frames, engine = {}, {}, set()

def note(frame, event, _):
    code = frame.f_code
    # 1: a function, no class body
    if event == "call" and code.co_filename.startswith(ROOT) and code.co_flags & 1 and not code.co_name.startswith("<"):
        counts[code] = counts.get(code, 0) + 1
        if code.co_qualname == "EngineCore.step":
            engine.add(threading.get_ident())
        if threading.get_ident() in engine:
            in_frames[code] = in_frames.get(code, 0) + 1
        if code.co_qualname == "ShardRun.feed" and counts[code] == 1:
            time.sleep(WAIT)

def write():
    path = os.path.join(INTO, f"{os.getpid()}.calls")
    with open(path + ".new", "w") as file:
        for code, count in list(counts.items()):
            name = f"{code.co_filename[len(ROOT):]}\\t{code.co_qualname}:{code.co_firstlineno}"
            file.write(f"{name}\\t{count}\\t{in_frames.get(code, 0)}\\n")
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


#: A file, and a function with its first line.
Function = tuple[str, str]


def calls(model: str, items: int, wait_seconds: float = 0) -> tuple[Counter[Function], set[Function]]:
    """The calls of each function in a job of `items` items, and the functions that every frame calls."""
    with tempfile.TemporaryDirectory(prefix="item-path-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TRACE)
        with (folder / "input.jsonl").open("w") as file:
            for number in range(items):
                messages = [["user", "text", f"This is line {number}, and it continues for a bit."]]
                file.write(json.dumps({"example_id": f"item-{number}", "messages": messages}) + "\n")
        environment = environment_with(folder) | {"OMP_NUM_THREADS": "1", "TRACE_ROOT": str(ROOT)}
        environment |= {"TRACE_INTO": name, "TRACE_WAIT": str(wait_seconds)}
        given = str(Path(model).resolve()) if Path(model).is_dir() else model
        words = [sys.executable, "-m", "jobs", "run", "input.jsonl", "--model", given, "--seed", "7"]
        subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        found, in_frames = Counter[Function](), Counter[Function]()
        for row in (row for path in folder.glob("*.calls") for row in path.read_text().splitlines()):
            file, function, count, framed = row.split("\t")
            if file.split(os.sep)[0] in PRODUCT:
                found[file, function] += int(count)
                in_frames[file, function] += int(framed)
        frames = sum(n for (_, function), n in in_frames.items() if function.startswith("EngineCore.step:"))
        return found, {function for function, count in in_frames.items() if count >= ENOUGH * frames > 0}


def item_path(model: str) -> dict[str, Any]:
    """How many functions and files of ours a further item crosses."""
    began = time.monotonic()
    more, path = calls(model, MORE)
    few, _ = calls(model, FEW, (time.monotonic() - began) / 2)
    path |= {one for one, count in more.items() if count - few[one] >= ENOUGH * (MORE - FEW)}
    return {"model": Path(model).name, "functions": len(path), "files": len({file for file, _ in path})}


def main() -> int:
    options = read(parser(__doc__, ""), item=str)
    modules = sources()
    found: dict[str, Any] = {"rooms": rooms(modules), "circles": circles(modules), "surface": surface()}
    found["items"] = [item_path(model) for model in options.item]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["rooms"], ("room", "tokens", "protocols", "files", "lines", "large_files")))
    print(", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in found["surface"].items()))
    print(table(found["items"], ("model", "functions", "files")))
    print("\n  ".join([f"circles: {len(found['circles'])}", *map(str, found["circles"])]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
