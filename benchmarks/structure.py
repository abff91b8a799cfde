"""`python -m benchmarks.structure`: tokens, files and lines of each room, what a user meets (settings, commands, options
of `run`), Protocols, small and large files. Tokens are Python's, without comments, line ends and indentation. The order of
the rooms is import-linter's.
"""

from __future__ import annotations

import ast
import importlib
import json
import statistics
import subprocess
import tokenize
import typing
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
LAYOUT_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def sources(tree: Path) -> dict[str, Path]:
    """Module name to path, of the files that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, Path] = {}
    for path in map(Path, sorted(listed)):
        if path.parts[0] in ROOMS and (tree / path).is_file():
            found[".".join(path.with_suffix("").parts).removesuffix(".__init__")] = tree / path
    return found


def room_of(module: str) -> str:
    return module.partition(".")[0]


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
    return {
        "settings": count_settings(Settings),
        "commands": sum(map(commands, leaves)),
        "options_of_run": options,
    }


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
    groups = {**{room: [room] for room in ROOMS}, "product": PRODUCT, "all": ROOMS}
    chosen = {
        name: [path for module, path in modules.items() if room_of(module) in rooms] for name, rooms in groups.items()
    }  # fmt: skip
    return {"rooms": {name: sizes(tree, paths) for name, paths in chosen.items() if paths}}


@click.command()
@click.option("--tree", default=ROOT, type=click.Path(path_type=Path), help="The checkout to look at.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write everything as JSON here.")
def main(tree: Path, out: Path | None) -> None:
    """Prints the shape of the tree. What a user meets is that of the code that runs this."""
    found = measure(tree) | {"surface": surface()}
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


if __name__ == "__main__":
    main()
