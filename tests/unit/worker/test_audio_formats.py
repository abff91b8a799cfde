"""Jobs with an audio format and a sample rate of their own: the worker's files, and the same ones made
again."""

from __future__ import annotations

import io
import threading
from concurrent.futures import Future
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import soundfile

from jobs.checks import quality_of
from jobs.encoded_audio import encoder
from jobs.ledger.records import Job
from jobs.provenance import provenance_key, put_provenance, read_records, reopened_model
from jobs.repair import CLOSE_DB, repair_objects, reproduce
from jobs.verify import ObjectCheck
from pipelines.audio_format import CONTENT_TYPES
from pipelines.errors import ErrorCode
from pipelines.request import EngineInfo, Speech, SynthesisRequest
from tests.support.fakes import SAMPLE_RATE, FakePipeline
from tests.support.times import with_times
from tests.support.worker_rig import Build
from worker import result_writer

TEXTS = [f"Sentence number {number} of this job." for number in range(5)]


@pytest.mark.parametrize(
    ("audio_format", "container"), [("mp3", "MP3"), ("opus", "OGG"), ("flac", "FLAC"), ("wav", "WAV")]
)
def test_a_job_has_the_format_and_the_rate_that_it_asks_for(
    build: Build, audio_format: str, container: str
) -> None:
    rig = build()
    job = rig.submit(TEXTS, format=audio_format, sample_rate=24_000, quality=quality_of("basic"))
    assert rig.run_next() == "finished"
    for item in rig.items(job):
        assert item.artifact is not None
        assert item.artifact.key.endswith(f".{audio_format}")
        data = rig.store.objects[item.artifact.key][0]
        file = soundfile.info(io.BytesIO(data))
        assert (file.format, file.samplerate, file.frames) == (container, 24_000, item.artifact.samples)
        assert (item.artifact.sample_rate, item.artifact.bytes) == (24_000, len(data))
        assert item.artifact.duration_ms == round(item.artifact.samples / 24)
    assert set(rig.audio()) == {item.artifact.key for item in rig.items(job) if item.artifact}
    assert CONTENT_TYPES.keys() >= {audio_format}


@pytest.mark.parametrize("audio_format", ["mp3", "opus"])
def test_bytes_do_not_depend_on_the_job_the_shard_or_the_order(build: Build, audio_format: str) -> None:
    rig = build()
    rig.settings = with_times(rig.settings, shard_items=2)
    made: list[dict[str, str]] = []
    for order, pack in ((1, False), (-1, False), (1, True)):
        folder = rig.folder / f"{order}{pack}"
        folder.mkdir()
        path = folder / "in.jsonl"
        lines = [
            f'{{"example_id": "item-{n}", "messages": [["user", "text", "{text}"]]}}\n'
            for n, text in enumerate(TEXTS)
        ]
        path.write_text("".join(lines[::order]))
        job = rig.submit_file(path, format=audio_format, sample_rate=12_000, pack=pack or msgspec.UNSET)
        assert job.total_shards == 3
        while not rig.status(job).job.state.final:
            rig.run_next()
        made.append({item.example_id: item.artifact.sha256 for item in rig.items(job) if item.artifact})
    assert made[0] == made[1] == made[2]
    assert len(set(made[0].values())) == len(TEXTS)


def test_checks_hear_the_speech_at_its_own_rate(build: Build) -> None:
    """What is too high for the stored file is no silence."""

    class High(FakePipeline):
        def submit(self, request: SynthesisRequest) -> Future[Speech]:
            speech = super().submit(request).result()
            wave = 0.3 * np.sin(2 * np.pi * 6_000 / SAMPLE_RATE * np.arange(len(speech.samples)))
            future: Future[Speech] = Future()
            future.set_result(replace(speech, samples=wave.astype(np.float32)))
            return future

    rig = build(pipeline=High())
    job = rig.submit(TEXTS[:2], format="wav", sample_rate=8_000, quality=quality_of("basic"))
    rig.run_next()
    assert rig.status(job).items.done == 2
    for data in rig.audio().values():
        samples, rate = soundfile.read(io.BytesIO(data))
        assert (rate, np.abs(samples[200:-200]).max() < 0.01) == (8_000, True)


