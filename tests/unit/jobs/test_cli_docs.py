"""The documentation says what the code does: settings, error codes, commands, links, files and make
targets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from jobs.cli import COMMANDS, cli
from jobs.cli.admin import described
from jobs.settings import ServeSettings
from pipelines.errors import ErrorCode
from pipelines.serving import ServeOptions
from tests.support.docs_kit import PAGES, ROOT, check_call, name_of
from worker.cli import cli as worker_cli


def rows(page: str) -> list[list[str]]:
    """Cells of the table rows of a page whose first cell is code."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def test_the_configuration_page_lists_every_setting() -> None:
    lines = (ROOT / "docs/configuration.md").read_text().splitlines()
    assert sorted(line for line in lines if line.startswith("| `")) == sorted(
        f"| `{variable}` | {f'`{default}`' if default else ''} | {text} |"
        for variable, default, text in described()
    )


def test_the_error_page_lists_every_code_with_advice() -> None:
    listed = {row[0].strip("`"): row for row in rows("errors.md") if len(row) == 4}
    assert list(listed) == [code.value for code in ErrorCode]
    for code in ErrorCode:
        _, meaning, advice, retried = listed[code.value]
        assert meaning
        assert advice
        assert retried == ("yes" if code.retryable else "no"), code


def test_the_limits_of_the_security_page_are_the_codes() -> None:
    """Each row of its tables names a setting or a constant, and says its default or its value."""
    lines = [
        line.strip("|").split("|")
        for line in (ROOT / "SECURITY.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    told = {
        cells[2].strip(" `"): cells[1].strip()
        for cells in lines
        if len(cells) == 3 and cells[2].strip().startswith("`")
    }
    # All of the server's settings that are a number, apart from its port.
    numbers = {
        name
        for name, value in ServeSettings()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "port"
    }
    assert {name for name in told if name.startswith("SPEECH_SERVE__")} == {
        f"SPEECH_SERVE__{name.upper()}" for name in numbers
    }
    assert len(told) >= len(numbers) + 28
    for name, limit in told.items():
        if name.startswith("SPEECH_SERVE__"):
            value = getattr(ServeSettings(), name.removeprefix("SPEECH_SERVE__").lower())
        else:
            module, _, constant = name.rpartition(".")
            limits = ServeOptions(("name",)) if module.endswith(".ServeOptions") else import_module(module)
            value = getattr(limits, constant)
        assert float(limit.split()[0].replace(",", "")) == value, name


def test_the_tests_that_a_page_names_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert named <= set(re.findall(r"def (test_\w+)\(", code))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!https://)([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
    code = [*re.findall(r"`([^`]*)`", text), *re.findall(r"(?m)^    (.*)$", text)]
    for command in re.findall(r"(?:^|[(/]|\$\(|&& )nightjar ([a-z]+)\b", "\n".join(code), re.MULTILINE):
        assert command in COMMANDS, command


#: A path of the repository in code, but not a key of the store (`jobs/<job>/...`, `jobs/ID/`) or a pattern.
_FILE = re.compile(
    r"`((?:jobs|worker|pipelines|kernels|migrations|tests|benchmarks|examples|docs|\.ci|\.github)/(?!ID/)[\w./-]+)`"
)
_TARGETS = set(re.findall(r"(?m)^([a-z][a-z-]*):", (ROOT / "Makefile").read_text()))


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "tests").rglob("README.md"))], ids=name_of)
def test_files_modules_and_make_targets_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    assert [path for path in _FILE.findall(text) if not (ROOT / path).exists()] == []
    assert [name for name in re.findall(r"python -m ([\w.]+)", text) if find_spec(name) is None] == []
    called = {
        name
        for line in re.findall(r"`make ([^`\n]*)`|(?m:^    make (.*)$)", text)
        for name in "".join(line).split("#")[0].split()
    }
    assert {name for name in called if "=" not in name} <= _TARGETS


#: Its Python runs in an environment of its own, in the tests of integrations/pipecat-nightjar.
_OF_PIPECAT = ROOT / "docs/voice-agents.md"


