"""`nightjar export`, `report` and `calibrate`: what is made of a job that ended."""

from __future__ import annotations

from pathlib import Path

import click

from jobs.cli.context import NamedPath, common_options, found_job, job_argument, price_option
from jobs.cli.output import Output
from jobs.formatting import bytes_text, counted
from jobs.settings import Settings


class FormatOption(click.Option):
    """An option whose help lists the formats that are installed."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from jobs.export.formats import describe_formats

        self.help = describe_formats()
        return super().get_help_record(ctx)


@click.command()
@job_argument
@click.option(
    "--format",
    "format_",
    default="espnet",
    show_default=True,
    metavar="FORMAT",
    cls=FormatOption,
)
@click.option(
    "--to",
    default="-",
    show_default=True,
    metavar="PLACE",
    type=NamedPath(),
    help="File (`-` is standard output), folder or s3://BUCKET/PREFIX.",
)
@click.option("--split", metavar="SHARES", help="Splits by hash of the example id, such as train=0.98,dev=0.01,test=0.01.")
@click.option(
    "--audio-root", type=NamedPath(path_type=Path), help="Name audio by its path below this folder, and fetch what is missing there."
)
@click.option("--absolute", is_flag=True, help="Name audio by absolute paths, for readers that start from their working directory.")
@click.option("--part-mb", type=click.IntRange(min=1), help="Maximum audio in one file of shar, webdataset and parquet.  [default: 500]")
@common_options
def export(
    job: str,
    format_: str,
    to: str,
    split: str | None,
    audio_root: Path | None,
    absolute: bool,
    part_mb: int | None,
    home: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write JOB's items that have audio, in the order of the input; every file appears complete or not at all.

    An export to a folder that was stopped goes on with the same command.
    """
    from jobs.export import PART_BYTES, parse_splits
    from jobs.export import export as write
    from jobs.store import open_store

    # The data goes to stdout, so what is said about it may not.
    output = Output(as_json=as_json and to != "-", quiet=quiet)
    splits = parse_splits(split) if split else None
    with found_job(job, home) as (settings, ledger, found):
        report = write(
            ledger,
            open_store(found.store_url, settings.s3),
            found.id,
            format_,
            to,
            audio_root,
            splits=splits,
            part_bytes=part_mb * 10**6 if part_mb else PART_BYTES,
            s3=settings.s3,
            absolute=absolute,
            on_part=lambda part: output.note(f"{part.split} {part.number + 1} of {part.of}: {counted(part.items, 'item')}"),
        )
    if output.as_json:
        counts = {"items": report.items, "left_out": report.left_out}
        output.data({"schema": "nightjar.export/1", "job": found.id, "format": report.format, "to": report.to, **counts})
        return
    left_out = f", {counted(report.left_out, 'item')} without audio left out" if report.left_out else ""
    output.note(f"{counted(report.items, 'item')} written{'' if to == '-' else f' to {report.to}'}{left_out}.")


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
