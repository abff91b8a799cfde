"""`nightjar doctor`."""

from __future__ import annotations

import click

from jobs.cli.context import common_options
from jobs.cli.output import FAILED, Output, printable
from jobs.doctor import Health, examine

_COLORS = {Health.OK: "green", Health.WARN: "yellow", Health.FAIL: "red"}


@click.command()
@common_options
def doctor(home: str | None, as_json: bool, quiet: bool) -> int:
    """Check Python, settings, ledger, broker, store, disk and models; the exit code is 1 when something fails."""
    output = Output(as_json=as_json, quiet=quiet)
    worst = Health.OK
    for finding in examine(home):
        worst = Health.FAIL if Health.FAIL in (worst, finding.health) else finding.health if worst is Health.OK else worst
        if as_json:
            view = {"check": finding.check, "health": finding.health.value, "message": finding.message, "advice": finding.advice}
            output.data({"schema": "nightjar.finding/1", **view})
            continue
        if quiet and finding.health is Health.OK:
            continue
        label = click.style(f"{finding.health.value:<5}", fg=_COLORS[finding.health], bold=True)
        output.line(f"{label} {finding.check:<9} {printable(finding.message)}")
        if finding.advice:
            output.line(f"{'':<15} {printable(finding.advice)}")
    return FAILED if worst is Health.FAIL else 0
