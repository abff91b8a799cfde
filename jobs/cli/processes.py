"""`nightjar worker`, `beat`, `flower`, `nightly`, `sweep`: this process becomes `python -m worker ...`, which has their options and help.

The command line imports no worker: imports point down.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from jobs.console import PROGRAM
from jobs.settings import load_settings

_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _command(name: str, command: str) -> click.Command:
    """The command `nightjar NAME`, which is `python -m worker COMMAND`."""

    @click.command(name, context_settings=_PASS_ON, add_help_option=False)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def become(arguments: Sequence[str]) -> None:
        if not {"-h", "--help"} & set(arguments):
            load_settings()
        sys.stdout.flush()
        # -P: the working directory must not shadow our modules.
        program = [sys.executable, "-P", "-m", "worker", command, *arguments]
        os.execve(sys.executable, program, os.environ | {PROGRAM: f"nightjar {name}"})  # noqa: S606

    return become


worker, beat, flower, nightly, sweep = (
    _command("worker", "run"),
    _command("beat", "beat"),
    _command("flower", "flower"),
    _command("nightly", "nightly"),
    _command("sweep", "sweep"),
)
