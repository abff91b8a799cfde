"""`nightjar worker`, `beat`, `flower`, `nightly`, `sweep`: this process becomes `python -m worker ...`: the CLI imports no worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from jobs.settings import load_settings

_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)


def _become(name: str, arguments: Sequence[str]) -> None:
    if not {"-h", "--help"} & set(arguments):
        load_settings()
    sys.stdout.flush()
    # -P: the working directory must not shadow our modules.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "worker", name, *arguments])  # noqa: S606


@click.command(context_settings=_PASS_ON, add_help_option=False)
@_arguments
def worker(arguments: Sequence[str]) -> None:
    """Run a worker; options as in `nightjar worker --help`."""
    _become("run", arguments)


@click.command(context_settings=_PASS_ON, add_help_option=False)
@_arguments
def beat(arguments: Sequence[str]) -> None:
    """Run the timer of nightly jobs; options as in `nightjar beat --help`."""
    _become("beat", arguments)


@click.command(context_settings=_PASS_ON, add_help_option=False)
@_arguments
def flower(arguments: Sequence[str]) -> None:
    """Run the dashboard of the queues; options as in `nightjar flower --help`."""
    _become("flower", arguments)


@click.command(context_settings=_PASS_ON, add_help_option=False)
@_arguments
def nightly(arguments: Sequence[str]) -> None:
    """Submit the nightly jobs that are due; options as in `nightjar nightly --help`."""
    _become("nightly", arguments)


@click.command(context_settings=_PASS_ON, add_help_option=False)
@_arguments
def sweep(arguments: Sequence[str]) -> None:
    """Find objects that nothing names; options as in `nightjar sweep --help`."""
    _become("sweep", arguments)
