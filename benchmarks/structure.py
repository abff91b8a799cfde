"""`python -m benchmarks.structure`: tokens, files, lines and Protocols of each room; what a user meets (settings, commands,
options of `run`); circles of imports.

Tokens are Python's, without comments, line ends and indentation. A circle is a group of modules that reach each other by
imports which run when a module is imported.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import networkx

from benchmarks.common import ROOT, table

#: Rooms that are installed, from the top down.
PRODUCT = ("nightjar", "worker", "jobs", "migrations", "pipelines", "kernels")
ROOMS = ("tests", "benchmarks", *PRODUCT)
#: Lines of a file that is large.
LARGE = 600
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


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write everything as JSON here.")
def main(out: Path | None) -> None:
    """Prints the shape of the tree."""
    modules = sources()
    found: dict[str, Any] = {"rooms": rooms(modules), "circles": circles(modules), "surface": surface()}
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found["rooms"], ("room", "tokens", "protocols", "files", "lines", "large_files")))
    print(", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in found["surface"].items()))
    print("\n  ".join([f"circles: {len(found['circles'])}", *map(str, found["circles"])]))


if __name__ == "__main__":
    main()
