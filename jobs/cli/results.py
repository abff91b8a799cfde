"""The commands about results: `nightjar export`, `decode`, `augment`, `report` and `verify`."""

from __future__ import annotations

import math
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jobs.cli.options import (
    LateHelp,
    common_options,
    files,
    of_job,
    of_jobs,
    output_options,
    parsed_by,
    price_option,
    where_option,
    worker_command,
)
from jobs.console import FAILED, LOCAL_PATH, NamedPath, Output, flag, option
from jobs.formatting import bytes_text, counted, printable
from jobs.job_options import user_name
from jobs.ledger.records import Decision
from jobs.recent_jobs import FoundJob, chosen_jobs, out_option
from jobs.settings import load_settings
from pipelines.audio_format import AUDIO_FORMATS
from pipelines.errors import NightjarError

if TYPE_CHECKING:
    from jobs.repair import Repaired
    from jobs.verify import Expected
    from jobs.where import Where


def _formats() -> str:
    from jobs.export.formats import describe_formats

    return describe_formats()


@click.command()
@click.option("--format", "format_", default="espnet", metavar="FORMAT", cls=LateHelp, about=_formats)
@option(
    "--to",
    "PATH",
    "File, folder or s3://BUCKET/PREFIX; `-` is standard output.",
    default="-",
    type=NamedPath(anywhere=True),
)
@option(
    "--split",
    "SHARES",
    "Splits with their shares, for example train=0.98,dev=0.01,test=0.01. The hash of an example's id decides its split.",
    name="splits",
    callback=parsed_by("jobs.export", "parse_splits"),
)
@option(
    "--audio-root", "DIR", "Copy the audio to this folder and write the paths of the copies.", type=LOCAL_PATH
)
@click.option(
    "--audio-format",
    type=click.Choice(AUDIO_FORMATS),
    help="Convert the audio that the export contains or copies (--audio-root). [default: as stored]",
)
@option(
    "--sample-rate", "HZ", "Resample the audio that the export contains or copies; 8000 to 48000.", type=int
)
@click.option(
    "--dialogues",
    type=click.Choice(("mono", "stereo")),
    help="Write one sound for each dialogue: mixed, or with the user left and the assistant right.",
)
@option(
    "--gaps",
    "SECONDS",
    "Pauses between the turns of a dialogue, drawn by seed; negative ones are overlaps: normal(MEAN,DEVIATION), uniform(LOW,HIGH) or a number. [default: normal(0.2,0.3)]",
)
@option(
    "--interleave",
    "RATIO",
    "Text tokens and frames of a span of the format interleaved such as 13:26, or `words`. [default: 13:26]",
)
@option(
    "--tokenizer",
    "NAME",
    "Tokenizer of the format interleaved: a tokenizer.json, its folder or a name on the hub. [default: the model's]",
)
@where_option
@flag(
    "--unique",
    "Leave out duplicates: items with the text and the voice of an earlier item, or equal dialogues.",
)
@option("--license", "NAME", "License in the dataset card, such as apache-2.0.")
@flag("--absolute", "Write absolute instead of relative paths of the audio.")
@option(
    "--part-mb",
    "N",
    "Maximum MB of audio per file (shar, webdataset, parquet) or subfolder (audiofolder). [default: 500]",
    type=click.IntRange(min=1),
)
@option(
    "--push",
    "ORG/NAME",
    "Push the parquet export to this dataset of the Hugging Face hub, with the token in HF_TOKEN or the stored one.",
)
@flag("--private", "If --push creates the dataset, make it private.")
@of_jobs
def export(
    found: Sequence[FoundJob],
    output: Output,
    format_: str,
    to: str,
    where: Where | None,
    push: str | None,
    private: bool,
    **options: Any,
) -> None:
    """Export the items of JOB that have audio, in input order. Several jobs make one dataset, in the order in
    which they were submitted.

    A file appears when it is complete, never in part. To continue an interrupted export to a folder, repeat
    the command. If JOB is still running, only the items that are done are exported. Repeat the command later
    to replace this export.

    \b
    Examples:
      nightjar export JOB --to dataset.jsonl
      nightjar export JOB --where 'wer < 0.1 and distillmos > 3.5' --to clean.jsonl
      nightjar export JOB --format webdataset --to datasets/night --split train=0.98,dev=0.01,test=0.01
      nightjar export --schedule news --since 2026-11-01 --format parquet --to datasets/november --unique
    """
    from jobs.export import export_jobs, hub, parsed_options

    filtered = None if where is None else str(where)
    settings = found[0].settings
    ids = [one.id for one in found]
    # With `--to -` the data goes to stdout, so the summary must not.
    output = Output(as_json=output.as_json and (to != "-" or push is not None), quiet=output.quiet)
    if push is not None:
        if to == "-":
            if len(ids) > 1:
                raise click.UsageError("With several jobs, --push needs a folder for the dataset: --to DIR.")
            to = str(settings.export_folder(ids[0], format_, filtered))
            options["replaces"] = ids
        hub.check_push(format_, to, push)
    report = export_jobs(
        [one.stored for one in found],
        format_,
        to,
        s3=settings.s3,
        where=where,
        on_part=lambda part: output.note(
            f"{part.split} {part.number + 1} of {part.of}: {counted(part.items, 'item')}"
        ),
        **parsed_options(options, "replaces"),
    )
    pushed = {} if push is None else {"pushed": hub.push(Path(report.to), push, private=private or None)}
    reasons = report.reasons
    if output.as_json:
        jobs = {"job": ids[0]} if len(ids) == 1 else {"jobs": ids}
        view = {"schema": "nightjar.export/1", **jobs, "format": report.format, "to": report.to}
        view |= {**pushed, "items": report.items, "left_out": reasons.items, "where": filtered}
        output.data(view | {"duplicates": report.duplicates} | msgspec.to_builtins(reasons))
        return
    place = "" if to == "-" else f" to {report.to}"
    left_out = f" Left out: {reasons}." if reasons.items else ""
    output.note(f"{counted(report.items, 'item')} written{place}.{left_out}")
    if report.duplicates and not reasons.duplicates:
        output.note(f"{counted(report.duplicates, 'duplicate')} kept; --unique leaves them out.")
    if reasons.running:
        jobs = "The job is" if len(ids) == 1 else "A job is"
        output.note(
            f"{jobs} still running: {counted(reasons.pending, 'item')} pending. Export again later to replace this export."
        )
    if pushed:
        click.echo(pushed["pushed"])


