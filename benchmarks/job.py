"""A job as a user types it, beside the engine alone: Qwen3-TTS at full size with random weights, utterances of 3 to 15
seconds.

    python -m benchmarks.job --sizes 0b6 1b7 --gpus 1 2 --slots 512
    python -m tests.support.services python -m benchmarks.job --paths folder s3 --gpus 1 8 --minutes 9
    python -m benchmarks.job --sizes 0b6 --skip-engine --cloning none vector context --voices 20 3000 --items 6000
    python -m benchmarks.job --sizes 0b6 --skip-engine --qa off basic strict strict:5% --qa-set meters.asr.model=DIR
    python -m benchmarks.job --sizes 0b6 --skip-engine --warm --qa off basic strict:5% strict --ctc --meters 4
    python -m benchmarks.job --device cpu --tiny
    python -m benchmarks.job --device cpu --instant 9 --gpus 1 8 --items 3000

Rows of the path "engine" are `benchmarks.engine`, the closed loop, one process for each GPU. Those of "folder" are
`nightjar run` with no setting, those of "s3" `nightjar submit` and `nightjar worker` with the services that the
environment names. The jobs read a checkpoint from disk; their texts say how long each utterance is
(`benchmarks.voices`), and their lengths are drawn as the engine's are. `--instant` runs jobs with a voice that costs
nothing, for the path around the engine.

`job_audio_s_per_s` is steady: the audio that was committed between two commits, the first after which twice as many items
were done as the engine has slots, and the last before which one and a half times as many were left, by the ledger's own
times; over the time between them. A job that is interrupted before there is such a span has the later half of its time.
`first_audio_s` is the time from the start of the command to the first audio file in the
store, by the store's own times (S3: whole seconds). Cores, memory and the use of GPUs, with `joules_per_audio_s` by the boards' counters, are of the same span; `own_joules_per_audio_s` is
what the command itself says of the whole job. With `--minutes`, what no longer fits is left out, and a job
that does not end in time (`--limit` seconds) is interrupted; its row has what was committed.

`--cloning` says how voices are made: `none` is a named voice, `vector` clones recordings of 3 to 10 s by their speaker vector
and `context` with their text. `--voices` are numbers of recordings; every one of them is used at least twice, in mixed order.
`--qa off basic strict strict:5%` are the checks of the jobs, the last one with a sample; no bound applies, so that each draw is measured
once by all meters. `--qa-set` are more settings of checks with meters, such as folders of models (`meters.asr.model=DIR`) or fewer
meters (`meters.distillmos=false`), and `--meters` the processes of meters (0: their default); `share_of_off` is the share of the same job without checks.
`--ctc` lets the meter `asr` hear with a CTC model of full size and random weights. Rows of the path "meter" are what each meter of
`strict` does alone in as many processes, without an engine (`--meter-seconds` each; 0: no such rows); `gpu_gib` is what its processes
hold of the GPU.
`--output` is that of the jobs (`audio`, `codes`, `both`). `--warm` is first a short job that does not count.

A job has as many items as take `--seconds` at the speed of the engine (`--expected`, audio-s/s of one GPU, with
`--skip-engine`), or `--items`; `--slots` are those of the engine alone, and of the ramp and the tail. Checkpoints and stores are written below
`TMPDIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import closing, suppress
from datetime import datetime
from itertools import accumulate, product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import voices
from benchmarks.checkpoint import write_ctc
from benchmarks.common import FRAMES_PER_SECOND, ROOT, Bench, Row, Use, environment_with, parser, read
from benchmarks.engine import Load
from benchmarks.voices import words_of
from jobs.checks import PRESETS, Option, quality_of
from jobs.settings import load_settings
from jobs.store import ObjectStore, open_store
from pipelines.audio import decode
from worker.quality.meters import Utterance
from worker.quality.process import MeterPool, MeterTask

_COMMITS = "SELECT made_at, count(*), sum(duration_ms) / 1000.0 FROM artifacts WHERE samples > 0 GROUP BY made_at ORDER BY made_at"
_FAILED = "SELECT count(*) FROM items WHERE state IN (2, 3)"
_REPEATED = "SELECT count(*) FROM draws WHERE draw > 0"
_ENDED = "SELECT 1 FROM jobs WHERE finished_at IS NOT NULL"
#: The least time in seconds for which a part is started, and the time that an interrupted command gets to end.
LEAST_SECONDS, DRAIN_SECONDS = 25.0, 20.0
#: A window of the engine alone.
WINDOW_SECONDS = 3.0
COLUMNS = (
    "path", "size", "gpus", "output", "cloning", "voices", "slots", "qa", "meter", "start", "job_audio_s_per_s", "meter_audio_s_per_s", "engine_audio_s_per_s", "share", "share_of_off", "times_one_gpu",
    "joules_per_audio_s", "first_audio_s", "cpu_cores", "failed",
)  # fmt: skip


class Commit(NamedTuple):
    """What one commit of the ledger added: items and their seconds of audio."""

    at: float
    items: int
    audio_seconds: float


def steady(commits: Sequence[Commit], slots: int) -> dict[str, Any]:
    """The rate between the ramp and the tail, and the span it was measured in; {} where the job was too short for one.

    The ramp are the first 2 * slots items, the tail the last 1.5 * slots. Both ends of the span are commits, so that what
    one commit gathered is never counted without its time.
    """
    done = list(accumulate(commit.items for commit in commits))
    after_ramp, before_tail = bisect_left(done, 2 * slots), bisect_right(done, done[-1] - 1.5 * slots) - 1
    return _between(commits, after_ramp, before_tail) if before_tail > after_ramp else {}


def later_half(commits: Sequence[Commit]) -> dict[str, Any]:
    """The rate in the later half of the time between the first commit and the last one; {} where there is one commit."""
    first = bisect_left([commit.at for commit in commits], (commits[0].at + commits[-1].at) / 2)
    return _between(commits, first, len(commits) - 1) if first < len(commits) - 1 else {}


def _between(commits: Sequence[Commit], first: int, last: int) -> dict[str, Any]:
    """The rate of what was committed after one commit, up to another one."""
    since, until, span = commits[first].at, commits[last].at, commits[first + 1 : last + 1]
    audio, items = sum(commit.audio_seconds for commit in span), sum(commit.items for commit in span)
    found = {"since": since, "until": until, "steady_s": until - since}
    return found | {"job_audio_s_per_s": audio / (until - since), "items_per_s": items / (until - since)}


def write_input(
    path: Path, frames: Sequence[int], recordings: Sequence[float] = (), spoken: bool = False
) -> None:
    """A text for each utterance about as long as its speech, whose first word is the number of its frames. `recordings`:
    seconds of those that the utterances clone, in mixed order; `spoken`: with the text of each."""
    cloned = [number % max(len(recordings), 1) for number in range(len(frames))]
    random.Random(0).shuffle(cloned)
    with path.open("w", encoding="utf-8") as file:
        for number, (count, voice) in enumerate(zip(frames, cloned, strict=True)):
            text = words_of(count / FRAMES_PER_SECOND, number, str(count))
            messages = [["user", "text", text], ["assistant", "audio", f"wav/{number}.wav"]]
            line: dict[str, Any] = {"example_id": f"utterance-{number:07d}", "messages": messages}
            if recordings:
                messages.insert(0, ["user", "audio", f"recordings/{voice}.wav"])
            if spoken:
                line["generation"] = {"reference_text": words_of(recordings[voice], voice)}
            file.write(json.dumps(line) + "\n")


def start_lines(log: Path) -> list[str]:
    """Lines of a worker's log before its first shard, and its warnings."""
    words = ("worker up", "model ready", "model open", "engine", "warning", "error")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line[:400] for line in lines if any(word in line for word in words)][:12]


