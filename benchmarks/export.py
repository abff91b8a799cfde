"""The memory and the speed of every export, of jobs of several sizes.

    python -m benchmarks.export [--items N]... [--format FORMAT]... [--kind audio|codes|timed]...

The jobs have dialogues of two spoken turns with three more columns. Their inputs are ingested; their audio, codes and times
are made by the database, and all refer to a few small files, so a job of a million items is made in a minute. Each export runs
in a process of its own, whose highest memory is measured. Prints a table, and writes `benchmarks/results/export.json`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from hashlib import sha256
from itertools import cycle, islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import soundfile
import sqlalchemy as sa

from benchmarks.cpu import figure, report
from benchmarks.voices import SENTENCES
from jobs.codes import StoredCodes
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec
from jobs.settings import load_settings
from jobs.store import open_store
from pipelines.request import CodecIdentity, Word

RATE, SAMPLES = 24_000, 1_200
#: A file has a limited number of names, so several files have the same content.
_NAMES_PER_FILE = 50_000
_PACK = "packs/all.tar"
#: Kind of a job -> the kinds of its artifacts, its exports, and their options.
KINDS: dict[str, tuple[tuple[str, ...], dict[str, dict[str, Any]]]] = {
    "audio": (
        ("audio",),
        {
            **{name: {} for name in ("manifest", "espnet", "nemo", "openai-batch", "kaldi", "lhotse", "espnet-dataset", "shar")},
            **{name: {} for name in ("webdataset", "parquet", "audiofolder", "ljspeech", "rttm")},
            **{f"{name}, dialogues": {"dialogues": "stereo"} for name in ("lhotse", "shar", "nemo", "webdataset")},
            "manifest, unique": {"unique": True},
        },
    ),
    "codes": (
        ("codes",),
        {name: {} for name in ("jsonl", "webdataset", "parquet", "lhotse", "shar", "espnet-codes", "manifest")}
        | {"interleaved": {"tokenizer": "tokenizer.json"}},
    ),
    "timed": (("audio", "words"), {name: {} for name in ("ctm", "textgrid", "srt", "vtt")}),
}  # fmt: skip


def made_contents() -> dict[str, bytes]:
    """The content of the artifacts of a kind, which all items share."""
    sound = io.BytesIO()
    soundfile.write(sound, np.sin(np.arange(SAMPLES) / 20).astype(np.float32), RATE, format="WAV")
    codec = CodecIdentity("made", "0" * 64, 12.5, RATE, (1024, 1024))
    codes = StoredCodes(np.arange(24, dtype=np.int16).reshape(12, 2), None, codec)
    words = msgspec.json.encode([Word("Hello", 0.0, 0.02), Word("there.", 0.02, 0.05)])
    return {"audio": sound.getvalue(), "codes": codes.encoded(), "words": words + b"\n"}


def made_job(folder: Path, items: int, kind: str) -> str:
    """Makes a job with `items` items that are done, in a new folder; returns its id."""
    kinds = KINDS[kind][0]
    source = folder / "input.jsonl"
    with source.open("w") as file:
        texts = cycle(SENTENCES)
        for number in range(items // 2):
            asked, answered = islice(texts, 2)
            messages = [["user", "text", asked], ["assistant", "text", f"{answered} {number}."]]
            row = {"example_id": f"dialogue-{number:09d}", "messages": messages}
            file.write(json.dumps(row | {"topic": number % 7, "score": number / 3, "source": "made"}) + "\n")
    store = open_store((folder / "store").as_uri())
    with closing(Ledger(f"sqlite:///{folder}/ledger.sqlite")) as ledger:
        ledger.migrate()
        job = submit(load_settings(), ledger, store, str(source), JobSpec("hibari", speak="all")).job.id
        rows, changes = [], "".join(
            [", '$.output', 'codes'"] * ("codes" in kinds) + [", '$.timestamps', json('true')"] * ("words" in kinds)
        )  # fmt: skip
        offset, pack = 0, b""
        contents = made_contents()
        for name in kinds:
            data = contents[name]
            extension = {"audio": "wav", "codes": "safetensors", "words": "json"}[name]
            key = f"'jobs/{job}/{name}/' || printf('%05d/%09d', idx / 10000, idx) || '-d.{extension}'"
            place = "NULL, NULL"
            if name == "audio":
                _link(folder / "store" / "jobs" / job / name, data, items)
            else:
                place, offset, pack = f"'{_PACK}', {offset}", offset + len(data), pack + data
            facts = f"'{sha256(data).hexdigest()}', {len(data)}, 50, {RATE}, {SAMPLES}, idx, 1, '{{}}', 1.0, {place}"
            rows.append(f"SELECT job_no, idx, '{name}', {key}, {facts} FROM items")
        store.put(_PACK, pack + b"end")
        columns = "key, sha256, bytes, duration_ms, sample_rate, samples, seed, epoch, meta, made_at, pack, pack_offset"
        statements = [
            *(f"INSERT INTO artifacts (job_no, idx, kind, {columns}) {row}" for row in rows),
            "UPDATE items SET state = 1, attempts = 1",
            "UPDATE shards SET state = 'done', n_done = n_items",
            f"UPDATE jobs SET state = 'completed', finished_at = 1{changes and f', spec = json_set(spec{changes})'}",
        ]
        for statement in statements:
            with ledger.engine.begin() as connection:
                connection.execute(sa.text(statement.replace(":", "\\:")))
    return job


def _link(folder: Path, data: bytes, items: int) -> None:
    """Makes the files of all items as names of a few files."""
    first = folder
    for index in range(items):
        path = folder / f"{index // 10_000:05d}" / f"{index:09d}-d.wav"
        if index % 10_000 == 0:
            path.parent.mkdir(parents=True)
        if index % _NAMES_PER_FILE == 0:
            path.write_bytes(data)
            first = path
        else:
            os.link(first, path)


def exported(folder: str, job: str, format: str, options: dict[str, Any]) -> tuple[float, float, int]:
    """Exports a job. Seconds, the most MB that this process held, and the number of items."""
    # Imported here, because the process begins with nothing.
    from jobs.export import export

    name, to = format.partition(",")[0], Path(folder, f"export-{os.getpid()}")
    if "tokenizer" in options:
        options = {"tokenizer": str(_tokenizer(Path(folder, options["tokenizer"])))}
    store = open_store(Path(folder, "store").as_uri())
    with closing(Ledger(f"sqlite:///{folder}/ledger.sqlite")) as ledger:
        start = time.perf_counter()
        items = export(ledger, store, job, name, str(to), part_bytes=20_000_000, **options).items
        seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    shutil.rmtree(to) if to.is_dir() else to.unlink()
    return seconds, peak, items


def _tokenizer(path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    if not path.exists():
        tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(path))
    return path


@click.command()
@click.option(
    "--items", "sizes", multiple=True, type=int, default=[10_000, 100_000, 1_000_000], show_default=True
)
@click.option("--format", "formats", multiple=True, help="Only these formats. [default: all]")
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice([*KINDS]), default=[*KINDS], help="Only these jobs."
)
@click.option(
    "--home", type=click.Path(path_type=Path), help="Folder in which the jobs are kept, and used again."
)
@click.option("--name", default="export", show_default=True, help="Name of the file of results.")
def main(
    sizes: tuple[int, ...], formats: tuple[str, ...], kinds: tuple[str, ...], home: Path | None, name: str
) -> None:
    """Measures exports."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as temporary:
        for kind, items in product(kinds, sizes):
            folder = (home or Path(temporary)) / f"{kind}-{items}"
            noted = folder / "job"
            if not noted.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                noted.write_text(made_job(folder, items, kind))
            for export_format, options in KINDS[kind][1].items():
                if formats and export_format not in formats:
                    continue
                with ProcessPoolExecutor(1, get_context("spawn")) as processes:
                    made = processes.submit(exported, str(folder), noted.read_text(), export_format, options)
                    seconds, peak, written = made.result()
                about = f"{export_format}, {items:,} items of {kind}"
                figures += [
                    figure(f"memory of {about}", peak, "MB RSS"),
                    figure(f"speed of {about}", written / seconds, "items/s"),
                ]
                print(f"{about}: {peak:.0f} MB, {written / seconds:,.0f} items/s", flush=True)
    report(name, figures)


if __name__ == "__main__":
    main()