@click.command()
@click.argument("source", metavar="JOB|EXPORT", shell_complete=files)
@option("--to", "DIR", "Folder of the audio.", required=True, type=NamedPath(file_okay=False, path_type=Path))
@option("--model", "MODEL", "Model whose codec decodes. [default: the model that made the codes]")
@common_options
def decode(source: str, to: Path, model: str | None, home: str | None, output: Output) -> None:
    """Make the audio of a job, or of an export to webdataset or parquet, from its codes.

    The files are those that a job of audio would have stored. Only the decoder of the codec is loaded. To continue
    after a stop, repeat the command; existing files are kept. DIR is of one job or export.

    \b
    Examples:
      nightjar decode JOB --to audio
      nightjar decode datasets/night --to audio
    """
    from jobs.decode import decode_source

    folder = to.absolute()
    if Path(source).is_dir():
        done, kept = decode_source(load_settings(home=home), Path(source), folder, model)
    else:
        with chosen_jobs([source], home) as (found,):
            done, kept = decode_source(found.settings, found.stored, folder, model)
    output.result(str(folder), "nightjar.decode/1", to=str(folder), items=done, kept=kept)
    output.note(f"{counted(done, 'item')}, {kept} of them kept.")


@click.command()
@click.argument("source", metavar="EXPORT", type=NamedPath(path_type=Path, exists=True))
@option("--to", "PATH", "New folder or s3://BUCKET/PREFIX.", required=True, type=NamedPath(anywhere=True))
@option("--speed", "RANGE", "Factor of the speed, for example 0.9..1.1.")
@option("--room", "DIR", "Folder of impulse responses.", type=LOCAL_PATH)
@option("--noise", "DIR", "Folder of recordings of noise.", type=LOCAL_PATH)
@option("--snr", "RANGE", "Speech to noise, in dB.", default="5..20")
@option("--band", "RANGE", "Frequencies that are left, in Hz, for example 300..3400.")
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    type=click.Choice(("mp3", "opus", "mulaw")),
    help="A codec; of several, one is drawn. mulaw is that of telephones, at 8 kHz.",
)
@option("--seed", "N", "Seed of everything that is drawn.", default=0, type=int)
@output_options
def augment(source: Path, to: str, output: Output, **given: Any) -> None:
    """Write a second dataset from EXPORT, with the same speech at another speed, in rooms, with noise, in a
    narrower band or after a codec.

    EXPORT is a folder of the formats webdataset or audiofolder. It stays as it is. The same seed gives the same
    bytes. To continue an interrupted command, repeat it.

    \b
    Examples:
      nightjar augment datasets/night --to datasets/night-phone --band 300..3400 --codec mulaw
      nightjar augment datasets/night --to datasets/night-noisy --noise noises --snr 5..20 --room rooms
    """
    from jobs.export.augment import augment as write

    write(source, to, s3=load_settings().s3, **given)
    output.result(to, "nightjar.augment/1", to=to)