def start_seconds(said: Sequence[str], began_at: float) -> dict[str, float]:
    """Seconds from the start of a command, at this Unix time, to the events of a worker's log lines."""
    found: dict[str, float] = {}
    for line in said:
        event, at = re.search(r'"event": "([^":]+)', line), re.search(r'"timestamp": "([^"]+)"', line)
        if event and at:
            found.setdefault(event[1], datetime.fromisoformat(at[1]).timestamp() - began_at)
    return found


def kind_for(cloning: str) -> str:
    """The kind of checkpoint whose voices are made so."""
    return "custom_voice" if cloning == "none" else "base"


class Command:
    """`nightjar ...` of the packages in PYTHONPATH, which the working directory must not shadow, and what its processes
    use."""

    def __init__(self, folder: Path, words: Sequence[str], environment: dict[str, str]) -> None:
        self.began, self.seconds = time.perf_counter(), 0.0
        self.began_at, self._stdout = time.time(), folder / "stdout"
        command = [sys.executable, "-P", "-m", "jobs", *words]
        with self._stdout.open("wb") as out, (folder / "stderr").open("wb") as error:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=error)
        self.use = Use(self.process.pid)

    def wait(self, most_seconds: float) -> int:
        """The exit status; a command that takes longer is interrupted, and then killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(most_seconds)
                break
            self.process.send_signal(number)
            most_seconds = DRAIN_SECONDS
        status = self.process.wait()
        self.seconds = self.seconds or time.perf_counter() - self.began
        self.use.stop()
        return status

    def made(
        self, status: int, execute: Callable[[str], Any] | None, store: ObjectStore, logs: Sequence[Path]
    ) -> tuple[Row, list[Commit]]:
        """What came of the command, which has ended, and the commits of its one job. `execute`: runs a statement on its
        ledger. Raises `RuntimeError` with the last words of one that made nothing."""
        found = execute(_COMMITS).fetchall() if execute is not None else []
        if execute is None or not found:
            ends = "\n".join(log.read_text(encoding="utf-8", errors="replace")[-2000:] for log in logs)
            raise RuntimeError(f"The command ended with status {status} and made nothing: {ends}")
        commits = [Commit(float(at), int(items), float(audio)) for at, items, audio in found]
        failed, repeated = (int(execute(text).fetchone()[0]) for text in (_FAILED, _REPEATED))
        row: Row = {"status": status, "failed": failed, "repeated_draws": repeated}
        row |= {"made_audio_s": sum(commit.audio_seconds for commit in commits)}
        stored = [one for one in store.list("jobs/") if one.key.split("/")[2] in ("audio", "codes")]
        written = (one.modified_at for one in stored if one.modified_at is not None)
        row |= {"first_audio_s": min(written) - self.began_at, "command_s": self.seconds}
        own = re.search(rb'"joules_per_audio_s":([\d.]+)', self._stdout.read_bytes())
        row |= {"own_joules_per_audio_s": float(own[1])} if own else {}
        said = [line for log in logs for line in start_lines(log)]
        row["start_s"] = start_seconds(said, self.began_at) | {"first commit": commits[0].at - self.began_at}
        return row | {"worker_said": said}, commits


Run = tuple[Command, Row, list[Commit]]


class JobBench:
    """One machine, one version of the packages, and the rows that they give."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.load = Load(0.3, 0.8, 0.5) if options.tiny else Load(3.0, 15.0, WINDOW_SECONDS)
        if options.instant:
            self.load = Load(options.instant, options.instant, WINDOW_SECONDS)
        self.slots = 8 if options.tiny or options.instant else options.slots
        lengths = [self.load.shortest, self.load.longest]
        self.bench = Bench("job_h200", options, cores=os.cpu_count(), load_s=lengths)
        self.environment = environment_with(folder / "voices")
        if options.meters:
            self.environment["SPEECH_WORKER__METER_PROCESSES"] = str(options.meters)
        self.engine_rates: dict[tuple[str, int], float] = {}
        #: Seconds of each recording on disk.
        self.recordings: list[float] = []

    def attempt(self, part: str, work: Callable[..., None], *given: Any) -> None:
        self.bench.attempt(part, work, *given, needs=LEAST_SECONDS)

    def prepare(self, size: str, kind: str) -> None:
        """Writes the checkpoint of a size, and the voice that opens it; for Base the recordings too."""
        place = self.folder / "voices"
        if self.options.instant:
            voices.install(place, "instant", voices.Instant(self.options.instant))
            return
        lengths = [frames / FRAMES_PER_SECOND for frames in self.load.lengths(400)]
        _, facts = voices.plant(place, size, kind, lengths, self.options.device)
        self.bench.keep(**{f"checkpoint_{size}-{kind}": facts})
        if kind == "base" and not self.recordings:
            self.recordings = voices.write_recordings(self.folder / "recordings", max(self.options.voices))

    def ctc(self) -> None:
        """Writes the CTC model that the meter `asr` hears with."""
        write_ctc(self.folder / "ctc", self.options.tiny)
        self.options.qa_set.append(f"meters.asr.model={self.folder / 'ctc'}")

    def meter(self, name: str, options: dict[str, Option]) -> None:
        """The row of one meter alone, which measures made recordings as long as the jobs' utterances."""
        lengths = [frames / FRAMES_PER_SECOND for frames in self.load.lengths(64)]
        samples = (decode(voices.recording(number, one, 24_000)[0]) for number, one in enumerate(lengths))
        tasks = [
            MeterTask({name: options}, Utterance(*sound, words_of(seconds, number), "english"))
            for number, (sound, seconds) in enumerate(zip(samples, lengths, strict=True))
        ]
        pool = MeterPool(self.options.meters or None)
        processes = pool.processes
        with closing(pool):
            # Each process opens the meter and chooses its kernels.
            wait([pool.submit(one) for one in tasks * max(1, processes // 4)])
            began, use = time.perf_counter(), Use(os.getpid())
            futures = [pool.submit(one) for _ in range(1 + 1000 // len(tasks)) for one in tasks]
            done = wait(futures, self.options.meter_seconds).done
            seconds = time.perf_counter() - began
            use.stop()
        failed = [str(one.exception()) for one in done if one.exception()]
        audio = sum(lengths[number % len(lengths)] for number, one in enumerate(futures) if one in done)
        now = time.time()
        row: Row = {"path": "meter", "meter": name, "meters": processes, "items": len(done), "qa": "strict"}
        row |= {
            "failed": len(failed),
            "error": failed[:1],
            "voices": 0,
            "meter_audio_s_per_s": audio / seconds,
        }
        self.bench.add(row | use.between(now - seconds, now, audio / seconds, 1))

    def engine(self, size: str, gpus: int) -> None:
        """The row of the engine alone: one closed loop for each GPU, all at once."""
        words = [sys.executable, "-m", "benchmarks.engine", "--device", self.options.device]
        full = ["--sizes", size, "--seconds", str(self.load.seconds), "--windows", "3"]
        words += ["--slots", str(self.slots), *(["--tiny"] if size == "tiny" else full)]
        found = [self.folder / f"engine-{size}-{gpus}-{gpu}.json" for gpu in range(gpus)]
        running = list[subprocess.Popen[Any]]()
        for gpu, path in enumerate(found):
            chosen = {"CUDA_VISIBLE_DEVICES": str(gpu)} if self.bench.on_gpu else {}
            given: dict[str, Any] = {"env": self.environment | chosen, "stdout": subprocess.DEVNULL}
            running.append(subprocess.Popen([*words, "--json", str(path)], cwd=ROOT, **given))
        try:
            failed = [process.wait(max(self.bench.seconds_left, 1.0)) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(failed):
            raise RuntimeError(f"The engine alone ended with status {failed}.")
        every = (json.loads(path.read_text(encoding="utf-8"))["rows"] for path in found)
        rows = [next(row for row in rows if row["part"] == "all") for rows in every]
        rate = sum(row["audio_s_per_s"] for row in rows)
        self.engine_rates[size, gpus] = rate
        kept = ("wrong_lengths", "spread", "process_cpu_share", "gpu_busy_nvml", "open_s", "precision")
        row: Row = {
            "path": "engine",
            "size": size,
            "gpus": gpus,
            "slots": self.slots,
            "engine_audio_s_per_s": rate,
        }
        if all("joules_per_audio_s" in one for one in rows):
            joules = (one["joules_per_audio_s"] * one["audio_s_per_s"] for one in rows)
            row["joules_per_audio_s"] = sum(joules) / rate
        self.add(row | {name: rows[0].get(name) for name in kept})

    def job(
        self, path: str, size: str, gpus: int, cloning: str, count: int, qa: str, short: bool = False
    ) -> None:
        """The row of one job, which clones `count` recordings; a short one does not count."""
        frames = self._lengths(size, gpus, short)
        if not short:
            frames = self.load.lengths(max(len(frames), 2 * count))
        write_input(self.folder / "input.jsonl", frames, self.recordings[:count], cloning == "context")
        place: dict[str, Any] = {"prefix": f"{path}-", "dir": self.folder, "ignore_cleanup_errors": True}
        with tempfile.TemporaryDirectory(**place) as name:
            folder = Path(name)
            run = self._with_services if path == "s3" else self._into_folder
            command, found, commits = run(
                folder, self._words(size, gpus, cloning, qa), gpus, {**self.environment}
            )
        if short:
            return
        slots = re.search(r"engine ready: .*?(\d+) slots", "\n".join(found["worker_said"]))
        row: Row = {"path": path, "size": size, "gpus": gpus, "slots": int(slots[1]) if slots else None}
        row |= {"qa": qa, "precision": "exact", "output": self.options.output, "cloning": cloning}
        row |= {"voices": count, "start": "warm", "items": len(frames)}
        row |= {"asked_audio_s": sum(frames) / FRAMES_PER_SECOND} | found
        span = steady(commits, self.slots * gpus)
        if not span and sum(commit.items for commit in commits) + row["failed"] < len(frames):
            span = later_half(commits)
        if span:
            since, until = span.pop("since"), span.pop("until")
            row |= span | command.use.between(since, until, span["job_audio_s_per_s"], gpus)
            row |= {f"{name}_per_gpu": row[name] / gpus for name in ("cpu_cores", "memory_gib")}
        self.add(row)

    def add(self, row: Row) -> None:
        """Keeps a row, beside what the engine alone and one GPU do where that was measured."""
        rows = [*self.bench.rows, row]
        jobs = [one for one in rows if "job_audio_s_per_s" in one and not one["voices"]]
        what = itemgetter("path", "size", "gpus", "qa")
        rates = {what(one): one["job_audio_s_per_s"] for one in jobs}
        for one in jobs:
            path, size, gpus, qa = what(one)
            rate = one["job_audio_s_per_s"]
            if alone := self.engine_rates.get((size, gpus)):
                one |= {"engine_audio_s_per_s": alone, "share": rate / alone}
            if gpus > 1 and (single := rates.get((path, size, 1, qa))):
                one["times_one_gpu"] = rate / single
            if qa != "off" and (off := rates.get((path, size, gpus, "off"))):
                one["share_of_off"] = rate / off
        self.bench.add(row)

    @property
    def _limit(self) -> float:
        """Seconds that a command may take; what comes after it takes some too."""
        return max(1.0, min(self.options.limit, self.bench.seconds_left - LEAST_SECONDS / 2))

    def _lengths(self, size: str, gpus: int, short: bool) -> list[int]:
        """Frames of each item of a job that takes the engine so long."""
        if self.options.items and not short:
            return self.load.lengths(self.options.items)
        rate = self.engine_rates.get((size, gpus)) or self.options.expected * gpus
        seconds, beside = (2.0, 0) if short else (self.options.seconds, 3 * self.slots * gpus)
        mean = (self.load.shortest + self.load.longest) / 2
        return self.load.lengths(round(seconds * rate / mean) + beside)

    def _words(self, size: str, gpus: int, cloning: str, qa: str) -> tuple[list[str], list[str]]:
        """Options of the job, and of the worker; on a CPU several workers have GPUs in name only."""
        spoken = ["--language", "english", *(("--voice", "ryan") if cloning == "none" else ())]
        model = ["instant"] if self.options.instant else [f"planted-{size}-{kind_for(cloning)}", *spoken]
        job = [str(self.folder / "input.jsonl"), "--model", *model, *self._checks(qa), "--json"]
        job += ["--output", self.options.output] if self.options.output != "audio" else []
        return job, ["--gpu", ",".join(map(str, range(gpus)))] if gpus > 1 or self.bench.on_gpu else []

    def _checks(self, qa: str) -> list[str]:
        """Options of checks without bounds."""
        preset, _, share = qa.partition(":")
        words, found = ["--qa", preset], PRESETS[preset]
        changes = [f"bounds.{name}=false" for name in (found.bounds if found else ())]
        changes += self.options.qa_set if found is not None and found.meters else []
        for change in changes:
            words += ["--qa-set", change]
        return words + (["--qa-sample", share] if share else [])

    def _into_folder(
        self, folder: Path, given: tuple[list[str], list[str]], gpus: int, environment: dict[str, str]
    ) -> Run:
        """`nightjar run` with no other setting; its ledger is a SQLite file in the folder."""
        home, (job, worker) = folder / "out", given
        words = ["run", *job, "--out", str(home), *(worker if gpus > 1 else [])]
        command = Command(folder, words, environment)
        status, state, store = command.wait(self._limit), home / ".nightjar", open_store(home.as_uri())
        logs = [folder / "stderr", *sorted(state.glob("worker*.log"))]
        if not (state / "ledger.sqlite").is_file():
            return command, *command.made(status, None, store, logs)
        with closing(sqlite3.connect(f"file:{state / 'ledger.sqlite'}?mode=ro", uri=True)) as connection:
            return command, *command.made(status, connection.execute, store, logs)

    def _with_services(
        self, folder: Path, given: tuple[list[str], list[str]], gpus: int, environment: dict[str, str]
    ) -> Run:
        """`nightjar submit`, then `nightjar worker` until the job has ended; a database and a prefix of their own."""
        import psycopg
        import redis

        from benchmarks.common import new_database

        database = new_database(os.environ["BENCH_POSTGRES"], folder.name.replace("_", "x"))
        redis.Redis.from_url(os.environ["BENCH_BROKER"]).flushall()
        place = f"{os.environ['BENCH_STORE']}/{folder.name.replace('_', 'x')}"
        environment |= {"SPEECH_DATABASE_URL": database, "SPEECH_STORE_URL": place}
        environment |= {"SPEECH_BROKER_URL": os.environ["BENCH_BROKER"]}
        store, (job, worker) = open_store(place, load_settings().s3), given
        for words in (["db", "upgrade"], ["submit", *job]):
            whole = [sys.executable, "-P", "-m", "jobs", *words]
            subprocess.run(whole, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        with psycopg.connect(database, autocommit=True) as connection:
            execute = lambda text: connection.execute(text.encode())  # noqa: E731
            command = Command(folder, ["worker", *worker], environment)
            until = command.began + self._limit
            runs = lambda: command.process.poll() is None and not execute(_ENDED).fetchall()  # noqa: E731
            while time.perf_counter() < until and runs():
                time.sleep(0.25)
            command.seconds = time.perf_counter() - command.began
            command.process.terminate()
            return command, *command.made(command.wait(60.0), execute, store, [folder / "stderr"])

    def _jobs(self, size: str, cloning: str, counts: Sequence[int]) -> None:
        options = self.options
        if options.warm:
            short = "folder", size, 1, cloning, counts[0], "off", True
            self.attempt(f"first {size} {cloning}", self.job, *short)
        for gpus, path, count, qa in product(options.gpus, options.paths, counts, options.qa):
            part = f"{path} {size} {gpus} {cloning} {count} {qa}"
            self.attempt(part, self.job, path, size, gpus, cloning, count, qa)

    def measure(self) -> int:
        options = self.options
        if options.ctc:
            self.attempt("ctc", self.ctc)
        if options.meter_seconds:
            quality = quality_of("strict", None, options.qa_set)
            for name, given in quality.costly.items() if quality else ():
                self.attempt(f"meter {name}", self.meter, name, given)
        for size in ["instant"] if options.instant else ["tiny"] if options.tiny else options.sizes:
            alone = not (options.skip_engine or options.instant)
            for gpus in options.gpus if alone else ():
                self.attempt(f"engine {size} {gpus}", self.engine, size, gpus)
            kinds = dict.fromkeys(kind_for(one) for one in options.cloning)
            for kind in kinds:
                self.attempt(f"checkpoint {size} {kind}", self.prepare, size, kind)
                for cloning in (one for one in options.cloning if kind_for(one) == kind):
                    self._jobs(size, cloning, options.voices if cloning != "none" else [0])
                shutil.rmtree(self.folder / "voices" / f"{size}-{kind}", ignore_errors=True)
        return self.bench.end(*COLUMNS)


def main(given: Sequence[str] | None = None) -> int:
    options = read(
        parser(__doc__), given, sizes=["0b6"], gpus=[1], paths=["folder"], slots=1024, seconds=40.0, items=0,
        expected=3000.0, instant=0.0, minutes=60.0, skip_engine=False, warm=False, limit=300.0,
        cloning=["none"], voices=[20], output="audio", qa=["off"], qa_set=str, meters=0, ctc=False, meter_seconds=0.0,
        known={"sizes": ("0b6", "1b7"), "paths": ("folder", "s3"), "cloning": ("none", "vector", "context")},
    )  # fmt: skip
    if options.tiny:
        options.items = options.items or 200
    with tempfile.TemporaryDirectory(prefix="nightjar-job-", ignore_cleanup_errors=True) as folder:
        return JobBench(options, Path(folder)).measure()


if __name__ == "__main__":
    raise SystemExit(main())
