"""The figures that need no GPU.

    python -m benchmarks.cpu filters [--items N] [--postgres URL]
    python -m benchmarks.cpu exports [--items N] [--kinds codes timed] [--formats lhotse]
    python -m benchmarks.cpu words [--align DIR] [--texts N]

`python -m tests.support.services COMMAND` starts PostgreSQL, without which its figures are left out.
`python -m benchmarks.job --device cpu --instant 2` is a whole job with a voice that costs nothing.

All jobs are dialogues of two spoken turns with three more columns. Their inputs are ingested; their audio, codes, times and
scores are made by the database, so a job of a million items is made in a minute. Ingests and exports run in processes of
their own, whose highest memory is measured.

`filters` measures the ingest and the status of a job in each ledger, and filters of its items beside no filter. `exports`
measures the memory and the speed of every export, of jobs of several sizes, whose artifacts refer to a few small files;
`--kept DIR` keeps the jobs there, and uses them again.

`words` measures the errors of the times of words against the exact ones of `hibari`, in the texts of examples/evening.jsonl. The
times are those of the aligner in the folder `--align`, by default the small one of the tests, and the estimates of streams. The
other values are the shares of speech with a skipped and with a repeated word that the aligner's score finds, with the bound
that 97 % of the good speech passes. The word is the longest one of its text.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import statistics
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import soundfile
import sqlalchemy as sa

from benchmarks.common import ROOT, Result, Row, in_new_process, new_database, parser, processor_name, read
from benchmarks.voices import SENTENCES
from jobs.checks import Quality
from jobs.codes import StoredCodes
from jobs.export import StoredJob, export_jobs
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec
from jobs.settings import load_settings
from jobs.store import open_store
from jobs.where import parse_where
from pipelines.request import CodecIdentity, Message, SynthesisRequest, Word
from pipelines.request import submit as submit_request

#: The share of good speech that passes the bound of a score, and the seconds of a chunk, in `words`.
GOOD_SHARE, CHUNK_SECONDS = 0.97, 0.08
PARTS = ("filters", "exports", "words")
#: A filter that keeps 1 % of the items of `filters`, and one with three conditions that keeps as many.
FILTERS = {"1 %": "wer < 0.01", "1 %, three scores": "wer < 0.01 and distillmos > 1.2 and pause < 0.95"}
#: Larger jobs are read whole only where a filter keeps few items.
WHOLE_ITEMS = 2_000_000
#: Scores of a row of items, which are spread evenly.
_SPREAD = "((CAST(idx AS bigint) * {} + {}) % 1000003) / 1000003.0"
_SCORES = ", ".join(
    [_SPREAD.format(48271, 11), f"1 + 4 * {_SPREAD.format(69621, 7)}", _SPREAD.format(39373, 5)]
)
#: Of the artifacts of a job.
_COLUMNS = (
    "key, sha256, bytes, duration_ms, sample_rate, samples, seed, epoch, meta, made_at, pack, pack_offset"
)
RATE, SAMPLES = 24_000, 1_200
#: A file has a limited number of names, so several files have the same content.
_NAMES_PER_FILE = 50_000
_PACK = "packs/all.tar"
#: Kind of a job -> the kinds of its artifacts, and its exports.
KINDS = {
    "audio": (("audio",), (
        "manifest", "espnet", "nemo", "openai-batch", "kaldi", "lhotse", "espnet-dataset", "shar", "webdataset", "parquet",
        "audiofolder", "ljspeech", "rttm", "lhotse, dialogues", "shar, dialogues", "nemo, dialogues", "webdataset, dialogues",
        "manifest, unique",
    )),
    "codes": (("codes",), (
        "jsonl", "webdataset", "parquet", "lhotse", "shar", "espnet-codes", "manifest", "interleaved",
    )),
    "timed": (("audio", "words"), ("ctm", "textgrid", "srt", "vtt")),
}  # fmt: skip
#: Options by what follows the format in the name of an export, or by the format.
_OPTIONS: dict[str, dict[str, Any]] = {
    "dialogues": {"dialogues": "stereo"},
    "unique": {"unique": True},
    "interleaved": {"tokenizer": str(ROOT / "tests/golden/speechlm/checkpoint/tokenizer.json")},
}
#: Export -> what `--formats` calls it: its format, and also its option, such as `lhotse dialogues`.
_CALLED = {one: {one.partition(",")[0], one.replace(",", "")} for _, made in KINDS.values() for one in made}
FORMATS = sorted(set().union(*_CALLED.values()))


class Figures(Result):
    """Values, each beside what it should be and what the machine does for less work."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.part, options, processor_name(), date=f"{datetime.now(UTC):%Y-%m-%d}")
        self.found["figures"] = self.found.pop("rows")

    def value(
        self, name: str, value: float, unit: str, aim: str = "", limit: float | None = None, of: str = ""
    ) -> None:
        """`limit` is what the machine does for the bare work `of` this name in the same run."""
        row: Row = {"name": name, "value": value, "unit": unit, "aim": aim, "limit": limit, "limit_name": of}
        self.add(row | {"share": value / limit if limit else None})


