"""`python -m benchmarks.exports [--items N]`: how fast each format is written, in how much memory, beside
a bare copy of the audio.

Every export runs in a process of its own. The bare copy reads the same audio files one after the other and
writes them into one file, with the same `fsync` at its end; it is measured anew beside each format, so
that both meet the same load of the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import click

from benchmarks import instant
from benchmarks.figures import Figure, show, write
from benchmarks.jobs import REPOSITORY, peak_mb, run_job, write_lines
from jobs.export import export, find_format, format_names, parse_splits
from jobs.ledger import Ledger
from jobs.store import open_store

SPLITS = "train=0.98,dev=0.01,test=0.01"


def make_job(folder: Path, items: int, seconds: float) -> tuple[str, int]:
    """A finished job whose items all have audio of this length, ledger and store in `folder`; its id and
    bytes of audio."""
    voice = {**instant.install(folder / "voice"), instant.SECONDS: str(seconds)}
    write_lines(folder / "input.jsonl", items)
    status, job = run_job(
        folder / "input.jsonl", folder, "--model", instant.NAME, "--qa", "off", environment=voice
    )
    assert status["items"]["done"] == items
    return job.id, sum(path.stat().st_size for path in (folder / "jobs").rglob("*.wav"))


def bare_copy(folder: Path) -> float:
    """Seconds to copy all audio of the store into one file."""
    paths = sorted((folder / "jobs").rglob("*.wav"))
    start = time.perf_counter()
    with (folder / "copy").open("wb") as out:
        for path in paths:
            out.write(path.read_bytes())
        out.flush()
        os.fsync(out.fileno())
    seconds = time.perf_counter() - start
    (folder / "copy").unlink()
    return seconds


def once(folder: Path, job_id: str, format: str) -> tuple[float, float]:
    """Seconds and peak MB of one export, in a process of its own."""
    to = folder / "to"
    command = [sys.executable, "-m", "benchmarks.exports", "--child", str(folder), job_id, format]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    shutil.rmtree(to) if to.is_dir() else to.unlink()
    result = json.loads(done.stdout)
    return result["seconds"], result["rss_mb"]


def child(folder: Path, job_id: str, format: str) -> None:
    """One export; prints its seconds and its peak memory."""
    start = time.perf_counter()
    splits = None if find_format(format).one_file(None) else parse_splits(SPLITS)
    with closing(Ledger.open(f"sqlite:///{folder}/.nightjar/ledger.sqlite")) as ledger:
        export(ledger, open_store(folder), job_id, format, str(folder / "to"), splits=splits)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "rss_mb": peak_mb()}))


def measure(folder: Path, items: int, seconds: float) -> list[Figure]:
    """The figures of every format; memory also at a tenth of the items, to show that it does not grow with
    them."""
    (folder / "small").mkdir()
    (folder / "large").mkdir()
    small, _ = make_job(folder / "small", max(items // 10, 1), seconds)
    large, audio_bytes = make_job(folder / "large", items, seconds)
    bare_copy(folder / "large")
    figures: list[Figure] = []
    loads: list[float] = []
    for name in format_names():
        if not find_format(name).splittable:
            # It holds what failed, and nothing failed.
            continue
        loads.append(os.getloadavg()[0])
        _, small_mb = once(folder / "small", small, name)
        took, large_mb = once(folder / "large", large, name)
        if find_format(name).embeds_audio:
            limit = audio_bytes / 1e6 / bare_copy(folder / "large")
            figures.append(
                Figure(
                    f"{name}, {items:,} items",
                    audio_bytes / 1e6 / took,
                    "MB/s",
                    "",
                    limit,
                    "bare copy of the audio",
                )
            )
        figures.append(Figure(f"{name}, {items:,} items", items / took, "items/s"))
        figures.append(
            Figure(f"{name}, memory", large_mb, "MB RSS", f"{small_mb:.0f} at a tenth of the items")
        )
    cores = os.cpu_count()
    about = f"{min(loads):.1f} to {max(loads):.1f} on {cores} cores; 1.0 is this benchmark alone"
    figures.append(Figure("load of the machine while measured", sum(loads) / len(loads), "processes", about))
    return figures


@click.command()
@click.option("--items", default=100_000, show_default=True, help="Items of the job.")
@click.option("--seconds", default=0.5, show_default=True, help="Audio of each item.")
@click.option("--child", "of_child", nargs=3, hidden=True, help="Folder, job and format of one export.")
def main(items: int, seconds: float, of_child: tuple[str, str, str] | None) -> None:
    """Measures the exports on this machine."""
    if of_child:
        folder, job_id, name = of_child
        child(Path(folder), job_id, name)
        return
    root = Path(tempfile.mkdtemp(prefix="nightjar-bench-"))
    try:
        figures = measure(root, items, seconds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    show("Exports on this machine", figures)
    write("exports", figures)


if __name__ == "__main__":
    main()
