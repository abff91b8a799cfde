"""`python -m benchmarks.exports [--items N]`: how fast each format is written, in how much memory, beside a bare copy of the audio.

Every export runs in a process of its own. The bare copy reads the same audio files one after the other and writes them into
one file, with the same `fsync` at its end; it is measured anew beside each format, so that both meet the same load of the machine.
"""

from __future__ import annotations

import hashlib
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
import numpy as np

from benchmarks.figures import Figure, show, write
from benchmarks.jobs import write_lines
from jobs.export import export, parse_splits
from jobs.export.export import FOLDER_FORMATS, LINE_FORMATS
from jobs.ingest import submit
from jobs.layout import audio_key
from jobs.ledger import Ledger
from jobs.ledger.records import Artifact, Done, JobSpec, Outcome, WorkerInfo
from jobs.settings import Settings
from jobs.store import open_store
from pipelines.audio import encode
from tests.support.fakes import sine

REPOSITORY = Path(__file__).parents[1]
SAMPLE_RATE = 24_000
SPLITS = "train=0.98,dev=0.01,test=0.01"


def make_job(folder: Path, items: int, seconds: float) -> tuple[str, int]:
    """A finished job whose items all have other audio of this length; its id and the bytes of its audio."""
    source = folder / "input.jsonl"
    write_lines(source, items)
    store = open_store(folder / "store")
    wave = encode(np.resize(sine("x" * 100, 1), round(seconds * SAMPLE_RATE)), SAMPLE_RATE, "wav")
    samples = (len(wave) - 44) // 2
    with closing(Ledger.open(f"sqlite:///{folder}/ledger.sqlite")) as ledger:
        ledger.migrate()
        job_id = submit(Settings(), ledger, store, str(source), JobSpec("hibari")).job.id
        ledger.register_worker(WorkerInfo("w", "host", 1, "", "", "0", 64))
        while tickets := ledger.take_ready(64):
            for ticket in tickets:
                lease = ledger.claim(ticket, "w", 600)
                if lease is None:
                    raise RuntimeError("The shard was taken by another.")
                outcomes: list[Outcome] = []
                for index, (example_id, _) in lease.open_items.items():
                    data = wave[:-8] + index.to_bytes(8, "little")
                    key = audio_key(job_id, index, example_id, "wav")
                    store.put(key, data)
                    sha256 = hashlib.sha256(data).hexdigest()
                    duration_ms = round(1000 * samples / SAMPLE_RATE)
                    made = Artifact(index, "audio", key, sha256, len(data), duration_ms, SAMPLE_RATE, samples, index)
                    outcomes.append(Done(index, (made,)))
                ledger.commit(lease.ticket, outcomes)
                ledger.finish_shard(lease.ticket)
    return job_id, items * len(wave)


def bare_copy(folder: Path) -> float:
    """Seconds to copy all audio of the store into one file."""
    paths = sorted((folder / "store").rglob("*.wav"))
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
    splits = parse_splits(SPLITS) if format in FOLDER_FORMATS else None
    with closing(Ledger.open(f"sqlite:///{folder}/ledger.sqlite")) as ledger:
        export(ledger, open_store(folder / "store"), job_id, format, str(folder / "to"), splits=splits)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "rss_mb": peak_mb()}))


def peak_mb() -> float:
    """Most memory this process ever held. Unlike `ru_maxrss` it does not begin with the memory of the parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000


def measure(folder: Path, items: int, seconds: float) -> list[Figure]:
    """The figures of every format; memory also at a tenth of the items, to show that it does not grow with them."""
    (folder / "small").mkdir()
    (folder / "large").mkdir()
    small, _ = make_job(folder / "small", max(items // 10, 1), seconds)
    large, audio_bytes = make_job(folder / "large", items, seconds)
    bare_copy(folder / "large")
    figures: list[Figure] = []
    loads: list[float] = []
    for name in (*LINE_FORMATS, *FOLDER_FORMATS):
        loads.append(os.getloadavg()[0])
        _, small_mb = once(folder / "small", small, name)
        took, large_mb = once(folder / "large", large, name)
        if name in FOLDER_FORMATS and FOLDER_FORMATS[name].audio == "inside":
            limit = audio_bytes / 1e6 / bare_copy(folder / "large")
            figures.append(Figure(f"{name}, {items:,} items", audio_bytes / 1e6 / took, "MB/s", "", limit, "bare copy of the audio"))
        figures.append(Figure(f"{name}, {items:,} items", items / took, "items/s"))
        figures.append(Figure(f"{name}, memory", large_mb, "MB RSS", f"{small_mb:.0f} at a tenth of the items"))
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