def most_mb() -> float:
    """The most MB that this process held. Unlike `ru_maxrss` it does not begin with the memory of the parent."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def ingest(folder: Path, url: str, items: int, **terms: Any) -> tuple[float, float, str]:
    """Ingests a file of dialogues of two spoken turns into a ledger. Seconds, the most MB that this process held, and
    the job."""
    source, texts = folder / "input.jsonl", cycle(SENTENCES)
    with source.open("w") as file:
        for number in range(items // 2):
            asked, answered = islice(texts, 2)
            messages = [["user", "text", asked], ["assistant", "text", f"{answered} {number}."]]
            row = {"example_id": f"dialogue-{number:09d}", "messages": messages}
            file.write(json.dumps(row | {"topic": number % 7, "score": number / 3, "source": "made"}) + "\n")
    store, spec = open_store((folder / "store").as_uri()), JobSpec("hibari", speak="all", **terms)
    with closing(Ledger(url)) as ledger:
        ledger.migrate()
        start = time.perf_counter()
        job = submit(load_settings(), ledger, store, str(source), spec).job.id
        return time.perf_counter() - start, most_mb(), job


def complete(url: str, rows: Iterable[str], changes: str = "") -> None:
    """Ends the one job of a ledger, all of whose items are done: `rows` are inserted, the job gets further `changes`. A
    colon in them is a colon."""
    with closing(Ledger(url)) as ledger:
        for statement in (
            *(f"INSERT INTO {row}" for row in rows),
            "UPDATE items SET state = 1, attempts = 1",
            "UPDATE shards SET state = 'done', n_done = n_items",
            f"UPDATE jobs SET state = 'completed', finished_at = 1{changes}",
        ):
            with ledger.engine.begin() as connection:
                connection.execute(sa.text(statement.replace(":", "\\:")))
        # PostgreSQL would else read the rows of before too.
        with ledger.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(
                "VACUUM ANALYZE" if ledger.engine.dialect.name == "postgresql" else "ANALYZE"
            )


def status_ms(url: str, job: str) -> float:
    """Median milliseconds of the ledger's status call."""
    with closing(Ledger(url)) as ledger:
        return 1000 * statistics.median(timeit.repeat(partial(ledger.status, job), number=1, repeat=21))


def filters(figures: Figures, folder: Path, url: str, items: int, name: str) -> None:
    """Ingest and status of a job; then the time to the first page and the whole time of each filter, beside those without
    one."""
    folder.mkdir()
    checks = {"quality": Quality(meters={"asr": {}, "distillmos": {}}), "pack": True}
    seconds, megabytes, job = in_new_process(partial(ingest, **checks), folder, url, items)
    about = f"{items:,} items, {name}"
    figures.value(f"ingest of {about}", items / seconds, "items/s")
    figures.value(f"memory of the ingest of {about}", megabytes, "MB RSS", "<= 200")
    figures.value(f"status at {about}", status_ms(url, job), "ms", "<= 50")
    facts = f"'{'0' * 64}', 500, 10000, 24000, 240000, idx, 1, '{{}}', 1.0, NULL, NULL"
    complete(url, (
        f"artifacts (job_no, idx, kind, {_COLUMNS}) SELECT job_no, idx, 'audio', 'audio/' || example_id, {facts} FROM items",
        f"scores (job_no, idx, draw, wer, distillmos, pause) SELECT job_no, idx, 0, {_SCORES} FROM items",
    ))  # fmt: skip
    with closing(Ledger(url)) as ledger:

        def read(text: str, whole: bool) -> tuple[float, float, int]:
            start = time.perf_counter()
            rows = ledger.items(job, where=parse_where(text) if text else None)
            first = next(rows, None)
            first_ms = (time.perf_counter() - start) * 1000
            count = int(first is not None) + (sum(1 for _ in rows) if whole else 0)
            return first_ms, time.perf_counter() - start, count

        read("wer < 0.001", True)
        bare_ms, bare_seconds, _ = read("", items <= WHOLE_ITEMS)
        figures.value(f"no filter, first page, {about}", bare_ms, "ms")
        bare = bare_seconds if items <= WHOLE_ITEMS else None
        for share, text in FILTERS.items():
            first_ms, seconds, kept = read(text, True)
            figures.value(f"keeps {share}, first page, {about}", first_ms, "ms", text, bare_ms, "no filter")
            whole = f"keeps {share}, all pages, {about}"
            figures.value(whole, seconds, "s", f"{kept:,} items", bare, "no filter")


