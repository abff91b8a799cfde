"""A finished job in a real ledger and store, for tests of exports."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile

from jobs.export import ExportReport, StoredJob, export_jobs
from jobs.ingest import SubmitOptions, submit
from jobs.layout import item_key, pack_index_name, pack_key
from jobs.ledger import Ledger
from jobs.ledger.records import Artifact, Done, Draw, Failed, JobSpec, Lease, Score, WorkerInfo
from jobs.settings import Settings
from jobs.store import ObjectStore
from pipelines.errors import ErrorCode
from tests.support.times import with_times
from worker.pack_writer import PackBuilder

SAMPLE_RATE = 24_000


def export(
    ledger: Ledger, store: ObjectStore, job_id: str, format: str, to: str, **options: Any
) -> ExportReport:
    """Writes one job, see `export_jobs`."""
    return export_jobs([StoredJob(ledger, store, ledger.job(job_id))], format, to, **options)


Line = Mapping[str, Any]


@dataclass
class Finished:
    """A job whose items are made, apart from those that fail."""

    folder: Path
    ledger: Ledger
    store: ObjectStore
    job_id: str
    #: Key -> file, in index order.
    audio: dict[str, bytes]


def draws_of(index: int) -> tuple[Draw, ...]:
    """Two draws of an item of a job with checks. The kept one, which is the first of even indexes, has the
    item's seed."""
    refused = {
        "clipped": Score(0.5, False),
        "wer": Score(0.9, False, "noise"),
        "cer": Score(0.8, False, "noise"),
    }
    kept = {
        "clipped": Score(0.0, True),
        "wer": Score(index / 100, True, f"heard {index}"),
        "cer": Score(index / 200, True, f"heard {index}"),
    }
    return tuple(
        Draw(number, index + 2**62, None, kept=True, duration_ms=1000, scores=kept)
        if number == index % 2
        else Draw(number, index, ErrorCode.QA_WER, kept=False, duration_ms=900, scores=refused)
        for number in range(2)
    )


def wav(number: int, seconds: float = 1.0, format: str = "WAV", sample_rate: int = SAMPLE_RATE) -> bytes:
    """A file that no other number has: as many samples more than `seconds` as the number says."""
    buffer = io.BytesIO()
    samples = (
        np.random.default_rng(number)
        .uniform(-0.1, 0.1, round(seconds * sample_rate) + number)
        .astype(np.float32)
    )
    soundfile.write(buffer, samples, sample_rate, format=format)
    return buffer.getvalue()


def run_all(
    ledger: Ledger,
    store: ObjectStore,
    job_id: str,
    seconds: float = 1.0,
    *,
    mended: bool = False,
    sample_rate: int = SAMPLE_RATE,
    scores: Mapping[str, Mapping[str, float]] | None = None,
    shards: int = 1_000_000,
) -> dict[str, bytes]:
    """Plays the worker: every item gets audio, apart from those whose id begins with `fails` unless that
    is mended.

    `scores`: by example id, what checks measured. `shards`: only so many are run.
    """
    audio: dict[str, bytes] = {}
    spec = ledger.job(job_id).spec
    extension = spec.format
    ledger.register_worker(WorkerInfo("w", "host", 1, "", "", "0", 8))
    while tickets := ledger.take_ready(min(10, shards)):
        shards -= len(tickets)
        for ticket in tickets:
            lease = ledger.claim(ticket, "w", 60)
            assert lease is not None
            if spec.pack is True:
                audio |= _run_packed(ledger, store, lease, seconds, sample_rate, mended=mended)
                continue
            for index, (example_id, _) in lease.open_items.items():
                if example_id.startswith("fails") and not mended:
                    ledger.commit(lease.ticket, [Failed(index, ErrorCode.SYNTH_NO_EOS, "no end")])
                    continue
                key, data = (
                    item_key(job_id, "audio", index, example_id, extension),
                    wav(index, seconds, extension.upper(), sample_rate),
                )
                info = store.put(key, data)
                audio[key] = data
                samples = round(seconds * sample_rate) + index
                made = Artifact(
                    index,
                    "audio",
                    key,
                    info.sha256,
                    info.bytes,
                    round(1000 * seconds),
                    sample_rate,
                    samples,
                    index + 2**62,
                )
                draws = draws_of(index) if spec.quality is not None else ()
                if scores is not None:
                    values = {name: Score(value) for name, value in scores.get(example_id, {}).items()}
                    draws = (Draw(0, made.seed, None, True, made.duration_ms, values),)
                ledger.commit(lease.ticket, [Done(index, (made,), draws=draws)])
            ledger.finish_shard(lease.ticket)
    return dict(sorted(audio.items()))


def _run_packed(
    ledger: Ledger, store: ObjectStore, lease: Lease, seconds: float, sample_rate: int, *, mended: bool
) -> dict[str, bytes]:
    """As `run_all` for one shard of a job with packs: its items are in one pack."""
    builder, extension = PackBuilder(), lease.job.spec.format
    audio: dict[str, bytes] = {}
    made: list[Artifact] = []
    for index, (example_id, _) in lease.open_items.items():
        if example_id.startswith("fails") and not mended:
            ledger.commit(lease.ticket, [Failed(index, ErrorCode.SYNTH_NO_EOS, "no end")])
            continue
        key, data = (
            item_key(lease.job.id, "audio", index, example_id, extension),
            wav(index, seconds, extension.upper(), sample_rate),
        )
        audio[key], sha256 = data, hashlib.sha256(data).hexdigest()
        samples = round(seconds * sample_rate) + index
        facts = (key, sha256, len(data), round(1000 * seconds), sample_rate, samples, index + 2**62)
        one = Artifact(index, "audio", *facts)
        made.append(msgspec.structs.replace(one, pack_offset=builder.add(one, data, example_id)))
    whole = builder.finish(pack_index_name(lease.job.id, lease.shard_no, lease.epoch, 0))
    pack = pack_key(lease.job.id, lease.shard_no, lease.epoch, 0, hashlib.sha256(whole).hexdigest())
    store.put(pack, whole)
    ledger.commit(lease.ticket, [Done(one.index, (msgspec.structs.replace(one, pack=pack),)) for one in made])
    ledger.finish_shard(lease.ticket)
    return audio


def finished_job(
    folder: Path,
    store: ObjectStore,
    lines: Sequence[Line],
    spec: JobSpec | None = None,
    seconds: float = 1.0,
    sample_rate: int = SAMPLE_RATE,
) -> Finished:
    """Submits the lines and makes them; shards of two items."""
    ledger = Ledger(f"sqlite:///{folder}/ledger.sqlite")
    ledger.migrate()
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    settings = with_times(Settings(), shard_items=2)
    job_id = submit(
        settings, ledger, store, str(source), spec or JobSpec("hibari"), options=SubmitOptions(name="A night")
    ).job.id
    return Finished(
        folder, ledger, store, job_id, run_all(ledger, store, job_id, seconds, sample_rate=sample_rate)
    )


def datasets_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, without its audio encoder: it imports that for paths too, and uses nothing of it.
    torchcodec itself needs ffmpeg."""
    library = pytest.importorskip(
        "datasets", reason="NOT READ BACK: the library datasets is missing; it comes with the extra `dev`."
    )
    if not library.config.TORCHCODEC_AVAILABLE:
        encoders = ModuleType("torchcodec.encoders")
        encoders.AudioEncoder = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
        monkeypatch.setitem(sys.modules, "torchcodec.encoders", encoders)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return library
