"""`python -m benchmarks [--lines N]`: the figures that need no GPU, as a table and as `benchmarks/results/cpu.json`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from benchmarks import jobs
from benchmarks.figures import show, write
from tests.support.services import Postgres


@click.command()
@click.option("--lines", default=1_000_000, show_default=True, help="Lines of the ingest figures.")
@click.option("--items", default=30_000, show_default=True, help="Items of the whole path.")
@click.option("--sentences", default=4000, show_default=True, help="Sentences of the embedded voice.")
def main(lines: int, items: int, sentences: int) -> None:
    """Measures the job system on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-bench-"))
    folder.chmod(0o755)
    postgres = Postgres(folder / "postgres")
    postgres.start()
    try:
        figures = jobs.ingest(folder, lines, postgres)
    finally:
        postgres.stop()
    figures += jobs.whole_path(folder, items)
    figures += jobs.voice_share(folder, sentences)
    shutil.rmtree(folder, ignore_errors=True)
    show("Nightjar on this machine", figures)
    write("cpu", figures)


if __name__ == "__main__":
    main()
