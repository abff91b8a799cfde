"""`nightjar calibrate`: what a job teaches about the length of its voices' speech, for the quality checks of later jobs."""

from __future__ import annotations

import click

from jobs.cli.context import common_options, found_job, job_argument
from jobs.cli.output import Output


@click.command()
@job_argument
@common_options
def calibrate(job: str, home: str | None, as_json: bool, quiet: bool) -> None:
    """Learn how long JOB's voices speak, and print it as a quality config for `--qa-config`.

    Later jobs freeze these bounds into their spec: an item's verdict never depends on the others of its run.
    """
    import msgspec

    from jobs.calibrate import as_toml, learned_paces
    from jobs.store import open_store

    output = Output(as_json=as_json, quiet=quiet)
    with found_job(job, home) as (settings, ledger, found):
        paces = learned_paces(ledger, open_store(found.store_url, settings.s3), found)
    if as_json:
        output.data({"schema": "nightjar.calibration/1", "job": found.id, "paces": msgspec.to_builtins(paces)})
        return
    output.line(as_toml(paces))
    output.note("Save it as qa.toml and submit with: --qa-config qa.toml")
