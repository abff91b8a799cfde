"""A job as a user types it, beside the engine alone: Qwen3-TTS at full size with random weights,
utterances of 3 to 15 seconds.

    python -m benchmarks.job_gpu --sizes 0b6 1b7 --paths folder s3 --gpus 1 2
    python -m benchmarks.job_gpu --tree ../nightjar-before --sizes 0b6          # another version of the packages
    python -m benchmarks.job_gpu --sizes 0b6 --paths folder s3 --gpus 1 8 --faults --engine-last --minutes 9
    python -m benchmarks.job_gpu --device cpu --tiny --paths folder s3
    python -m benchmarks.job_gpu --device cpu --instant 9 --paths folder s3 --gpus 1 8 --items 3000

Rows of the path "engine" are `benchmarks.qwen3_tts`, the closed loop, one process for each GPU. Those of
"folder" are `nightjar run` with no setting, those of "s3" `nightjar submit` and `nightjar worker` with
PostgreSQL, Valkey and SeaweedFS on this machine. The jobs read a checkpoint from disk; their texts say how
long each utterance is (`benchmarks.planted`), and their lengths are drawn as the engine's are.

`job_audio_s_per_s` is steady: the audio that was committed between two commits, the first after which
twice as many items were done as the engine has slots, and the last before which one and a half times as
many were left, by the ledger's own times; over the time between them. `first_audio_s` is the time from the
start of the command to the first audio file in the store. Cores, memory, threads, bytes a second and
`saturation` are of the same span: how much of what each part of the host can do was in use, and `verdict`
says which part is full.

`--faults` adds a job with services on the largest number of GPUs, in which an engine's process is killed
and a GPU is gone (`benchmarks.job_faults`). `--instant` runs jobs with a voice that costs nothing, for the
path around the engine. With `--minutes`, what no longer fits is left out, and a job that does not end in
time is interrupted; its row has what was committed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import instant, job_faults, planted
from benchmarks.gpu import Bench, Row, parser
from benchmarks.host_use import disk_mb_per_s
from benchmarks.job_paths import Finished, Ran, run_into_folder, run_with_services
from benchmarks.job_rows import (
    Commit,
    compare_with_engine,
    compare_with_one_gpu,
    ended,
    slots_of,
    steady,
    table,
    used,
)
from benchmarks.qwen3_load import FRAMES_PER_SECOND, Load
from benchmarks.saturation import shares, verdict
from benchmarks.sentences import sentences

REPOSITORY = Path(__file__).resolve().parents[1]
#: Characters of text for a second of speech.
CHARACTERS_PER_SECOND = 15.0
SENTENCES = sentences(200)
#: Where caches of kernels are kept; new folders make a start cold.
CACHES = (
    "TRITON_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)


#: A folder that no disk holds up.
MEMORY = Path("/dev/shm")
#: Seconds that a part should have left at least to be begun: opening a model, and what comes after a job.
LEAST_SECONDS = 25.0
#: The rate of an engine in reproducible mode, by the usual one.
REPRODUCIBLE_RATE = 0.75


def lengths(load: Load, count: int, seed: int = 0) -> list[int]:
    """Frames of each utterance, drawn as `benchmarks.qwen3_load.requests` draws them."""
    draw = np.random.default_rng(seed)
    return [
        max(round(float(draw.uniform(load.shortest, load.longest)) * FRAMES_PER_SECOND), 3)
        for _ in range(count)
    ]


def text_of(frames: int, number: int) -> str:
    """A text about as long as its speech, whose first word is the number of frames."""
    words: list[str] = [str(frames)]
    room = round(frames / FRAMES_PER_SECOND * CHARACTERS_PER_SECOND)
    while len(" ".join(words)) < room:
        words += SENTENCES[number % len(SENTENCES)].split()
        number += 1
    return " ".join(words)[: max(room, len(words[0]) + 4)].rstrip()


def write_input(path: Path, frames: Sequence[int]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number, count in enumerate(frames):
            messages = [["user", "text", text_of(count, number)], ["assistant", "audio", f"wav/{number}.wav"]]
            file.write(json.dumps({"example_id": f"utterance-{number:07d}", "messages": messages}) + "\n")


class JobBench:
    """One machine, one version of the packages, and the rows that they give."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.tree: Path = options.tree.resolve()
        self.load = Load(0.3, 0.8, 0.5) if options.tiny else Load(3.0, 15.0, options.window_seconds)
        if options.instant:
            self.load = Load(options.instant, options.instant, 1.0)
        self.slots = 8 if options.tiny or options.instant else options.slots
        self.ends_at = time.monotonic() + 60 * options.minutes
        facts = {
            "tree": options.tree.name if options.tree != REPOSITORY else "",
            "cores": os.cpu_count(),
            "load_s": [self.load.shortest, self.load.longest],
        }
        self.bench = Bench("job_h200", options, **facts)
        self.disk = disk_mb_per_s(folder, 4096 if self.bench.on_gpu else 64)
        self.bench.keep(disk_alone_mb_per_s=self.disk, left_out=[])
        self.voices = folder / "voices"
        self.engine_rates: dict[tuple[str, int], float] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that has the packages of the tree and the voices."""
        path = [str(self.voices), str(self.tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        sound = {instant.SECONDS: str(self.options.instant)} if self.options.instant else {}
        return {**os.environ, **sound, "PYTHONPATH": os.pathsep.join(path)}

    @property
    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()

    def attempt(self, part: str, work: Callable[[], object]) -> None:
        """Does a part, if there is time for it."""
        if self.seconds_left < LEAST_SECONDS:
            self.bench.found["left_out"].append(part)
            self.bench.write()
            return
        self.bench.attempt(part, work)

    def prepare(self, size: str) -> None:
        """Writes the checkpoint of a size, and the voices that open it, in a process that leaves no memory
        of the device taken."""
        if self.options.instant:
            instant.install(self.voices)
            return
        texts, checkpoint = self.folder / "texts", self.folder / size
        texts.write_text(
            "\n".join(text_of(frames, number) for number, frames in enumerate(lengths(self.load, 400))),
            encoding="utf-8",
        )
        command = [
            sys.executable,
            "-m",
            "benchmarks.random_checkpoint",
            size,
            str(checkpoint),
            "--texts",
            str(texts),
        ]
        began = time.perf_counter()
        subprocess.run([*command, "--device", self.options.device], cwd=REPOSITORY, check=True)
        device = "" if self.bench.on_gpu else "cpu"
        planted.install(self.voices, f"planted-{size}", checkpoint, device=device)
        planted.install(self.voices, f"planted-{size}-speech", checkpoint, audio=True, device=device)
        gigabytes = sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors")) / 1e9
        self.bench.keep(**{f"checkpoint_{size}": {"written_s": time.perf_counter() - began, "gb": gigabytes}})

    def engine(self, size: str, gpus: int) -> None:
        """The row of the engine alone: one closed loop for each GPU, all at once."""
        command = [
            sys.executable,
            "-m",
            "benchmarks.qwen3_tts",
            "--device",
            self.options.device,
            "--slots",
            str(self.slots),
            "--parts",
            "all",
        ]
        command += (
            ["--tiny"]
            if self.options.tiny
            else ["--sizes", size, "--seconds", str(self.load.seconds), "--windows", "3"]
        )
        found: list[Path] = []
        running: list[subprocess.Popen[bytes]] = []
        for gpu in range(gpus):
            found.append(self.folder / f"engine-{size}-{gpus}-{gpu}.json")
            chosen = {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.bench.on_gpu else {}
            words = [*command, "--json", str(found[-1])]
            running.append(
                subprocess.Popen(
                    words, cwd=self.tree, env=self.environment | chosen, stdout=subprocess.DEVNULL
                )
            )
        try:
            failed = [process.wait(max(self.seconds_left, 1.0)) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(failed):
            raise RuntimeError(f"The engine alone ended with status {failed}.")
        rows = [json.loads(path.read_text(encoding="utf-8"))["rows"][-1] for path in found]
        rate = sum(row["audio_s_per_s"] for row in rows)
        self.engine_rates[size, gpus] = rate
        kept = ("wrong_lengths", "spread", "process_cpu_share", "gpu_busy_nvml", "open_s")
        row: Row = {
            "path": "engine",
            "size": size,
            "gpus": gpus,
            "slots": self.slots,
            "engine_audio_s_per_s": rate,
        }
        self._add(row | {name: rows[0].get(name) for name in kept})

    def job(self, path: str, size: str, gpus: int, qa: str = "off", cold: bool = False) -> None:
        """The row of one job."""
        seconds = self.options.cold_seconds if cold else self.options.seconds
        frames = self._lengths(size, gpus, seconds, cold=cold)
        asked = self._asked(path, size, gpus, qa, frames)
        if cold:
            caches = {name: str(asked.folder / "cache" / name) for name in CACHES}
            asked = replace(asked, environment=asked.environment | caches, profile_seconds=0.0)
        try:
            finished = self._with_services(asked) if path == "s3" else run_into_folder(asked)
            self._add(self._row(path, size, gpus, qa, cold, frames, finished))
        finally:
            shutil.rmtree(asked.folder, ignore_errors=True)

    def faults(self, size: str, gpus: int) -> None:
        """The row of a job whose workers meet faults."""
        from benchmarks.services import audio_keys, read_object, running_services

        if gpus < 2:
            raise ValueError("A job with faults needs two GPUs: one of them is gone after a while.")
        frames = self._lengths(size, gpus, self.options.fault_seconds * REPRODUCIBLE_RATE)
        asked = self._asked("faults", size, gpus, "off", frames)
        environment = asked.environment | job_faults.REPRODUCIBLE
        asked = replace(
            asked, environment=environment, profile_seconds=0.0, worker_options=("--model", asked.model)
        )
        awaited = job_faults.NOTICED if self.options.fault_noticed else job_faults.QUARANTINED
        faults = job_faults.Faults(
            self.voices, len(frames), killed=str(gpus - 2), hidden=str(gpus - 1), awaited=awaited
        )
        other = replace(
            asked,
            folder=asked.folder.with_name(f"{asked.folder.name}-disturbed"),
            look=faults.look,
            until=faults.over,
        )
        other.folder.mkdir()
        try:
            with running_services(asked.folder / "services") as services:
                # On a CPU the bytes do not depend on the number of workers, and each takes seconds to start.
                undisturbed = run_with_services(
                    asked if self.bench.on_gpu else replace(asked, gpus=1), services
                )
                disturbed = run_with_services(replace(other, most_seconds=self._limit), services)
                row: Row = {"path": "faults", "size": size, "gpus": gpus, "slots": slots_of(disturbed.said)}
                row |= {
                    "command_s": disturbed.seconds,
                    "undisturbed_s": undisturbed.seconds,
                    "status": disturbed.status,
                }
                row |= job_faults.found_of(undisturbed.made, disturbed.made, len(frames), faults)
                parts = services.job_parts(other.name)
                keys = set(audio_keys(services, parts))
                row |= job_faults.checked(
                    disturbed.made.objects, keys, lambda key: read_object(services, parts, key)
                )
        finally:
            planted.show_all(self.voices)
            for folder in (asked.folder, other.folder):
                shutil.rmtree(folder, ignore_errors=True)
        self._add(row | {"nothing_lost": job_faults.nothing_lost(row)})

    @property
    def _limit(self) -> float:
        """Seconds that a command may take; what comes after it takes some too."""
        return max(1.0, min(self.options.limit, self.seconds_left - LEAST_SECONDS / 2))

    def _lengths(self, size: str, gpus: int, seconds: float, cold: bool = False) -> list[int]:
        """Frames of each item of a job that takes the engine so long."""
        if self.options.items:
            return lengths(self.load, self.options.items)
        rate = self.engine_rates.get((size, gpus)) or self.options.expected * gpus
        mean = (self.load.shortest + self.load.longest) / 2
        return lengths(self.load, round(seconds * rate / mean) + (0 if cold else 3 * self.slots * gpus))

    def _asked(self, path: str, size: str, gpus: int, qa: str, frames: Sequence[int]) -> Ran:
        source = self.folder / "input.jsonl"
        write_input(source, frames)
        work = Path(tempfile.mkdtemp(prefix=f"{path}-", dir=MEMORY if path == "memory" else self.folder))
        model = (
            instant.NAME if self.options.instant else f"planted-{size}" + ("-speech" if qa != "off" else "")
        )
        settle = 1.0 if self.options.tiny else 12.0
        ran = Ran(
            source,
            work,
            model,
            qa,
            gpus,
            self.environment,
            self._limit,
            self.bench.on_gpu,
            self.options.profile,
            settle,
        )
        return replace(ran, speaks=not self.options.instant)

    def _with_services(self, ran: Ran) -> Finished:
        from benchmarks.services import running_services

        with running_services(ran.folder / "services") as services:
            return run_with_services(ran, services)

    def _row(
        self, path: str, size: str, gpus: int, qa: str, cold: bool, frames: Sequence[int], finished: Finished
    ) -> Row:
        row: Row = {
            "path": path,
            "size": size,
            "gpus": gpus,
            "slots": slots_of(finished.said),
            "qa": qa,
            "start": "cold" if cold else "warm",
        }
        if qa != "off":
            row["audio"] = "planted: a speech-like signal in the place of the noise, as long"
        row |= ended(frames, finished)
        found = {} if cold else steady([Commit(*one) for one in finished.made.commits], self.slots * gpus)
        if found:
            row |= {"job_audio_s_per_s": found["audio_s_per_s"], "items_per_s": found["items_per_s"]}
            row |= {"objects_per_s": found["items_per_s"], "steady_s": found["until"] - found["since"]}
            row |= used(finished, found["since"], found["until"], gpus)
            row["saturation"] = shares(row, os.cpu_count() or 1, self.disk)
            row["verdict"] = verdict(row["saturation"])
        if finished.profiles:
            row["profiles"] = {"of": finished.profiles}
        return row | {"worker_said": finished.said}

    def _add(self, row: Row) -> None:
        rows = [*self.bench.rows, row]
        compare_with_one_gpu(rows)
        compare_with_engine(rows)
        self.bench.add(row)

    def measure(self) -> int:
        options = self.options
        sizes = ["instant"] if options.instant else ["tiny"] if options.tiny else options.sizes
        for size in sizes:
            self.attempt(f"checkpoint {size}", lambda size=size: self.prepare(size))
            if options.cold:
                self.attempt(f"cold {size}", lambda size=size: self.job("folder", size, 1, cold=True))
            # That of one GPU comes first in any case: it fills the caches of kernels.
            first = options.gpus[:1] if options.engine_last else options.gpus
            self._engines(size, first)
            for gpus in options.gpus:
                for path in options.paths:
                    for qa in options.qa:
                        part = f"{path} {size} {gpus} {qa}"
                        self.attempt(
                            part,
                            lambda path=path, size=size, gpus=gpus, qa=qa: self.job(path, size, gpus, qa),
                        )
            if options.faults:
                gpus = max(options.gpus)
                self.attempt(f"faults {size} {gpus}", lambda size=size, gpus=gpus: self.faults(size, gpus))
            if options.memory:
                gpus = max(options.gpus)
                self.attempt(
                    f"memory {size} {gpus}", lambda size=size, gpus=gpus: self.job("memory", size, gpus)
                )
            self._engines(size, options.gpus[len(first) :])
            shutil.rmtree(self.folder / size, ignore_errors=True)
        print(table(self.bench.rows))
        print(
            f"left out: {', '.join(self.bench.found['left_out']) or 'nothing'}; faults: {', '.join(self.bench.faults) or 'none'}"
        )
        return 1 if self.bench.faults else 0

    def _engines(self, size: str, counts: Sequence[int]) -> None:
        for gpus in [] if self.options.skip_engine or self.options.instant else counts:
            self.attempt(f"engine {size} {gpus}", lambda gpus=gpus: self.engine(size, gpus))


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="*", default=["0b6"], choices=("0b6", "1b7"))
    made.add_argument("--gpus", nargs="*", type=int, default=[1])
    made.add_argument("--paths", nargs="*", default=["folder"], choices=("folder", "s3"))
    made.add_argument(
        "--qa",
        nargs="*",
        default=["off"],
        choices=("off", "basic"),
        help="checks of the jobs; with basic the audio is planted",
    )
    made.add_argument(
        "--slots", type=int, default=1024, help="slots of the engine alone, and of the ramp and the tail"
    )
    made.add_argument(
        "--seconds", type=float, default=40.0, help="seconds a job would take at the engine's speed"
    )
    made.add_argument("--items", type=int, help="items of a job, instead of --seconds")
    made.add_argument(
        "--window-seconds",
        type=float,
        default=3.0,
        help="seconds of each of three windows of the engine alone",
    )
    made.add_argument(
        "--expected",
        type=float,
        default=3000.0,
        help="audio-s/s of one GPU, where the engine alone is not measured",
    )
    made.add_argument(
        "--faults",
        action="store_true",
        help="a job whose workers meet faults too, on the largest number of GPUs",
    )
    made.add_argument(
        "--fault-seconds", type=float, default=16.0, help="seconds that job would take at the engine's speed"
    )
    made.add_argument(
        "--fault-noticed",
        action="store_true",
        help="wait until the lost GPU is noticed, not until its worker is quarantined",
    )
    made.add_argument(
        "--memory",
        action="store_true",
        help="a folder in memory too, on the largest number of GPUs: no disk holds it up",
    )
    made.add_argument(
        "--instant",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="a voice that costs nothing, with so long a sound",
    )
    made.add_argument("--minutes", type=float, default=60.0, help="minutes for everything")
    made.add_argument(
        "--engine-last",
        action="store_true",
        help="measure the engine alone after the jobs, but on the first number of GPUs before",
    )
    made.add_argument("--skip-engine", action="store_true", help="leave the engine alone out")
    made.add_argument(
        "--cold", action="store_true", help="first a short job with new folders for every cache of kernels"
    )
    made.add_argument(
        "--cold-seconds", type=float, default=2.0, help="seconds of that job at the engine's speed"
    )
    made.add_argument(
        "--profile",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="sample the two busiest processes with py-spy",
    )
    made.add_argument(
        "--limit", type=float, default=300.0, help="seconds after which a command is interrupted"
    )
    made.add_argument(
        "--tree", type=Path, default=REPOSITORY, help="checkout whose packages run the jobs and the engine"
    )
    made.add_argument(
        "--folder", type=Path, help="where checkpoints and stores are written; default: a temporary folder"
    )
    options = made.parse_args(arguments)
    if options.tiny:
        options.items = options.items or 200
    with tempfile.TemporaryDirectory(
        prefix="nightjar-job-", dir=options.folder, ignore_cleanup_errors=True
    ) as folder:
        return JobBench(options, Path(folder)).measure()


if __name__ == "__main__":
    raise SystemExit(main())