def test_lossy_formats_are_encoded_on_more_threads(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_writer, "LOSSY_THREADS", 7)
    rig = build()
    for audio_format, count in (("flac", result_writer.FOLDER_THREADS), ("opus", 7)):
        rig.writer.ensure_threads(rig.store, audio_format)
        together = threading.Barrier(count + 1)

        def meet(together: threading.Barrier = together) -> None:
            together.wait(240)

        for _ in range(count):
            rig.writer.threads.submit(meet)
        together.wait(240)


@pytest.mark.parametrize("audio_format", ["mp3", "opus"])
def test_what_is_lost_is_made_again_with_the_same_bytes(build: Build, audio_format: str) -> None:
    rig = build()
    job = rig.submit(TEXTS, format=audio_format, sample_rate=24_000, quality=quality_of("basic"))
    rig.run_next()
    before = rig.audio()
    first, second, *_ = sorted(before)
    del rig.store.objects[first]
    rig.store.objects[second] = (b"", {})
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert repair_objects(rig.ledger, rig.store, job, rig.pipeline, lost) == {"same": 2}
    assert rig.audio() == before
    assert [one.match for one in reproduce(rig.ledger, rig.store, job, rig.pipeline, 3)] == ["same"] * 3


class Rounding(FakePipeline):
    """Makes the same speech with noise below it, as another batch size of a GPU may."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self._level = level

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        speech = super().submit(request).result()
        noise = np.random.default_rng(1).standard_normal(len(speech.samples)).astype(np.float32)
        rounded: Future[Speech] = Future()
        rounded.set_result(
            replace(speech, samples=speech.samples + noise * np.float32(self._level * speech.samples.std()))
        )
        return rounded


@pytest.mark.parametrize("audio_format", ["wav", "mp3", "opus"])
def test_rounding_is_close_in_a_lossy_format_too_and_other_speech_is_not(
    build: Build, audio_format: str
) -> None:
    rig = build()
    job = rig.submit(TEXTS, format=audio_format)
    rig.run_next()
    assert {one.match for one in reproduce(rig.ledger, rig.store, job, Rounding(1e-3), 5)} <= {
        "close",
        "same",
    }
    assert {one.match for one in reproduce(rig.ledger, rig.store, job, Rounding(1.0), 5)} == {"different"}
    assert CLOSE_DB[True] < CLOSE_DB[False]


def test_provenance_names_the_encoder_and_another_one_is_noticed(build: Build) -> None:
    rig = build()
    info = EngineInfo(slots=2, device="cpu", dtype="float32")
    opus, wav = rig.submit(TEXTS[:1], format="opus"), rig.submit(TEXTS[:1])
    for job in (opus, wav):
        put_provenance(rig.store, job, info)
    assert [record.encoder for record in read_records(rig.store, opus)] == [encoder("opus")]
    assert b"encoder" not in rig.store.get(f"jobs/{wav.id}/provenance.json"), (
        "the record of such a job is what it always was"
    )

    def said(job: Job) -> list[str]:
        notes: list[str] = []
        with reopened_model(rig.store, job, notes.append):
            return [note for note in notes if "encoder" in note]

    assert said(opus) == said(wav) == []
    # The libraries of the worker that ran another job were others.
    (record,) = read_records(rig.store, opus)
    other = "libsndfile 9, libopus 2"
    moved = rig.submit(TEXTS[:1], format="opus", sample_rate=24_000)
    rig.store.put(
        provenance_key(moved.id), msgspec.json.encode(msgspec.structs.replace(record, encoder=other))
    )
    (note,) = said(moved)
    assert f"was {other} and is {encoder('opus')} here" in note
    put_provenance(rig.store, moved, info)
    assert [record.encoder for record in read_records(rig.store, moved)] == [other, encoder("opus")]


def test_a_rate_that_no_one_could_foresee_fails_its_item_with_what_to_use(build: Build) -> None:
    """A model that makes another rate than its card says."""

    class OtherRate(FakePipeline):
        def submit(self, request: SynthesisRequest) -> Future[Speech]:
            future: Future[Speech] = Future()
            future.set_result(replace(super().submit(request).result(), sample_rate=44_100))
            return future

    rig = build(pipeline=OtherRate())
    job = rig.submit(TEXTS[:1], format="opus")
    rig.run_next()
    (item,) = rig.items(job)
    assert item.error_code is ErrorCode.CONFIG_INVALID
    assert "44100 Hz" in (item.error_message or "")
    assert rig.audio() == {}