@click.command()
@option(
    "--to",
    "FILE",
    "HTML file to write. [default: DIR/reports/JOB.html]",
    type=NamedPath(dir_okay=False, path_type=Path),
)
@option("--items", "N", "Number of items in the table.", default=60, type=click.IntRange(0, 500))
@flag("--embed", "Embed short audio clips in the file, instead of links to the store.")
@flag("--serve", "Serve the report on this machine until Ctrl-C; its reader can accept and refuse items.")
@price_option
@of_job
def report(
    found: FoundJob,
    output: Output,
    to: Path | None,
    items: int,
    embed: bool,
    serve: bool,
    price: float | None,
) -> None:
    """Write an HTML report of JOB: charts over time, errors, and the worst items with audio players.

    The file opens in a browser without a server. With --serve, the address of the page has a random key: who has it can
    decide.

    \b
    Examples:
      nightjar report JOB
      nightjar report JOB --to night.html --price 2.80
      nightjar report JOB --serve
    """
    from jobs.report import default_place, write_report

    # A killed server may have left an old one.
    with suppress(NightjarError):
        found.renew_manifest()
    price = found.settings.price_per_gpu_hour if price is None else price
    if serve and (to or embed):
        raise click.UsageError("--serve writes no file, so it takes neither --to nor --embed.")
    if serve:
        from jobs.report.server import ReportServer

        # The last manifest is written after this signal too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with (
            ReportServer(found, items=items, price_per_gpu_hour=price) as server,
            suppress(KeyboardInterrupt),
        ):
            url = f"{server.origin}/{server.key}/"
            output.result(url, "nightjar.report_server/1", job=found.id, url=url)
            sys.stdout.flush()
            server.serve_forever()
        found.renew_manifest()
        return
    # Absolute, so that `-` is a file's name.
    place = to.absolute() if to else default_place(found.settings, found.id)
    store = found.store
    written = write_report(
        found.ledger, store, found.id, place, items=items, embed=embed, price_per_gpu_hour=price
    )
    output.result(
        written.path,
        "nightjar.report/1",
        job=found.id,
        to=written.path,
        bytes=written.bytes,
        items=written.shown,
        measured=written.measured,
    )
    output.note(
        f"{counted(written.shown, 'item')} shown, {written.measured} measured, {bytes_text(written.bytes)}."
    )


check = worker_command("check", "check")


ids_argument = click.argument("ids", metavar="ITEM...", nargs=-1, required=True)


@click.command()
@of_job
@ids_argument
def accept(found: FoundJob, output: Output, ids: Sequence[str]) -> None:
    """Accept items of JOB by their ids (`-` reads ids from standard input, one a line).

    The best audio of an item that failed its checks becomes its audio: the item is done, and exports have it. This also
    takes back a refusal. Nothing is changed if one of the ids is unknown or has no audio.

    \b
    Examples:
      nightjar accept JOB dialogue-7 dialogue-9:turn1
      nightjar accept JOB - < ids.txt
    """
    _decide(found, output, ids, Decision(True, user_name()))


@click.command()
@option("--reason", "REASON", "Why, for the ledger and for the cards of datasets.", default="")
@of_job
@ids_argument
def refuse(found: FoundJob, output: Output, ids: Sequence[str], reason: str) -> None:
    """Refuse items of JOB by their ids (`-` reads ids from standard input, one a line).

    Exports leave refused items out and count them with the reason. This also takes back an acceptance. The decision is
    about the present audio: it is void if the item gets another one (`nightjar retry`).

    \b
    Examples:
      nightjar refuse JOB dialogue-7 --reason "a word is missing"
      nightjar refuse JOB - --reason noise < ids.txt
    """
    _decide(found, output, ids, Decision(False, user_name(), reason))


