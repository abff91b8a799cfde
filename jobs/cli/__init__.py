"""The `nightjar` command (`jobs` is the same). A subcommand is imported when it is called, so that
`nightjar status` starts fast."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from jobs import DISTRIBUTION
from jobs.console import Interrupted, OutputClosed, defer_sigint, exit_code, fail, record_interrupts
from pipelines.errors import NightjarError

#: Heading -> (module under jobs.cli, {command: one line of help}), in the order of `nightjar --help`. In the
#: module, the function of a command has the command's name.
GROUPS = {
    "Make speech": (
        "run",
        {
            "run": "Synthesize a file on this machine, without other services.",
            "submit": "Submit a file as a job for running workers.",
            "dev": "Run a broker, ledger, store and worker on this machine until Ctrl-C.",
            "nightly": "Submit the scheduled jobs of the night and write their exports.",
        },
    ),
    "Jobs": (
        "jobs",
        {
            "status": "Show a job's progress, speed and cost.",
            "watch": "Show a job's progress until it ends.",
            "wait": "Wait until a job ends; the exit code says how it ended.",
            "list": "List jobs, newest first.",
            "show": "Show a job's settings and versions, and the command that repeats it.",
            "items": "List a job's items and their audio files.",
            "errors": "List a job's refused lines and failed items.",
            "retry": "Run a job's failed items again.",
            "pause": "Pause a job; items that are being synthesized finish.",
            "resume": "Continue a paused job.",
            "cancel": "Cancel a job; finished items are kept.",
            "priority": "Change a job's priority.",
            "delete": "Delete an ended job from the ledger and the store.",
        },
    ),
    "Results": (
        "results",
        {
            "export": "Export a job as a dataset (ESPnet, Kaldi, Lhotse, Parquet, ...).",
            "decode": "Make the audio of a job of codes, or of its export.",
            "augment": "Write a second dataset from an export: noise, rooms, bands, codecs, speed.",
            "report": "Write an HTML report of a job, with audio players.",
            "check": "Measure a job's stored audio with meters.",
            "accept": "Accept items: they count as passed, and exports have them.",
            "refuse": "Refuse items: exports leave them out.",
            "verify": "Check a job's files against the ledger; restore lost files.",
        },
    ),
    "Models and servers": (
        "models",
        {
            "models": "List the models, or show one.",
            "voices": "List, add or delete stored voices: named recordings that models clone.",
            "serve": "Serve a model over HTTP with OpenAI's API.",
        },
    ),
    "Installation": (
        "admin",
        {
            "doctor": "Check the installation and its services.",
            "db": "Create or upgrade the ledger's tables.",
            "config": "Show the settings and where they come from.",
            "worker": "Run a worker process.",
            "workers": "List the workers with their shards and their speed.",
            "flower": "Run the Flower dashboard.",
            "sweep": "Find and delete objects in the store that no job uses.",
            "completion": "Print the shell completion script.",
        },
    ),
}
COMMANDS = {name: module for module, group in GROUPS.values() for name in group}


class LazyGroup(click.Group):
    """A group that imports a command only to run it."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with defer_sigint():
            return getattr(importlib.import_module(f"jobs.cli.{COMMANDS[cmd_name]}"), cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # click would exit with 1, which means failed items here.
            raise OutputClosed from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, (_, group) in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(list(group.items()))


@click.group(
    cls=LazyGroup,
    commands=dict.fromkeys(COMMANDS),
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name=DISTRIBUTION, message="%(version)s", help="Print the version and exit.")
def cli() -> None:
    """Turn files of dialogues into speech datasets.

    `nightjar run FILE --out DIR` works without any other service. Settings come from options, SPEECH_*
    variables and nightjar.toml (see `nightjar config list`).

    \b
    Examples:
      nightjar run dialogues.jsonl --out out      # on this machine, without other services
      nightjar submit dialogues.jsonl             # for running workers
      nightjar status JOB
    """


def _repair_stdio() -> None:
    """Replaces a closed stream by the null device; escapes characters that a stream cannot encode."""
    for name in ("stdout", "stderr"):
        stream: object = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Discards output that cannot be written: another attempt at the interpreter's end would change the exit
    code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0 ok, 1 failed items or another failure, 2 usage, 3 not
    found, 4 invalid input, 5 unreachable."""
    record_interrupts()
    # Imports make many permanent objects; garbage collection among them would take half of a command's time.
    gc.set_threshold(50_000, 20, 100)
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    _repair_stdio()
    try:
        result = cli.main(
            words,
            prog_name="nightjar",
            standalone_mode=False,
            color=False if os.environ.get("NO_COLOR") else None,
        )
        sys.stdout.flush()
    except (BrokenPipeError, OutputClosed):
        _discard_output()
        return OutputClosed.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Interrupted as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except Exception as error:
        if os.environ.get("SPEECH_DEBUG") and not isinstance(error, NightjarError):
            raise
        fail(error, as_json=as_json)
        _discard_output()
        return exit_code(error)
    return result if isinstance(result, int) else 0
