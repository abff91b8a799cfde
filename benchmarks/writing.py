"""`python -m benchmarks.writing`: what follows the engine, for one item: checks, encoding, hashing, files;
and puts over S3.

The first table has the processor time of each step, the smallest of five rounds. The second puts the WAV
files of 5 s into an S3 server (SeaweedFS) on this machine, with 0, 1, 2 and 4 writer processes: the server
shares the cores, so on a small machine the objects per second are its limit, and the processor time of the
worker is the figure.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure, show, write
from benchmarks.services import running_services
from jobs.checks import PRESETS, Quality
from jobs.settings import S3Settings
from jobs.store import FolderStore
from jobs.store.base import ObjectStore
from pipelines.audio import encode
from pipelines.request import Generation, Speech
from worker.quality.verdict import check_draw
from worker.writer_processes import WriterProcesses

ROUNDS, CALLS = 5, 60
#: As many as a worker has for S3.
THREADS = 64
METADATA = {"seed": "1234567890", "spec_sha": "0" * 16}
_TEXT = "The birch canoe slid on the smooth planks."


def voiced(seconds: float, sample_rate: int) -> NDArray[np.float32]:
    """A tone with pauses and a little noise, which passes the cheap checks; float32 [samples]."""
    at = np.arange(round(seconds * sample_rate)) / sample_rate
    tone = 0.3 * (np.sin(2 * np.pi * 3 * at) > -0.3) * np.sin(2 * np.pi * 207 * at)
    return (tone + 0.01 * np.random.default_rng(0).standard_normal(len(at))).astype(np.float32)


def steps(folder: Path, seconds: float, sample_rate: int) -> list[Figure]:
    """Microseconds of processor time of each step for one item."""
    samples = voiced(seconds, sample_rate)
    speech, wav = Speech(samples, sample_rate, _TEXT), encode(samples, sample_rate, "wav")
    quality, store, numbers = PRESETS["basic"], FolderStore(folder), iter(range(1 << 30))
    assert isinstance(quality, Quality)

    def put() -> object:
        return store.put(
            f"{seconds:g}/{next(numbers):09d}.wav", wav, content_type="audio/wav", metadata=METADATA
        )

    calls: dict[str, Callable[[], object]] = {
        "checks of --qa basic": lambda: check_draw(0, 1, speech, quality, _TEXT, Generation()),
        "WAV": lambda: encode(samples, sample_rate, "wav"),
        "FLAC": lambda: encode(samples, sample_rate, "flac"),
        "SHA-256 of the WAV": lambda: hashlib.sha256(wav).hexdigest(),
        "put into a folder (with the hash)": put,
    }
    return [
        Figure(f"{name}, {seconds:g} s at {sample_rate} Hz", _micros(call), "us")
        for name, call in calls.items()
    ]


def _micros(call: Callable[[], object]) -> float:
    found: list[float] = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        found.append(1e6 * (time.process_time() - start) / CALLS)
    return min(found)


def puts(url: str, settings: S3Settings, processes: int, objects: int) -> list[Figure]:
    """Objects a second, and processor time for one object in the worker and in its writer processes."""
    data = encode(voiced(5.0, 24_000), 24_000, "wav")
    pool = WriterProcesses(processes, settings, crowded=0)
    try:
        store, first = pool.open(url), 0
        while first == 0 or len(pool.pids) < processes:
            _put_all(store, data, range(first, first + 2 * THREADS))
            first += 2 * THREADS
        theirs, mine, start = _seconds_of(pool.pids), time.process_time(), time.perf_counter()
        _put_all(store, data, range(first, first + objects))
        seconds, mine, theirs = (
            time.perf_counter() - start,
            time.process_time() - mine,
            _seconds_of(pool.pids) - theirs,
        )
    finally:
        pool.close()
    name = f"S3, {processes} writer processes"
    return [
        Figure(name, objects / seconds, "objects/s"),
        Figure(f"{name}: worker", 1e6 * mine / objects, "us an object"),
        Figure(f"{name}: processes", 1e6 * theirs / objects, "us an object"),
    ]


def _put_all(store: ObjectStore, data: bytes, numbers: range) -> None:
    left, lock = iter(numbers), threading.Lock()

    def put() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            store.put(f"audio/{number:09d}.wav", data, content_type="audio/wav", metadata=METADATA)

    threads = [threading.Thread(target=put) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _seconds_of(pids: list[int]) -> float:
    """Processor seconds of other processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


@click.command()
@click.option(
    "--objects", default=2000, show_default=True, help="Objects of each row of S3; 0 leaves S3 out."
)
def main(objects: int) -> None:
    """Measures on this machine what a worker does for an item after the engine."""
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        figures = steps(folder / "store", 0.12, 16_000) + steps(folder / "store", 5.0, 24_000)
        if objects:
            with running_services(folder / "services") as services:
                names = ("endpoint_url", "access_key_id", "secret_access_key", "region")
                settings = S3Settings.model_validate(
                    {one: services.environment[f"SPEECH_S3__{one.upper()}"] for one in names}
                )
                bucket = services.s3().list_buckets()["Buckets"][0]["Name"]
                for processes in (0, 1, 2, 4):
                    figures += puts(f"s3://{bucket}/{processes}", settings, processes, objects)
    show("After the engine, for one item", figures)
    write("writing", figures)


if __name__ == "__main__":
    main()
