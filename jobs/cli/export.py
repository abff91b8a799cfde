"""`nightjar export`, `report` and `verify`: what is made of a job that ended, and whether it is whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.cli.options import (
    common_options,
    export_formats,
    found_job,
    job_argument,
    price_option,
    where_option,
)
from jobs.console import FAILED, NamedPath, Output
from jobs.formatting import bytes_text, counted, printable
from jobs.recent_jobs import out_words
from pipelines.audio_format import AUDIO_FORMATS

if TYPE_CHECKING:
    from jobs.export import LeftOut
    from jobs.ledger import Ledger
    from jobs.ledger.records import Job
    from jobs.store.base import ObjectStore
    from jobs.verify import Expected
    from jobs.where import Where
    from pipelines.request import Pipeline


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
    shell_complete=export_formats,
)
@click.option(
    "--to",
    default="-",
    show_default=True,
    metavar="PATH",
    type=NamedPath(anywhere=True),
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
@click.option(
    "--audio-format",
    type=click.Choice(AUDIO_FORMATS),
    help="Convert the audio that the export holds or copies (--audio-root). [default: as it is in the store]",
)
@click.option("--sample-rate", metavar="HZ", type=int, help="Resample it: 8000 to 48000 Hz.")
@where_option
@click.option("--absolute", is_flag=True, help="Write absolute paths of the audio.")
@click.option(
    "--part-mb",
    metavar="N",
    type=click.IntRange(min=1),
    help="Maximum MB of audio per file (shar, webdataset, parquet) or subfolder (audiofolder). [default: 500]",
)
@click.option(
    "--push",
    metavar="ORG/NAME",
    help="Push the parquet export to this dataset of the Hugging Face hub. The token is HF_TOKEN or stored.",
)
@click.option("--private", is_flag=True, help="Of a dataset that --push makes.")
@common_options
def export(
    job: str,
    format_: str,
    to: str,
    split: str | None,
    audio_root: Path | None,
    audio_format: str | None,
    sample_rate: int | None,
    where: str | None,
    absolute: bool,
    part_mb: int | None,
    push: str | None,
    private: bool,
    home: str | None,
    output: Output,
) -> None:
    """Export the items of JOB that have audio, in input order.

    A file appears when it is complete, never in part. If an export to a folder is interrupted, give the
    same command again: it continues. While JOB runs, the items that are done by now are exported; export
    again later to replace that.

    \b
    Examples:
      nightjar export JOB --to dataset.jsonl
      nightjar export JOB --where 'wer < 0.1 and distillmos > 3.5' --to clean.jsonl
      nightjar export JOB --format webdataset --to datasets/night --split train=0.98,dev=0.01,test=0.01
    """
    from jobs.export import PART_BYTES, hub, parse_splits
    from jobs.export import export as write
    from jobs.store import store_of
    from jobs.where import parse_where

    # The data goes to stdout, so what is said about it may not.
    output = Output(as_json=output.as_json and (to != "-" or push is not None), quiet=output.quiet)
    splits = parse_splits(split) if split else None
    wanted = None if where is None else parse_where(where)
    with found_job(job, home) as (settings, ledger, found):
        own = push is not None and to == "-"
        if push is not None:
            filter_text = None if wanted is None else str(wanted)
            to = str(settings.export_folder(found.id, format_, filter_text)) if own else to
            hub.check_push(format_, to, push)
        report = write(
            ledger,
            store_of(found, settings.s3),
            found.id,
            format_,
            to,
            audio_root,
            splits=splits,
            part_bytes=part_mb * 10**6 if part_mb else PART_BYTES,
            s3=settings.s3,
            replaces=[found.id] if own else None,
            absolute=absolute,
            audio_format=audio_format,
            sample_rate=sample_rate,
            where=wanted,
            on_part=lambda part: output.note(
                f"{part.split} {part.number + 1} of {part.of}: {counted(part.items, 'item')}"
            ),
        )
    pushed = {} if push is None else {"pushed": hub.push(Path(report.to), push, private=private or None)}
    if output.as_json:
        view = {
            "schema": "nightjar.export/1",
            "job": found.id,
            "format": report.format,
            "to": report.to,
            **pushed,
        }
        output.data(
            {
                **view,
                "items": report.items,
                "left_out": report.left_out,
                **_reasons_view(report.reasons, wanted),
            }
        )
        return
    place = "" if to == "-" else f" to {report.to}"
    output.note(
        f"{counted(report.items, 'item')} written{place}.{f' Left out: {report.reasons}.' if report.left_out else ''}"
    )
    if report.reasons.running:
        output.note(
            f"The job still runs: {counted(report.reasons.pending, 'item')} pending. Export again later to replace this."
        )
    if pushed:
        output.line(pushed["pushed"])


def _reasons_view(reasons: LeftOut, where: Where | None) -> dict[str, object]:
    """Why items were left out, as JSON."""
    import msgspec

    return {"where": None if where is None else str(where), **msgspec.to_builtins(reasons)}


@click.command()
@job_argument
@click.option(
    "--to",
    type=NamedPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="HTML file to write. [default: DIR/reports/JOB.html]",
)
@click.option(
    "--items",
    default=60,
    show_default=True,
    metavar="N",
    type=click.IntRange(0, 500),
    help="Number of items in the table.",
)
@click.option(
    "--embed", is_flag=True, help="Embed short audio clips in the file, instead of links to the store."
)
@price_option
@common_options
def report(
    job: str, to: Path | None, items: int, embed: bool, price: float | None, home: str | None, output: Output
) -> None:
    """Write an HTML report of JOB: figures over time, errors, and the worst items with audio players.

    The file opens in a browser without a server.

    \b
    Examples:
      nightjar report JOB
      nightjar report JOB --to night.html --price 2.80
    """
    from jobs.report import ReportOptions, default_place, write_report
    from jobs.store import store_of

    with found_job(job, home) as (settings, ledger, found):
        options = ReportOptions(items, embed, settings.price_per_gpu_hour if price is None else price)
        # Absolute, so that no name means standard output.
        place = to.absolute() if to else default_place(settings, found.id)
        written = write_report(ledger, store_of(found, settings.s3), found.id, place, options)
    if output.as_json:
        view = {"schema": "nightjar.report/1", "job": found.id, "to": written.path, "bytes": written.bytes}
        output.data({**view, "items": written.shown, "measured": written.measured})
        return
    output.line(written.path)
    output.note(
        f"{counted(written.shown, 'item')} shown, {written.measured} measured, {bytes_text(written.bytes)}."
    )


@click.command()
@job_argument
@click.option(
    "--sample",
    default=3,
    show_default=True,
    metavar="N",
    type=click.IntRange(min=0),
    help="Number of items to synthesize again.",
)
@click.option(
    "--deep", is_flag=True, help="In a bucket: read every object, instead of asking the server for checksums."
)
@click.option(
    "--repair", is_flag=True, help="Synthesize missing and changed files again, with the same seeds."
)
@common_options
def verify(job: str, sample: int, deep: bool, repair: bool, home: str | None, output: Output) -> int:
    """Check the files of JOB against the ledger, and synthesize some items again to compare.

    Exit code 1: a file is missing or changed and was not made again, or an item came out different.

    \b
    Examples:
      nightjar verify JOB
      nightjar verify JOB --repair
    """
    from jobs.provenance import opened_again
    from jobs.store import store_of
    from jobs.verify import ObjectCheck

    with found_job(job, home) as (settings, ledger, found):
        store = store_of(found, settings.s3)
        check = ObjectCheck(ledger, store, found, deep=deep)
        lost: list[Expected] = []
        for expected, fault in check:
            lost.append(expected)
            if output.as_json:
                view = {
                    "schema": "nightjar.fault/1",
                    "job": found.id,
                    "key": expected.key,
                    "example_id": expected.example_id,
                }
                output.data({**view, "fault": fault.value})
            else:
                output.line(f"{fault.value}\t{expected.key}\t{printable(expected.example_id or '')}")
        mended, matches = Counter[str](), Counter[str]()
        if sample or (repair and lost):
            with opened_again(store, found, output.note) as pipeline:
                mended = _mend(ledger, store, found, pipeline, lost, output) if repair else mended
                matches = _reproduce(ledger, store, found, pipeline, sample, output)
        _summarize(
            found,
            check.objects,
            len(lost),
            mended,
            matches,
            output,
            out_words(found.id, ledger.database.path),
        )
    left = len(lost) - mended["same"] - mended["other"]
    return FAILED if left or matches["different"] or matches["failed"] else 0


def _mend(
    ledger: Ledger, store: ObjectStore, job: Job, pipeline: Pipeline, lost: Iterable[Expected], output: Output
) -> Counter[str]:
    from jobs.repair import Mended, Repaired, mend

    said = {
        Mended.SAME: "made again",
        Mended.OTHER: "made again, other bytes",
        Mended.FAILED: "not made again",
    }

    def say(repaired: Repaired) -> None:
        if output.as_json:
            view = {
                "schema": "nightjar.repaired/1",
                "job": job.id,
                "key": repaired.key,
                "example_id": repaired.example_id,
            }
            output.data({**view, "outcome": repaired.outcome.value, "reason": repaired.reason or None})
        else:
            about = [
                said[repaired.outcome],
                repaired.key,
                printable(repaired.example_id),
                printable(repaired.reason),
            ]
            output.line("\t".join(about).rstrip())

    return mend(ledger, store, job, pipeline, lost, say)


def _reproduce(
    ledger: Ledger, store: ObjectStore, job: Job, pipeline: Pipeline, sample: int, output: Output
) -> Counter[str]:
    from jobs.verify import reproduce

    counts: Counter[str] = Counter()
    for item in reproduce(ledger, store, job, pipeline, sample):
        counts[item.match.value] += 1
        finite = item.snr_db is not None and math.isfinite(item.snr_db)
        if output.as_json:
            view = {
                "schema": "nightjar.redrawn/1",
                "job": job.id,
                "index": item.index,
                "example_id": item.example_id,
            }
            snr = item.snr_db if finite else None
            output.data({**view, "likeness": item.match.value, "snr_db": snr, "reason": item.reason or None})
        else:
            about = f"{item.snr_db:.1f} dB" if finite else printable(item.reason)
            output.line(
                f"{item.match.value}\titem {item.index}\t{printable(item.example_id)}\t{about}".rstrip()
            )
    return counts


def _summarize(
    job: Job,
    objects: int,
    faults: int,
    mended: Counter[str],
    matches: Counter[str],
    output: Output,
    where: str,
) -> None:
    """`where`: what advice about the job adds to its id."""
    if output.as_json:
        counts = {name: matches[name] for name in ("same", "close", "different", "failed")}
        repaired = {name: mended[name] for name in ("same", "other", "failed")}
        view = {"schema": "nightjar.verify/1", "job": job.id, "objects": objects, "faults": faults}
        output.data({**view, "repaired": repaired, "redrawn": counts})
        return
    state = f"{faults} missing or changed" if faults else "all unchanged"
    output.note(f"{counted(objects, 'file')} checked, {state}.")
    if mended:
        output.note(
            f"Made again: {mended['same']} with the same bytes, {mended['other']} with other bytes. Not made again: {mended['failed']}."
        )
    elif faults:
        output.note(f"To make them again: nightjar verify {job.id} --repair{where}")
    if matches:
        compared = ", ".join(f"{count} {name}" for name, count in matches.items())
        output.note(f"{counted(matches.total(), 'item')} made again: {compared}.")
