"""`nightjar export`, `report` and `calibrate`: results of a job that ended."""

from __future__ import annotations

from pathlib import Path

import click

from jobs.cli.context import common_options, found_job, job_argument, price_option
from jobs.console import NamedPath, Output
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
    metavar="PATH",
    type=NamedPath(),
    help="File, folder or s3://BUCKET/PREFIX; `-` is standard output.",
)
@click.option(
    "--split",
    metavar="SHARES",
    help="Splits and their shares, for example train=0.98,dev=0.01,test=0.01. An example is assigned by the hash of its id.",
)
@click.option(
    "--audio-root",
    metavar="DIR",
    type=NamedPath(path_type=Path),
    help="Copy the audio below this folder and write the paths of the copies.",
)
@click.option("--absolute", is_flag=True, help="Write absolute paths of the audio.")
@click.option(
    "--part-mb", metavar="N", type=click.IntRange(min=1), help="Maximum MB of audio per file (shar, webdataset, parquet). [default: 500]"
)
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
    output: Output,
) -> None:
    """Export the items of JOB that have audio, in input order.

    A file appears when it is complete, never in part. If an export to a folder is interrupted, give the same command again: it
    continues.

    \b
    Examples:
      nightjar export JOB --to dataset.jsonl
      nightjar export JOB --format webdataset --to datasets/night --split train=0.98,dev=0.01,test=0.01
    """
    from jobs.export import PART_BYTES, parse_splits
    from jobs.export import export as write
    from jobs.store import open_store

    # The data goes to stdout, so what is said about it may not.
    output = Output(as_json=output.as_json and to != "-", quiet=output.quiet)
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
@click.option(
    "--to", type=NamedPath(dir_okay=False, path_type=Path), metavar="FILE", help="HTML file to write. [default: DIR/reports/JOB.html]"
)
@click.option("--items", default=60, show_default=True, metavar="N", type=click.IntRange(0, 500), help="Number of items in the table.")
@click.option("--embed", is_flag=True, help="Embed short audio clips in the file, instead of links to the store.")
@price_option
@common_options
def report(job: str, to: Path | None, items: int, embed: bool, price: float | None, home: str | None, output: Output) -> None:
    """Write an HTML report of JOB: figures over time, errors, and the worst items with audio players.

    The file opens in a browser without a server.

    \b
    Examples:
      nightjar report JOB
      nightjar report JOB --to night.html --price 2.80
    """
    from jobs.report import ReportOptions, write_report
    from jobs.store import open_store

    with found_job(job, home) as (settings, ledger, found):
        options = ReportOptions(items, embed, settings.price_per_gpu_hour if price is None else price)
        # Absolute, so that no name means standard output.
        place = to.absolute() if to else default_place(settings, found.id)
        written = write_report(ledger, open_store(found.store_url, settings.s3), found.id, place, options)
    if output.as_json:
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
def calibrate(job: str, home: str | None, output: Output) -> None:
    """Measure the speaking rates of JOB's voices and print them as a quality configuration.

    Save the output and give it to later jobs with --qa-config.

    \b
    Examples:
      nightjar calibrate JOB > qa.toml
      nightjar submit dialogues.jsonl --model MODEL --qa-config qa.toml
    """
    import msgspec

    from jobs.calibrate import as_toml, learned_paces
    from jobs.store import open_store

    with found_job(job, home) as (settings, ledger, found):
        paces = learned_paces(ledger, open_store(found.store_url, settings.s3), found)
    if output.as_json:
        output.data({"schema": "nightjar.calibration/1", "job": found.id, "paces": msgspec.to_builtins(paces)})
        return
    output.line(as_toml(paces))
    output.note("Save it as qa.toml and submit with: --qa-config qa.toml")
