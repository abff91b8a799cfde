"""`nightjar decode`."""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

import click

from jobs.cli.options import common_options, files
from jobs.console import NamedPath, Output
from jobs.formatting import counted


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
@common_options
def decode(
    source: str,
    to: Path,
    model: str | None,
    home: str | None,
    output: Output,
) -> None:
    """Make the audio of a job, or of an export to webdataset or parquet, from its codes.

    The files are those that a job of audio would have stored. Only the decoder of the codec is loaded. To continue
    after a stop, repeat the command; existing files are kept. DIR is of one job or export.

    \b
    Examples:
      nightjar decode JOB --to audio
      nightjar decode datasets/night --to audio
    """
    from jobs import decode as decoding
    from jobs.export.files import END
    from jobs.ledger.records import JobSpec
    from jobs.recent_jobs import reading_ledger, settings_for_job
    from jobs.settings import load_settings
    from jobs.store import store_of
    from jobs.store.base import sha256_of
    from pipelines.registry import describe, open_decoder

    with ExitStack() as opened:
        job = None
        if Path(source).is_dir():
            settings, spec = load_settings(home=home), JobSpec("")
            items = decoding.items_of_export(Path(source))
        else:
            settings = settings_for_job(source, home)
            ledger = opened.enter_context(reading_ledger(settings))
            job = ledger.find_job(source)
            spec, items = job.spec, decoding.items_of_job(ledger, store_of(job, settings.s3), job)
        first = next(items, None)
        chosen = model or (first.about["model"] if first else "")
        done = kept = 0
        if first is not None:
            options = settings.engine_options(describe(chosen))
            decoder = opened.enter_context(closing(open_decoder(chosen, **options)))
            # An export made again may have other items.
            identity = sha256_of(Path(source, END).read_bytes()) if job is None else job.id
            done, kept = decoding.decode(
                chain([first], items), decoder, chosen, to.absolute(), spec, identity
            )
    output.result(str(to.absolute()), "nightjar.decode/1", to=str(to.absolute()), items=done, kept=kept)
    output.note(f"{counted(done, 'item')}, {kept} of them kept.")