@pytest.mark.parametrize("page", [page for page in PAGES if page != _OF_PIPECAT], ids=name_of)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "dialogues.jsonl").write_text(
        '{"example_id": "a1", "messages": [["user", "text", "Good evening."]]}\n'
    )
    names: dict[str, object] = {}
    for source in re.findall(r"(?ms)^```python$(.*?)^```$", page.read_text()):
        exec(compile(source, page.name, "exec"), names)


#: The old name in front of one of our commands, in code: a shell would run its builtin.
BARE = re.compile(r"(?:^|[`'\"(/|;&])[ \t]*jobs (?:{})\b(?! *=)".format("|".join(COMMANDS)), re.MULTILINE)
ROOMS = ("nightjar", "jobs", "worker", "pipelines", "kernels", "migrations", "benchmarks", "examples", "docs")


def shown_texts() -> Iterator[tuple[str, str]]:
    """(where, text) of all that a person may be shown: pages, examples, sources with their advice, and the
    help of every command."""
    files = [
        ROOT / name
        for name in ("README.md", "Dockerfile", "docker-compose.yml", "Makefile", "pyproject.toml")
    ]
    for room in ROOMS:
        files += [
            path
            for path in (ROOT / room).rglob("*")
            if path.suffix in {".py", ".md", ".html", ".js", ".toml", ".sh", ".service"}
        ]
    yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in files)
    waiting: list[tuple[str, click.Command]] = [("nightjar", cli)]
    while waiting:
        name, command = waiting.pop()
        yield f"{name} --help", command.get_help(click.Context(command, info_name=name))
        if isinstance(command, click.Group):
            context = click.Context(command)
            found = [(child, command.get_command(context, child)) for child in command.list_commands(context)]
            waiting += [(f"{name} {child}", known) for child, known in found if known is not None]


def test_no_text_shows_a_command_that_shells_take_for_their_builtin() -> None:
    assert [(where, match[0]) for where, text in shown_texts() for match in BARE.finditer(text)] == []
    assert BARE.search("Start one with `jobs worker`.")
    assert BARE.search("    jobs submit x.jsonl")
    assert not BARE.search("see `jobs.manifest`, `env jobs status`")


#: A registry would have to have us.
PUBLISHED = re.compile(r"pip install (?:-\S+ )*['\"`]?(?:nightjar-speech|pipecat-nightjar)")


def test_no_text_installs_nightjar_from_a_registry_that_lacks_it() -> None:
    ours = [path for path in (ROOT / "integrations").glob("*/*") if path.suffix in {".md", ".py"}]
    texts = [*shown_texts(), *((str(path), path.read_text()) for path in ours)]
    assert [(where, match[0]) for where, text in texts for match in PUBLISHED.finditer(text)] == []
    assert PUBLISHED.search("Install it with: pip install 'nightjar-speech[gpu]'.")


def commands() -> Iterator[tuple[str, click.Command]]:
    """(name, command) of every command, those of the worker with the names that they have under
    `nightjar`."""
    waiting: list[tuple[str, click.Command]] = [("nightjar", cli)]
    while waiting:
        name, command = waiting.pop()
        if isinstance(command, click.Group):
            context = click.Context(command)
            found = [(child, command.get_command(context, child)) for child in command.list_commands(context)]
            waiting += [(f"{name} {child}", known) for child, known in found if known is not None]
        if command.context_settings.get("ignore_unknown_options") and not command.add_help_option:
            command = worker_cli.commands[
                "run" if name == "nightjar worker" else name.removeprefix("nightjar ")
            ]
        yield name, command


@pytest.mark.parametrize(
    ("name", "command"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_help_of_every_command_has_examples_that_can_be_given(name: str, command: click.Command) -> None:
    text = command.get_help(click.Context(command, info_name=name))
    examples = re.findall(
        r"(?m)^ *(?:eval \"\$\()?(nightjar (?:'[^']*'|[^|&;)>#\n'])*)",
        text.partition("Examples:")[2].partition("\n\n")[0],
    )
    assert examples, text
    for example in examples:
        check_call(example)
    assert not re.search(r"\b(TEXT|INTEGER RANGE|FLOAT RANGE)\b", re.sub(r"--instruct TEXT", "", text)), text
