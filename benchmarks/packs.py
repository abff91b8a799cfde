"""`python -m benchmarks.packs [--items N]`: a job with packs beside the same job without, into a folder
and into an S3 server.

The voice costs nothing, so the figures are those of the path around an engine. Each job is a
`nightjar run` of its own (SQLite, one worker). The S3 server (SeaweedFS) runs on this machine and shares
its cores. Jobs with and without packs take turns, and the median of the rounds counts, so that both meet
the same load of the machine. `verify` reads what was made: a folder's files, a bucket's checksums.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import click

from benchmarks import instant
from benchmarks.figures import Figure, show, write
from benchmarks.jobs import REPOSITORY, run_job, run_seconds, write_lines
from benchmarks.services import running_services
from jobs.settings import S3Settings
from jobs.store import open_store


def run_once(
    folder: Path, source: Path, items: int, environment: Mapping[str, str], *, pack: bool
) -> tuple[float, float, float, int]:
    """(items a second, seconds of verify, seconds of an export, objects with audio) of one job in a new
    home."""
    home = folder / "home"
    options = ["--pack"] if pack else []
    status, job = run_job(
        source, home, "--model", instant.NAME, "--qa", "off", *options, environment=dict(environment)
    )
    if status["items"]["done"] != items:
        raise RuntimeError(f"{status['items']['done']} of {items} items were made.")

    def timed(*words: str) -> float:
        command = [sys.executable, "-m", "jobs", words[0], job.id, "--out", str(home), "-q", *words[1:]]
        start = time.perf_counter()
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environment}, check=True)
        return time.perf_counter() - start

    verify_seconds = timed("verify", "--sample", "0")
    export_seconds = timed("export", "--format", "webdataset", "--to", str(folder / "exported"))
    store = open_store(job.store_url, _s3(environment))
    objects = sum(1 for kind in ("audio", "packs") for _ in store.list(f"jobs/{job.id}/{kind}/"))
    shutil.rmtree(home)
    shutil.rmtree(folder / "exported")
    return items / run_seconds(job), verify_seconds, export_seconds, objects


def _s3(environment: Mapping[str, str]) -> S3Settings:
    names = ("endpoint_url", "access_key_id", "secret_access_key", "region")
    return S3Settings.model_validate({name: environment.get(f"SPEECH_S3__{name.upper()}") for name in names})


def measure(folder: Path, items: int, seconds: float, rounds: int) -> list[Figure]:
    """The figures of both stores."""
    source = folder / "input.jsonl"
    write_lines(source, items)
    voice = {**instant.install(folder / "voice"), instant.SECONDS: str(seconds)}
    figures: list[Figure] = []
    with running_services(folder / "services") as services:
        s3 = {name: value for name, value in services.environment.items() if name.startswith("SPEECH_S3__")}
        for name in ("folder", "S3"):
            made: dict[bool, list[tuple[float, float, float, int]]] = {False: [], True: []}
            for number in range(rounds):
                for pack in (False, True):
                    store = (
                        {**s3, "SPEECH_STORE_URL": f"s3://nightjar/{number}-{pack}"} if name == "S3" else {}
                    )
                    made[pack].append(run_once(folder, source, items, {**voice, **store}, pack=pack))
            loose, packed = (
                tuple(median(column) for column in zip(*made[pack], strict=True)) for pack in (False, True)
            )
            figures += [
                Figure(f"{name}, one object per item", loose[0], "items/s"),
                Figure(f"{name}, packs", packed[0], "items/s", "", loose[0], "one object per item"),
                Figure(f"{name}, verify of one object per item", loose[1], "s"),
                Figure(f"{name}, verify of packs", packed[1], "s"),
                Figure(f"{name}, export of one object per item (webdataset)", loose[2], "s"),
                Figure(f"{name}, export of packs (webdataset)", packed[2], "s"),
                Figure(f"{name}, objects with audio, one per item", loose[3], "objects"),
                Figure(f"{name}, objects with audio, packs", packed[3], "objects"),
            ]
    figures.append(
        Figure("load of the machine at the end", os.getloadavg()[0], "processes", f"{os.cpu_count()} cores")
    )
    return figures


@click.command()
@click.option("--items", default=5000, show_default=True, help="Items of each job.")
@click.option("--seconds", default=2.0, show_default=True, help="Audio of each item.")
@click.option("--rounds", default=3, show_default=True, help="Jobs of each kind.")
def main(items: int, seconds: float, rounds: int) -> None:
    """Measures jobs with packs on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-bench-"))
    # The servers run as another user.
    folder.chmod(0o755)
    try:
        figures = measure(folder, items, seconds, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(f"{items:,} items of {seconds:g} s, with and without packs", figures)
    write("packs", figures)


if __name__ == "__main__":
    main()
