"""The `nightjar` command (`jobs` is the same). A subcommand is imported when it is called: `nightjar status` pays for nothing else."""

from __future__ import annotations

import difflib
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from jobs.cli.output import Interrupted, ReaderLeft, exit_code, fail, note_interrupts, undisturbed
from pipelines.errors import NightjarError

#: Command: (module under jobs.cli, function, one line of help), in the order of `nightjar --help`.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("run", "run", "Make the speech of a file here and now, with nothing else running."),
    "submit": ("submit", "submit", "Submit a file of dialogues as a job."),
    "status": ("show", "status", "Show how far a job is."),
    "watch": ("follow", "watch", "Follow a job until it ends."),
    "wait": ("follow", "wait", "Wait for a job's end; the exit code tells how it ended."),
    "list": ("show", "list_jobs", "List jobs, newest first."),
    "items": ("show", "items", "List a job's items with their audio."),
    "errors": ("show", "errors", "List what went wrong in a job."),
    "retry": ("control", "retry", "Open a job's failed items again."),
    "pause": ("control", "pause", "Hand out no more of a job."),
    "resume": ("control", "resume", "Go on with a paused job."),
    "cancel": ("control", "cancel", "End a job; what is done stays."),
    "priority": ("control", "priority", "Let a job run before or after others."),
    "export": ("export", "export", "Write a job's result in a format other tools read."),
    "report": ("export", "report", "Write a page that shows how a job went, to look at and listen to."),
    "verify": ("verify", "verify", "Check a job's objects, and make some of its items again."),
    "serve": ("serve", "serve", "Serve a model over HTTP, as OpenAI's API does."),
    "evaluate": ("evaluate", "evaluate", "Ask a server every dialogue of a file, and keep its answers."),
    "calibrate": ("export", "calibrate", "Learn from a job how long its voices' speech is."),
    "models": ("models", "models", "List the models, or show one."),
    "doctor": ("admin", "doctor", "Check that everything a job needs is there."),
    "db": ("admin", "db", "Set up the ledger's schema."),
    "config": ("admin", "config", "Show the settings and where they come from."),
    "worker": ("processes", "worker", "Run a worker."),
    "beat": ("processes", "beat", "Run the timer of nightly jobs."),
    "flower": ("processes", "flower", "Run the dashboard of the queues."),
    "nightly": ("processes", "nightly", "Submit the nightly jobs that are due."),
    "sweep": ("processes", "sweep", "Find objects of ended jobs that nothing names."),
    "completion": ("completion", "completion", "Print the completion script of a shell."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and help, and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function, _ = COMMANDS[cmd_name]
        with undisturbed():
            return getattr(importlib.import_module(f"jobs.cli.{module}"), function)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # click would end with 1, which here means that items failed.
            raise ReaderLeft from error

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not close:
                raise
            raise click.UsageError(f"{error.message} Did you mean {close[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


def _print_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        try:
            click.echo(version("nightjar-speech"))
        except PackageNotFoundError:
            click.echo("unknown (not installed)")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version and exit.")
def cli() -> None:
    """Turn files of dialogues into speech datasets.

    `nightjar run dialogues.jsonl --out DIR` needs nothing but this command. Settings come from SPEECH_* variables and nightjar.toml.
    """


def _mend_streams() -> None:
    """A stream that was closed swallows what it gets; one that cannot show a character shows its escape."""
    for name in ("stdout", "stderr"):
        stream: object = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _forget_output() -> None:
    """What could not be written is not tried again, also not at the interpreter's end, which would then set the exit code."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code. 0 ok, 1 failed items or a failure, 2 usage, 3 not found, 4 invalid input, 5 unreachable."""
    note_interrupts()
    # Start-up makes many objects that stay; collecting among them is half a command's time.
    gc.set_threshold(50_000, 20, 100)
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    _mend_streams()
    try:
        result = cli.main(words, prog_name="nightjar", standalone_mode=False, color=False if os.environ.get("NO_COLOR") else None)
        sys.stdout.flush()
    except (BrokenPipeError, ReaderLeft):
        _forget_output()
        return ReaderLeft.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Interrupted as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except NightjarError as error:
        fail(error, as_json=as_json)
        return exit_code(error)
    except Exception as error:
        if os.environ.get("SPEECH_DEBUG"):
            raise
        fail(error, as_json=as_json)
        _forget_output()
        return 1
    return result if isinstance(result, int) else 0
