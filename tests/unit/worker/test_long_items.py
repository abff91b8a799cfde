"""An item whose text is too long for one request: its parts are drawn, checked and drawn again one by one, and
joined to one artifact."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np
import pytest
import soundfile

from jobs.checks import Bound, Quality
from jobs.encoded_audio import FADE_MS, KEPT_MS
from jobs.export.items import read_words
from jobs.ingest import SubmitOptions
from jobs.ledger.records import QUARANTINE, WORDS, ItemState
from jobs.repair import repair_objects, reproduce
from jobs.spec import item_seed
from jobs.verify import ObjectCheck
from pipelines.errors import ErrorCode
from pipelines.request import Capabilities, Speech, SynthesisRequest, Word
from pipelines.text_units import MAX_LONG_CHARACTERS, PARAGRAPH_PAUSE, SENTENCE_PAUSE, parts_of, unit_seed
from tests.support.fakes import SAMPLE_RATE, FakePipeline, sine, spoken_text
from tests.support.worker_rig import Build, Rig

SENTENCE = "The rain fell on the quiet street, and nobody walked along it until the bells rang at six. "
PARAGRAPH = SENTENCE * 30
TEXT = "\n\n".join([PARAGRAPH, PARAGRAPH])
PARTS = [part.text for part in parts_of(TEXT.strip(), Capabilities())]
CUT = SAMPLE_RATE * KEPT_MS // 1000


class Redraws(FakePipeline):
    """Speaks; parts in `bad` get a pause of two seconds in their first draws, as many as said."""

    def __init__(self, bad: dict[int, int] | None = None, seeds: dict[int, list[int]] | None = None) -> None:
        super().__init__()
        self.bad = bad or {}
        self.spoken: list[tuple[int, int]] = []

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        text = spoken_text(request)
        if text not in PARTS:
            return super().submit(request)
        part = int(request.request_id.rpartition("-")[2])
        self.spoken.append((part, request.seed))
        future: Future[Speech] = Future()
        samples = sine(text, request.seed)
        draws = sum(1 for one, _ in self.spoken if one == part)
        if draws <= self.bad.get(part, 0):
            # Of another length in each draw, since draws that fail alike are not repeated.
            samples = np.concatenate([samples, np.zeros((1 + draws) * SAMPLE_RATE, np.float32), samples])
        future.set_result(Speech(samples, SAMPLE_RATE, text))
        return future


def item_seeds(draw: int = 0) -> int:
    return item_seed(0, "item-0", 0, draw)


def joined(draws: Sequence[int]) -> np.ndarray:
    """What the parts sound like if these draws of them are kept, as 16-bit samples."""
    samples: list[np.ndarray] = []
    half = len(PARTS) // 2
    for number, (text, draw) in enumerate(zip(PARTS, draws, strict=True)):
        one = sine(text, unit_seed(item_seeds(draw), number))
        fade = SAMPLE_RATE * FADE_MS // 1000
        one[:fade] *= np.arange(fade) / fade
        one[-fade:] *= np.arange(fade)[::-1] / fade
        pause = PARAGRAPH_PAUSE if number == half - 1 else SENTENCE_PAUSE
        gap = 0 if number == len(PARTS) - 1 else round(pause * SAMPLE_RATE) - 2 * CUT
        samples += [one, np.zeros(gap)]
    return np.rint(np.concatenate(samples) * 32767).astype(np.int16)


def heard(rig: Rig, marked: str = "") -> np.ndarray:
    (data,) = [data for key, data in rig.audio().items() if marked in key]
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == SAMPLE_RATE
    return samples


def quality(**asked: Any) -> Quality:
    return Quality(bounds={"pause": Bound(high=1.0)}, **asked)


def test_parts_are_one_artifact_with_pauses_and_without_clicks(build: Build) -> None:
    rig = build()
    job = rig.submit([TEXT, "short"])
    rig.run_next()
    row, other = rig.items(job)
    assert (row.state, other.state) == (ItemState.DONE, ItemState.DONE)
    assert row.artifact is not None
    data = rig.audio()[row.artifact.key]
    samples, _ = soundfile.read(io.BytesIO(data), dtype="int16")
    expected = joined([0] * len(PARTS))
    assert len(PARTS) > 10
    assert np.abs(samples.astype(int) - expected).max() <= 1
    assert (row.artifact.samples, row.artifact.bytes) == (len(samples), len(data))
    # A jump from one sample to the next is never larger than the tone's own.
    assert (
        np.abs(np.diff(samples.astype(int))).max()
        <= 1.01 * np.abs(np.diff(sine("x" * 400, 399) * 32767)).max()
    )
    assert row.artifact.seed == item_seeds()


@pytest.mark.parametrize("audio_format", ["flac", "mp3", "opus"])
def test_formats_of_joined_audio_are_whole_files(build: Build, audio_format: str) -> None:
    rig = build()
    job = rig.submit([TEXT], format=audio_format, sample_rate=24_000)
    rig.run_next()
    (artifact,) = [row.artifact for row in rig.items(job)]
    assert artifact is not None
    info = soundfile.info(io.BytesIO(rig.audio()[artifact.key]))
    assert (info.frames, info.samplerate) == (artifact.samples, 24_000)
    assert info.duration == pytest.approx(len(joined([0] * len(PARTS))) / SAMPLE_RATE, abs=0.01)


def test_a_bad_part_alone_is_drawn_again(build: Build) -> None:
    rig = build(pipeline=Redraws({3: 1, 7: 2}), lease_seconds=30)
    job = rig.submit([TEXT], quality=quality())
    rig.run_next()
    draws = [{3: 1, 7: 2}.get(number, 0) for number in range(len(PARTS))]
    assert np.abs(heard(rig).astype(int) - joined(draws)).max() <= 1
    again = [part for part, _ in rig.pipeline.spoken]  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(again) == sorted([*range(len(PARTS)), 3, 7, 7])
    found = [row.draw for row in rig.ledger.draws(job.id)]
    assert [(one.draw, one.code, one.kept, one.seed) for one in found] == [
        (0, ErrorCode.QA_SILENCE, False, item_seeds(0)),
        (1, ErrorCode.QA_SILENCE, False, item_seeds(1)),
        (2, None, True, item_seeds(2)),
    ]
    assert [one.scores["pause"].detail[:7] for one in found[:2]] == ["part 4:", "part 8:"]
    assert [one.scores["pause"].passed for one in found] == [False, False, True]


def test_a_part_that_stays_bad_fails_the_item_and_is_kept_in_quarantine(build: Build) -> None:
    rig = build(pipeline=Redraws({5: 9}))
    job = rig.submit([TEXT, "other"], quality=quality())
    rig.run_next()
    row, other = rig.items(job)
    assert (row.state, row.error_code, other.state) == (
        ItemState.FAILED,
        ErrorCode.QA_SILENCE,
        ItemState.DONE,
    )
    assert str(row.error_message).startswith(f"Part 6 of {len(PARTS)}: None of 3 draws passed")
    (bad,) = rig.ledger.artifacts(job.id, QUARANTINE)
    assert bad.samples == 2 * len(sine(PARTS[5], 0)) + 2 * SAMPLE_RATE
    lost = [one for one, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert lost == []
    # A retry draws all parts anew.
    rig.pipeline.bad = {}  # pyright: ignore[reportAttributeAccessIssue]
    assert rig.ledger.retry(job.id, None) == 1
    rig.run_next()
    artifact = rig.items(job)[0].artifact
    assert artifact is not None
    assert np.abs(heard(rig, artifact.key).astype(int) - joined([3] * len(PARTS))).max() <= 1
    assert [row.draw.draw for row in rig.ledger.draws(job.id) if row.draw.kept] == [3, 0]


def test_the_parts_after_a_refused_one_are_not_spoken(build: Build) -> None:
    rig = build()
    marked = TEXT.replace("bells", "[[refuse:input.unpronounceable]]", 1)
    job = rig.submit([marked, "other"])
    rig.run_next()
    row, other = rig.items(job)
    assert (row.error_code, other.state) == (ErrorCode.INPUT_UNPRONOUNCEABLE, ItemState.DONE)
    assert len(rig.pipeline.submitted) == 2


def test_order_and_shards_do_not_change_a_long_item(build: Build) -> None:
    class Reversed(FakePipeline):
        """Ends its requests in the reverse order."""

        held: ClassVar[list[tuple[SynthesisRequest, Future[Speech]]]] = []

        def submit(self, request: SynthesisRequest) -> Future[Speech]:
            future: Future[Speech] = Future()
            self.held.append((request, future))
            if len(self.held) == len(PARTS) + 2:
                for one, waiting in reversed(self.held):
                    text = spoken_text(one)
                    waiting.set_result(Speech(sine(text, one.seed), SAMPLE_RATE, text))
            return future

    rig = build(pipeline=Reversed())
    job = rig.submit([TEXT, "one", "two"])
    rig.run_next()
    artifact = rig.items(job)[0].artifact
    assert artifact is not None
    assert np.abs(heard(rig, artifact.key).astype(int) - joined([0] * len(PARTS))).max() <= 1


def test_a_part_that_takes_too_long_ends_the_item_and_cancels_the_others(build: Build) -> None:
    rig = build(pipeline=FakePipeline(slots=4), item_timeout_seconds=0.2)
    job = rig.submit([TEXT.replace("bells", "[[hang]]", 1), "other"], options=SubmitOptions(max_attempts=1))
    rig.run_next()
    row, other = rig.items(job)
    assert (row.error_code, other.state) == (ErrorCode.SYNTH_TIMEOUT, ItemState.DONE)
    assert str(row.error_message).startswith(f"Part 1 of {len(PARTS)}: ")
    assert len(rig.pipeline.aborted) >= 1


def test_a_long_item_is_verified_and_made_again(build: Build) -> None:
    rig = build(pipeline=Redraws({3: 1}))
    job = rig.submit([TEXT], quality=quality())
    rig.run_next()
    kept = rig.audio()
    rig.pipeline.bad = {}  # pyright: ignore[reportAttributeAccessIssue]
    assert [one.match for one in reproduce(rig.ledger, rig.store, job, rig.pipeline, 1)] == ["same"]
    rig.store.delete(next(iter(kept)))
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert repair_objects(rig.ledger, rig.store, job, rig.pipeline, lost) == {"same": 1}
    assert rig.audio() == kept


def test_texts_have_a_maximum(build: Build) -> None:
    rig = build()
    longest = (SENTENCE * (MAX_LONG_CHARACTERS // len(SENTENCE) + 1))[: MAX_LONG_CHARACTERS - 1] + "."
    job = rig.submit([longest, longest + "."])
    assert [(line.line, line.code) for line in rig.ledger.rejected_lines(job.id)] == [
        (2, ErrorCode.INPUT_TOO_LONG)
    ]


def test_words_of_a_long_item_have_the_times_of_the_joined_audio(build: Build) -> None:
    class Tells(FakePipeline):
        """Says one word in each part, between 0.1 and 0.2 s, after a second of silence."""

        def submit(self, request: SynthesisRequest) -> Future[Speech]:
            text, future = spoken_text(request), Future[Speech]()
            samples = np.concatenate([np.zeros(SAMPLE_RATE, np.float32), sine(text, request.seed)])
            said = (Word(request.request_id.rpartition("-")[2], 1.1, 1.2),)
            future.set_result(Speech(samples, SAMPLE_RATE, text, words=said))
            return future

    rig = build(pipeline=Tells())
    job = rig.submit([TEXT])
    rig.run_next()
    (artifact,) = rig.ledger.artifacts(job.id, WORDS)
    ((*words,),) = read_words(rig.store.get(artifact.key))
    starts, at = [], 0.0
    for number, text in enumerate(PARTS):
        pause = PARAGRAPH_PAUSE if number == len(PARTS) // 2 - 1 else SENTENCE_PAUSE
        starts.append(at + 0.1 + KEPT_MS / 1000)
        # The kept silence before a part is part of the pause.
        at += len(sine(text, 0)) / SAMPLE_RATE + KEPT_MS / 1000 + pause - 2 * KEPT_MS / 1000
    assert [word.text for word in words] == [str(number) for number in range(len(PARTS))]
    assert [word.start_s for word in words] == pytest.approx(starts, abs=0.001)
