"""The commands of the pages: those of indented lines, to be run by a shell, and those of inline code, to
be parsed."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from jobs.cli import cli

ROOT = Path(__file__).parents[2]
_OF_THE_ROOT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
PAGES = [*[ROOT / name for name in _OF_THE_ROOT], *sorted((ROOT / "docs").rglob("*.md"))]
#: Words of a shell that are no programs, and programs that a machine of tests may lack.
_SHELL = {
    "export",
    "eval",
    "cd",
    "source",
    "docker",
    "curl",
    "make",
    "pip",
    "python",
    "nightjar",
    ".venv/bin/nightjar",
}
_SHELL |= {"sudo", "kubectl", "sbatch"}
_CRON = re.compile(r"^(?:[\d*/,-]+ +){5}")
_ASSIGNED = re.compile(r"^[A-Z][A-Z_0-9]*=(?:\$\()?")


@dataclass(frozen=True, slots=True)
class Command:
    """One command line as it stands on a page; `block` counts the indented blocks, which a reader types
    into one shell."""

    page: str
    block: int
    text: str


def name_of(page: Path) -> str:
    """`README.md`, `operate.md`, `adr/README.md`: the path below docs/, or below the root."""
    return str(page.relative_to(ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT))


def commands_of(page: Path) -> list[Command]:
    """The command lines of a page, each with the lines that it goes on in."""
    return [Command(name_of(page), block, text) for block, text in _indented_lines(page) if is_command(text)]


def other_lines(page: Path) -> list[str]:
    """The indented lines of a page that are no commands."""
    return [text for _, text in _indented_lines(page) if not is_command(text)]


def _indented_lines(page: Path) -> Iterator[tuple[int, str]]:
    """(block, line) of every indented line; one that ends in a backslash goes on in the next. A fenced
    block is a drawing or Python."""
    block, begun, inside = 0, "", False
    for line in re.sub(r"(?ms)^```(text|python)$.*?^```$", "", page.read_text()).splitlines():
        indented = line.startswith("    ")
        block += indented and not inside
        inside = indented or (inside and not line.strip())
        if not indented:
            continue
        text = f"{begun} {line.strip()}".strip()
        begun = text[:-1].rstrip() if text.endswith("\\") else ""
        if not begun:
            yield block, text


def is_command(text: str) -> bool:
    """Whether a shell would find a program, or a word of its own, at the start of this line."""
    text = _CRON.sub("", text)
    first = re.split(r"[\s)]", _ASSIGNED.sub("", text), maxsplit=1)[0]
    return first in _SHELL or (
        re.fullmatch(r"[a-z][a-z0-9_.-]*", first) is not None
        and " = " not in text
        and shutil.which(first) is not None
    )


def inline_commands(page: Path) -> Iterator[str]:
    """What stands in a page as `nightjar ...`, in tables and sentences."""
    for text in re.findall(r"`([^`\n]*)`", page.read_text()):
        yield from re.findall(r"(?:^|&& |\$\(|\| |env |/)(nightjar (?:'[^']*'|[^|&;)>'])*)", text)


def nightjar_parts(line: str) -> list[str]:
    """The calls of nightjar in a command line, without what the shell does with them."""
    line = re.sub(r"\s#.*", "", line)
    line = re.sub(r"docker compose (?:--\S+ )*run (?:--\S+ )*nightjar", "nightjar", line)
    return re.findall(r"(?:^|&& |\$\(|\| |/)(nightjar (?:'[^']*'|[^|&;)>'])*)", line)


def check_call(text: str) -> None:
    """Holds a call against the commands as they are: its subcommands, options, and the values of choices
    and numbers.

    Raises click.UsageError for what the command would refuse. Words in capitals stand for something and
    are not looked at.
    """
    words = [
        word for word in shlex.split(text.replace("…", "").replace("...", ""))[1:] if word not in ("[", "]")
    ]
    command: click.Command = cli
    context = click.Context(cli, info_name="nightjar")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        if name.isupper() or "/" in name:
            return  # `nightjar models PATH`
        child = command.get_command(context, name)
        if (
            child is None
            and command is not cli
            and (child := command.get_command(context, "show")) is not None
        ):
            words = [name, *words]  # `nightjar models hibari`
        if child is None:
            raise click.UsageError(f"No such command {name!r}.", context)
        command, context = child, click.Context(child, parent=context, info_name=name)
    if command.context_settings.get("ignore_unknown_options"):
        return  # the worker's own parser reads these
    if words and all(word.startswith("--") for word in words) and len(words) == 1:
        words = [*words, *(["VALUE"] if _takes_a_value(command, words[0]) else [])]
    given, extra, _ = command.make_parser(context).parse_args(words)
    if extra:
        raise click.UsageError(f"Got unexpected arguments {extra}.", context)
    for parameter in command.params:
        values = given.get(parameter.name or "")
        for value in values if isinstance(values, list | tuple) else [values]:
            if (
                isinstance(value, str)
                and not value.isupper()
                and not value.startswith("$")
                and not isinstance(parameter.type, click.Path)
            ):
                parameter.type.convert(value, parameter, context)


def _takes_a_value(command: click.Command, name: str) -> bool:
    return any(
        isinstance(known, click.Option) and name in known.opts and not known.is_flag
        for known in command.params
    )