def _decide(found: FoundJob, output: Output, ids: Sequence[str], decision: Decision) -> None:
    listed = sys.stdin.buffer.read().decode(errors="replace").split("\n") if "-" in ids else ()
    chosen = [*(one for one in ids if one != "-"), *filter(None, (one.removesuffix("\r") for one in listed))]
    count = found.ledger.decide(found.id, chosen, decision)
    text = printable(f"{counted(count, 'item')} of {found.id} {decision}.")
    output.result(text, "nightjar.decision/1", job=found.id, accepted=decision.accepted, items=count)
    found.renew_manifest()


@click.command()
@option("--sample", "N", "Number of items to synthesize again.", default=3, type=click.IntRange(min=0))
@flag("--deep", "Read every object of a bucket, instead of trusting the server's checksums.")
@flag("--repair", "Synthesize missing and changed files again, with the same seeds.")
@of_job
def verify(found: FoundJob, output: Output, sample: int, deep: bool, repair: bool) -> int:
    """Check the files of JOB against the ledger, and synthesize some items again to compare them.

    Exit code 1: a file is missing or changed and was not restored, or an item that was synthesized again
    differs or failed.

    \b
    Examples:
      nightjar verify JOB
      nightjar verify JOB --repair
    """
    from jobs.provenance import reopened_model
    from jobs.repair import repair_objects, reproduce
    from jobs.verify import ObjectCheck

    ledger = found.ledger
    store = found.store
    job = found.job
    check = ObjectCheck(ledger, store, job, deep=deep)
    lost: list[Expected] = []
    for expected, fault in check:
        lost.append(expected)
        output.row(
            (fault, expected.key, expected.example_id),
            "nightjar.fault/1",
            job=job.id,
            key=expected.key,
            example_id=expected.example_id,
            fault=fault,
        )
    repairs = Counter[str]()
    matches = Counter[str]()

    def print_repaired(one: Repaired) -> None:
        words = {"same": "restored", "other": "restored, other bytes", "failed": "not restored"}
        output.row(
            (words[one.outcome], one.key, one.example_id, one.reason),
            "nightjar.repaired/1",
            job=job.id,
            key=one.key,
            example_id=one.example_id,
            outcome=one.outcome,
            reason=one.reason or None,
        )

    if sample or (repair and lost):
        with reopened_model(store, job, output.note) as pipeline:
            if repair:
                repairs = repair_objects(ledger, store, job, pipeline, lost, print_repaired)
            for item in reproduce(ledger, store, job, pipeline, sample):
                matches[item.match] += 1
                snr = item.snr_db if item.snr_db is not None and math.isfinite(item.snr_db) else None
                detail = item.reason if snr is None else f"{snr:.1f} dB"
                output.row(
                    (item.match, f"item {item.index}", item.example_id, detail),
                    "nightjar.redrawn/1",
                    job=job.id,
                    index=item.index,
                    example_id=item.example_id,
                    likeness=item.match,
                    snr_db=snr,
                    reason=item.reason or None,
                )
    if output.as_json:
        view = {"schema": "nightjar.verify/1", "job": job.id, "objects": check.objects, "faults": len(lost)}
        counts = {name: matches[name] for name in ("same", "close", "different", "failed")}
        repaired = {name: repairs[name] for name in ("same", "other", "failed")}
        output.data({**view, "repaired": repaired, "redrawn": counts})
    else:
        state = f"{len(lost)} missing or changed" if lost else "all unchanged"
        output.note(f"{counted(check.objects, 'file')} checked, {state}.")
        if repairs:
            output.note(
                f"Restored: {repairs['same']} with the same bytes, {repairs['other']} with other bytes. Not restored: {repairs['failed']}."
            )
        elif lost:
            where = out_option(job.id, ledger.path)
            output.note(f"To restore them: nightjar verify {job.id} --repair{where}")
        if matches:
            compared = ", ".join(f"{count} {name}" for name, count in matches.items())
            output.note(f"{counted(matches.total(), 'item')} synthesized again: {compared}.")
    left = len(lost) - repairs["same"] - repairs["other"]
    return FAILED if left or matches["different"] or matches["failed"] else 0
