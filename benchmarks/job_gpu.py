"""A job as a user types it, beside the engine alone: Qwen3-TTS at full size with random weights, utterances of 3 to 15 seconds.

    python -m benchmarks.job_gpu --sizes 0b6 1b7 --paths folder s3 --gpus 1 2
    python -m benchmarks.job_gpu --tree ../nightjar-before --sizes 0b6          # another version of the packages
    python -m benchmarks.job_gpu --device cpu --tiny --paths folder s3

Rows of the path "engine" are `benchmarks.qwen3_tts`, the closed loop, one process for each GPU. Those of "folder" are `nightjar run` with
no setting, those of "s3" `nightjar submit` and `nightjar worker` with PostgreSQL, Valkey and SeaweedFS on this machine. The jobs read a
checkpoint from disk; their texts say how long each utterance is (`benchmarks.planted`), and their lengths are drawn as the engine's are.

`job_audio_s_per_s` is steady: the audio that was committed between two commits, the first after which twice as many items were done as the
engine has slots, and the last before which one and a half times as many were left, by the ledger's own times; over the time between them.
`first_audio_s` is the time from the start of the command to the first audio file in the store.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import planted
from benchmarks.gpu import Bench, Row, parser
from benchmarks.job_paths import Finished, Ran, run_into_folder, run_with_services
from benchmarks.qwen3_load import FRAMES_PER_SECOND, Load
from benchmarks.sentences import sentences

REPOSITORY = Path(__file__).resolve().parents[1]
#: Characters of text for a second of speech.
CHARACTERS_PER_SECOND = 15.0
SENTENCES = sentences(200)
#: Where caches of kernels are kept; new folders make a start cold.
CACHES = ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")


@dataclass(frozen=True, slots=True)
class Commit:
    """What one commit of the ledger added: items and their seconds of audio."""

    at: float
    items: int
    audio_seconds: float


def steady(commits: Sequence[Commit], slots: int) -> dict[str, Any]:
    """The rate between the ramp and the tail, and the span it was measured in; {} where the job was too short for one.

    The ramp are the first 2 * slots items, the tail the last 1.5 * slots. Both ends of the span are commits, so that what one commit
    gathered is never counted without its time.
    """
    total, done = sum(commit.items for commit in commits), 0
    first = last = None
    for index, commit in enumerate(commits):
        done += commit.items
        if first is None and done >= 2 * slots:
            first = index
        if total - done >= 1.5 * slots:
            last = index
    if first is None or last is None or last <= first:
        return {}
    since, until = commits[first].at, commits[last].at
    audio = sum(commit.audio_seconds for commit in commits[first + 1 : last + 1])
    items = sum(commit.items for commit in commits[first + 1 : last + 1])
    return {"audio_s_per_s": audio / (until - since), "items_per_s": items / (until - since), "since": since, "until": until}


def lengths(load: Load, count: int, seed: int = 0) -> list[int]:
    """Frames of each utterance, drawn as `benchmarks.qwen3_load.requests` draws them."""
    draw = np.random.default_rng(seed)
    return [max(round(float(draw.uniform(load.shortest, load.longest)) * FRAMES_PER_SECOND), 3) for _ in range(count)]


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
        self.slots = 8 if options.tiny else options.slots
        facts = {
            "tree": options.tree.name if options.tree != REPOSITORY else "",
            "cores": os.cpu_count(),
            "load_s": [self.load.shortest, self.load.longest],
        }
        self.bench = Bench("job_h200", options, **facts)
        self.voices = folder / "voices"
        self.engine_rates: dict[tuple[str, int], float] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that has the packages of the tree and the planted voices."""
        path = [str(self.voices), str(self.tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def prepare(self, size: str) -> None:
        """Writes the checkpoint of a size, and the voices that open it, in a process that leaves no memory of the device taken."""
        texts, checkpoint = self.folder / "texts", self.folder / size
        texts.write_text("\n".join(text_of(frames, number) for number, frames in enumerate(lengths(self.load, 400))), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.random_checkpoint", size, str(checkpoint), "--texts", str(texts)]
        began = time.perf_counter()
        subprocess.run([*command, "--device", self.options.device], cwd=REPOSITORY, check=True)
        planted.install(self.voices, f"planted-{size}", checkpoint)
        planted.install(self.voices, f"planted-{size}-speech", checkpoint, audio=True)
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
        command += ["--tiny"] if self.options.tiny else ["--sizes", size, "--seconds", str(self.load.seconds), "--windows", "3"]
        found: list[Path] = []
        running: list[subprocess.Popen[bytes]] = []
        for gpu in range(gpus):
            found.append(self.folder / f"engine-{size}-{gpus}-{gpu}.json")
            chosen = {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.bench.on_gpu else {}
            running.append(
                subprocess.Popen(
                    [*command, "--json", str(found[-1])], cwd=self.tree, env=self.environment | chosen, stdout=subprocess.DEVNULL
                )
            )
        failed = [process.wait() for process in running]
        if any(failed):
            raise RuntimeError(f"The engine alone ended with status {failed}.")
        rows = [json.loads(path.read_text(encoding="utf-8"))["rows"][-1] for path in found]
        rate = sum(row["audio_s_per_s"] for row in rows)
        self.engine_rates[size, gpus] = rate
        kept = ("wrong_lengths", "spread", "process_cpu_share", "gpu_busy_nvml", "open_s")
        self.bench.add(
            {"path": "engine", "size": size, "gpus": gpus, "slots": self.slots, "engine_audio_s_per_s": rate}
            | {name: rows[0].get(name) for name in kept}
        )

    def job(self, path: str, size: str, gpus: int, qa: str = "off", cold: bool = False) -> None:
        """The row of one job."""
        rate = self.engine_rates.get((size, gpus)) or self.options.expected * gpus
        seconds = self.options.cold_seconds if cold else self.options.seconds
        mean = (self.load.shortest + self.load.longest) / 2
        count = self.options.items or round(seconds * rate / mean)
        if not self.options.items and not cold:
            count += 3 * self.slots * gpus
        frames = lengths(self.load, count)
        source = self.folder / "input.jsonl"
        write_input(source, frames)
        work = Path(tempfile.mkdtemp(prefix=f"{path}-", dir=self.folder))
        environment = self.environment
        if cold:
            environment |= {name: str(work / "cache" / name) for name in CACHES}
        name = f"planted-{size}" + ("-speech" if qa != "off" else "")
        on_gpu, profile = self.bench.on_gpu, 0.0 if cold else self.options.profile
        ran = Ran(source, work, name, qa, gpus, environment, self.options.limit, on_gpu, profile, 1.0 if self.options.tiny else 12.0)
        try:
            finished = run_into_folder(ran) if path == "folder" else self._with_services(ran)
            self.bench.add(self._row(path, size, gpus, qa, cold, frames, finished))
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _with_services(self, ran: Ran) -> Finished:
        from benchmarks.services import running_services

        with running_services(ran.folder / "services") as services:
            return run_with_services(ran, services)

    def _row(self, path: str, size: str, gpus: int, qa: str, cold: bool, frames: Sequence[int], finished: Finished) -> Row:
        commits = [Commit(*one) for one in finished.made.commits]
        engine = self.engine_rates.get((size, gpus))
        asked = sum(frames) / FRAMES_PER_SECOND
        made = sum(commit.audio_seconds for commit in commits)
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
        row |= {
            "items": len(frames),
            "status": finished.status,
            "failed": finished.made.failed,
            "repeated_draws": finished.made.repeated_draws,
            "asked_audio_s": asked,
            "made_audio_s": made,
        }
        row |= {"first_audio_s": finished.first_audio_seconds, "command_s": finished.seconds}
        found = {} if cold else steady(commits, self.slots * gpus)
        if found:
            rate = found["audio_s_per_s"]
            row |= {"job_audio_s_per_s": rate, "engine_audio_s_per_s": engine, "share": rate / engine if engine else None}
            one = next(
                (other for other in self.bench.rows if _variant(other) == (path, size, 1, qa) and "job_audio_s_per_s" in other), None
            )
            if gpus > 1 and one is not None:
                row["times_one_gpu"] = rate / one["job_audio_s_per_s"]
            row |= {"items_per_s": found["items_per_s"], "steady_s": found["until"] - found["since"]}
            row |= finished.use.between(found["since"], found["until"])
            if finished.beside is not None:
                row["services_cores"] = finished.beside.between(found["since"], found["until"])["cores_of"]
        if finished.profiles:
            row["profiles"] = {"of": finished.profiles}
        return row | {"worker_said": finished.said}

    def measure(self) -> int:
        options = self.options
        sizes = ["tiny"] if options.tiny else options.sizes
        for size in sizes:
            self.bench.attempt(f"checkpoint {size}", lambda size=size: self.prepare(size))
            if options.cold:
                self.bench.attempt(f"cold {size}", lambda size=size: self.job("folder", size, 1, cold=True))
            for gpus in options.gpus:
                if not options.skip_engine:
                    self.bench.attempt(f"engine {size} {gpus}", lambda size=size, gpus=gpus: self.engine(size, gpus))
                for path in options.paths:
                    for qa in options.qa:
                        part = f"{path} {size} {gpus} {qa}"
                        self.bench.attempt(part, lambda path=path, size=size, gpus=gpus, qa=qa: self.job(path, size, gpus, qa))
            shutil.rmtree(self.folder / size, ignore_errors=True)
        print(table(self.bench.rows))
        print(f"faults: {', '.join(self.bench.faults) or 'none'}")
        return 1 if self.bench.faults else 0


def _variant(row: Row) -> tuple[Any, ...]:
    return row["path"], row["size"], row["gpus"], row.get("qa")


def slots_of(said: Sequence[str]) -> int | None:
    """The slots of a worker's engine by its own words, `engine ready: ..., 512 slots`; None where it does not say."""
    found = (re.search(r"engine ready: .*?(\d+) slots", line) for line in said)
    return next((int(one[1]) for one in found if one), None)


def table(rows: Sequence[Row]) -> str:
    """The rows as lines; a row without a figure leaves its place empty."""

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    titles = f"{'audio-s/s':>10}{'engine':>9}{'share':>7}{'times 1':>8}{'first s':>9}{'cores':>7}{'failed':>8}"
    lines = [f"{'path':8}{'size':6}{'GPUs':>5}{'slots':>6} {'qa':6}{'start':6}{titles}"]
    for row in rows:
        name = f"{row['path']:8}{row['size']:6}{row['gpus']:5}{row['slots'] or '':>6} {row.get('qa', ''):6}{row.get('start', ''):6}"
        rates = f"{cell(row.get('job_audio_s_per_s'), 10, ',.0f')}{cell(row.get('engine_audio_s_per_s'), 9, ',.0f')}"
        shares = f"{cell(row.get('share'), 7, '.0%')}{cell(row.get('times_one_gpu'), 8, '.2f')}"
        rest = f"{cell(row.get('first_audio_s'), 9, '.1f')}{cell(row.get('cpu_cores'), 7, '.2f')}{cell(row.get('failed'), 8, 'd')}"
        lines.append(name + rates + shares + rest)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="*", default=["0b6"], choices=("0b6", "1b7"))
    made.add_argument("--gpus", nargs="*", type=int, default=[1])
    made.add_argument("--paths", nargs="*", default=["folder"], choices=("folder", "s3"))
    made.add_argument(
        "--qa", nargs="*", default=["off"], choices=("off", "basic"), help="checks of the jobs; with basic the audio is planted"
    )
    made.add_argument("--slots", type=int, default=512, help="slots of the engine alone, and of the ramp and the tail")
    made.add_argument("--seconds", type=float, default=40.0, help="seconds a job would take at the engine's speed")
    made.add_argument("--items", type=int, help="items of a job, instead of --seconds")
    made.add_argument("--window-seconds", type=float, default=3.0, help="seconds of each of three windows of the engine alone")
    made.add_argument("--expected", type=float, default=2400.0, help="audio-s/s of one GPU, where the engine alone is not measured")
    made.add_argument("--skip-engine", action="store_true", help="leave the engine alone out")
    made.add_argument("--cold", action="store_true", help="first a short job with new folders for every cache of kernels")
    made.add_argument("--cold-seconds", type=float, default=2.0, help="seconds of that job at the engine's speed")
    made.add_argument("--profile", type=float, default=0.0, metavar="SECONDS", help="sample the two busiest processes with py-spy")
    made.add_argument("--limit", type=float, default=300.0, help="seconds after which a command is interrupted")
    made.add_argument("--tree", type=Path, default=REPOSITORY, help="checkout whose packages run the jobs and the engine")
    made.add_argument("--folder", type=Path, help="where checkpoints and stores are written; default: a temporary folder")
    options = made.parse_args(arguments)
    if options.tiny:
        options.items = options.items or 200
    with tempfile.TemporaryDirectory(prefix="nightjar-job-", dir=options.folder, ignore_cleanup_errors=True) as folder:
        return JobBench(options, Path(folder)).measure()


if __name__ == "__main__":
    raise SystemExit(main())