def made_contents() -> dict[str, bytes]:
    """The content of the artifacts of a kind, which all items share."""
    sound = io.BytesIO()
    soundfile.write(sound, np.sin(np.arange(SAMPLES) / 20).astype(np.float32), RATE, format="WAV")
    codec = CodecIdentity("made", "0" * 64, 12.5, RATE, (1024, 1024))
    codes = StoredCodes(np.arange(24, dtype=np.int16).reshape(12, 2), None, codec)
    words = msgspec.json.encode([Word("Hello", 0.0, 0.02), Word("there.", 0.02, 0.05)])
    return {"audio": sound.getvalue(), "codes": codes.encoded(), "words": words + b"\n"}


def exportable_job(folder: Path, items: int, kind: str) -> str:
    """Makes a job with `items` items that are done, in a new folder; returns its id."""
    url, contents, rows = f"sqlite:///{folder}/ledger.sqlite", made_contents(), list[str]()
    _, _, job = ingest(folder, url, items)
    pack, changes = b"", {"codes": ", '$.output', 'codes'", "words": ", '$.timestamps', json('true')"}
    for name in KINDS[kind][0]:
        data, extension = contents[name], {"audio": "wav", "codes": "safetensors", "words": "json"}[name]
        key = f"'jobs/{job}/{name}/' || printf('%05d/%09d', idx / 10000, idx) || '-d.{extension}'"
        place = "NULL, NULL"
        if name == "audio":
            _link(folder / "store" / "jobs" / job / name, data, items)
        else:
            place, pack = f"'{_PACK}', {len(pack)}", pack + data
        facts = f"'{hashlib.sha256(data).hexdigest()}', {len(data)}, 50, {RATE}, {SAMPLES}, idx, 1, '{{}}', 1.0, {place}"
        columns = f"job_no, idx, kind, {_COLUMNS}"
        rows.append(f"artifacts ({columns}) SELECT job_no, idx, '{name}', {key}, {facts} FROM items")
    open_store((folder / "store").as_uri()).put(_PACK, pack + b"end")
    spec = "".join(changes.get(name, "") for name in KINDS[kind][0])
    complete(url, rows, spec and f", spec = json_set(spec{spec})")
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


def exported(folder: str, job: str, export: str) -> tuple[float, float, int]:
    """Exports a job. Seconds, the most MB that this process held, and the number of items."""
    (name, _, option), to = export.partition(", "), Path(folder, f"export-{os.getpid()}")
    options = _OPTIONS.get(option or name, {})
    store = open_store(Path(folder, "store").as_uri())
    with closing(Ledger(f"sqlite:///{folder}/ledger.sqlite")) as ledger:
        start = time.perf_counter()
        stored = StoredJob(ledger, store, ledger.job(job))
        items = export_jobs([stored], name, str(to), part_bytes=20_000_000, **options).items
        # The removal of a folder holds all its names.
        found = time.perf_counter() - start, most_mb(), items
    shutil.rmtree(to) if to.is_dir() else to.unlink()
    return found


