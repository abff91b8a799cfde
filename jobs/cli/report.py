"""`nightjar report`: one HTML file that shows how a job went."""

from __future__ import annotations

from pathlib import Path

import click

from jobs.cli.context import NamedPath, common_options, found_job, job_argument, price_option
from jobs.cli.output import Output, bytes_text, counted
from jobs.settings import Settings


@click.command()
@job_argument
@click.option("--to", type=NamedPath(dir_okay=False, path_type=Path), metavar="FILE", help="The file. [default: DIR/reports/JOB.html]")
@click.option("--items", default=60, show_default=True, type=click.IntRange(0, 500), help="Items in the table.")
@click.option("--embed", is_flag=True, help="Put short clips into the page rather than links to the store's folder.")
@price_option
@common_options
def report(job: str, to: Path | None, items: int, embed: bool, price: float | None, home: str | None, as_json: bool, quiet: bool) -> None:
    """Write a page about JOB that opens from disk: figures over time, errors, and the worst items to look at and listen to."""
    from jobs.report import ReportOptions, write_report
    from jobs.store import open_store

    output = Output(as_json=as_json, quiet=quiet)
    with found_job(job, home) as (settings, ledger, found):
        options = ReportOptions(items, embed, settings.price_per_gpu_hour if price is None else price)
        # Absolute, so that no name means standard output.
        place = to.absolute() if to else default_place(settings, found.id)
        written = write_report(ledger, open_store(found.store_url, settings.s3), found.id, place, options)
    if as_json:
        view = {"schema": "nightjar.report/1", "job": found.id, "to": written.path, "bytes": written.bytes}
        output.data({**view, "items": written.shown, "measured": written.measured})
        return
    output.line(written.path)
    output.note(f"{counted(written.shown, 'item')} shown, {written.measured} measured, {bytes_text(written.bytes)}.")


def default_place(settings: Settings, job_id: str) -> Path:
    """Where the report of a job stands if nobody says otherwise."""
    return settings.home.absolute() / "reports" / f"{job_id}.html"
