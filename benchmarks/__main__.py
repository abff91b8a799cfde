"""`python -m benchmarks [--postgres URL]`: the figures that need no GPU, as a table and as
`benchmarks/results/cpu.json`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from benchmarks import jobs
from benchmarks.figures import show, write


@click.command()
@click.option("--lines", default=1_000_000, show_default=True, help="Lines of the ingest figures.")
@click.option("--items", default=30_000, show_default=True, help="Items of the whole path.")
@click.option("--sentences", default=4000, show_default=True, help="Sentences of the embedded voice.")
@click.option(
    "--postgres",
    envvar="BENCH_POSTGRES",
    metavar="URL",
    help="A PostgreSQL server, as in postgresql://user@host/postgres; databases `ingest`, `bare` and `ledger` are made there."
    " Without it its figures are left out. `make bench` starts one.",
)
def main(lines: int, items: int, sentences: int, postgres: str | None) -> None:
    """Measures the job system on this machine."""
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        figures = jobs.ingest(folder, lines, postgres)
        figures += jobs.ledger_alone(f"sqlite:///{folder}/alone.sqlite", "SQLite", lines)
        if postgres is not None:
            figures += jobs.ledger_alone(jobs.new_database(postgres, "ledger"), "PostgreSQL", lines)
        figures += [jobs.whole_path(folder, items), jobs.voice_share(folder, sentences)]
    show("Nightjar on this machine", figures)
    write("cpu", figures)


if __name__ == "__main__":
    main()