def exports(figures: Figures, folder: Path, options: Any) -> None:
    """Memory and speed of each export."""
    for kind, items in product(options.kinds, options.items):
        place = folder / f"{kind}-{items}"
        noted = place / "job"
        if not noted.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            noted.write_text(exportable_job(place, items, kind))
        for name in KINDS[kind][1]:
            if not options.formats or _CALLED[name] & {*options.formats}:
                seconds, megabytes, written = in_new_process(exported, str(place), noted.read_text(), name)
                figures.value(f"memory of {name}, {items:,} items of {kind}", megabytes, "MB RSS")
                figures.value(f"speed of {name}, {items:,} items of {kind}", written / seconds, "items/s")


def words(figures: Figures, options: Any) -> None:
    """Errors of the times of words."""
    from pipelines.hibari.pipeline import HibariPipeline
    from pipelines.serving.word_estimates import WordEstimates
    from worker.quality.meters import Utterance, open_meter

    meter, voice = open_meter("align", {"model": options.align}), HibariPipeline()
    errors, scores = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def compare(name: str, found: Iterable[Word], exact: Iterable[Word]) -> None:
        for one, other in zip(found, exact, strict=True):
            errors[name] += abs(one.start_s - other.start_s), abs(one.end_s - other.end_s)

    lines = (ROOT / "examples" / "evening.jsonl").read_text(encoding="utf-8").splitlines()
    messages = (message for line in lines for message in json.loads(line)["messages"])
    for seed, (_, _, text) in enumerate(islice(messages, options.texts)):
        request = SynthesisRequest("words", (Message("user", "text", text),), seed=seed, timestamps=True)
        speech = submit_request(voice, request).result()
        samples, rate = speech.samples, speech.sample_rate
        longest = max(speech.words[:-1], key=lambda word: word.end_s - word.start_s)
        begin, end = (round(at * rate) for at in (longest.start_s, longest.end_s))
        for name, parts in (
            ("good", (samples,)),
            ("skipped", (samples[:begin], samples[end:])),
            ("repeated", (samples[:end], samples[begin:])),
        ):
            reading: Any = meter.measure(Utterance(np.concatenate(parts), rate, text))["align"]
            scores[name].append(reading[0])
            if name == "good":
                compare("aligner", reading.words, speech.words)
        estimates, step = WordEstimates(rate), round(CHUNK_SECONDS * rate)
        chunks = [samples[at : at + step] for at in range(0, len(samples), step)]
        found = [word for chunk in chunks for word in estimates.add(chunk, text, False)]
        compare("estimates", [*found, *estimates.add(samples[:0], text, True)], speech.words)
    voice.close()
    for name, seconds in errors.items():
        median, most = 1000 * np.percentile(seconds, (50, 95))
        figures.value(f"median error of {name}, {len(seconds):,} edges", float(median), "ms")
        figures.value(f"95 % of errors of {name}, {len(seconds):,} edges", float(most), "ms")
    bound = np.quantile(scores.pop("good"), 1 - GOOD_SHARE)
    for name, measured in scores.items():
        figures.value(f"{name} words found", float(np.mean(np.array(measured) < bound)), "share")


def main() -> int:
    made = parser(__doc__, "")
    made.add_argument("part", choices=PARTS)
    options = read(
        made, items=int, postgres=os.environ.get("BENCH_POSTGRES", ""), kinds=[*KINDS], formats=str,
        kept="", align=str(ROOT / "tests" / "support" / "aligner"), texts=1_000, known={"kinds": KINDS, "formats": FORMATS},
    )  # fmt: skip
    figures = Figures(options)
    with tempfile.TemporaryDirectory(prefix="nightjar-bench-") as name:
        folder = Path(name)
        if options.part == "exports":
            options.items = options.items or [10_000, 100_000, 1_000_000]
            exports(figures, Path(options.kept or folder), options)
        elif options.part == "words":
            words(figures, options)
        for items in (options.items or [1_000_000]) if options.part == "filters" else ():
            place = f"filters{items}"
            filters(figures, folder / place, f"sqlite:///{folder}/{place}.sqlite", items, "SQLite")
            if options.postgres:
                url = new_database(options.postgres, place)
                filters(figures, folder / f"{place}p", url, items, "PostgreSQL")
    return figures.end("name", "value", "unit", "aim", "limit", "limit_name", "share")


if __name__ == "__main__":
    raise SystemExit(main())
