"""`nightjar decode`."""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

import click
import msgspec

from jobs.cli.options import common_options, files
from jobs.console import NamedPath, Output
from jobs.formatting import counted
from pipelines.audio_format import AUDIO_FORMATS


@click.command()
@click.argument("source", metavar="JOB|EXPORT", shell_complete=files)
@click.option(
    "--to",
    metavar="DIR",
    required=True,
    type=NamedPath(file_okay=False, path_type=Path),
    help="Folder of the audio.",
)
@click.option(
    "--model", metavar="MODEL", help="Model whose codec decodes. [default: the model that made the codes]"
)
@click.option(
    "--audio-format", type=click.Choice(AUDIO_FORMATS), help="Audio format. [default: the job's, or wav]"
)
@click.option(
    "--sample-rate",
    metavar="HZ",
    type=click.IntRange(8000, 48000),
    help="Sample rate. [default: the codec's]",
)
@common_options
def decode(
    source: str,
    to: Path,
    model: str | None,
    audio_format: str | None,
    sample_rate: int | None,
    home: str | None,
    output: Output,
) -> None:
    """Make the audio of a job, or of an export to webdataset or parquet, from its codes.

    The files are those that a job of audio would have stored. Only the decoder of the codec is loaded. To continue
    after a stop, repeat the command; existing files are kept.

    \b
    Examples:
      nightjar decode JOB --to audio
      nightjar decode datasets/night --to audio --audio-format flac
    """
    from jobs import decode as decoding
    from jobs.ledger.records import JobSpec
    from jobs.recent_jobs import reading_ledger, settings_for_job
    from jobs.settings import load_settings
    from jobs.store import store_of
    from pipelines.audio_format import check_rate
    from pipelines.registry import describe, open_decoder

    with ExitStack() as opened:
        if Path(source).is_dir():
            settings, spec = load_settings(home=home), JobSpec("")
            items = decoding.items_of_export(Path(source))
        else:
            settings = settings_for_job(source, home)
            ledger = opened.enter_context(reading_ledger(settings))
            job = ledger.find_job(source)
            spec, items = job.spec, decoding.items_of_job(ledger, store_of(job, settings.s3), job)
        first = next(items, None)
        model = model or spec.model or (first.about["model"] if first else "hibari")
        changes = {"format": audio_format, "sample_rate": sample_rate}
        spec = msgspec.structs.replace(
            spec, **{name: one for name, one in changes.items() if one is not None}
        )
        done = kept = 0
        if first is not None:
            options = settings.engine_options(describe(model))
            decoder = opened.enter_context(closing(open_decoder(model, **options)))
            check_rate(spec.format, spec.sample_rate or decoder.sample_rate)
            done, kept = decoding.decode(chain([first], items), decoder, model, to.absolute(), spec)
    output.result(str(to.absolute()), "nightjar.decode/1", to=str(to.absolute()), items=done, kept=kept)
    output.note(f"{counted(done, 'item')}, {kept} of them kept.")
