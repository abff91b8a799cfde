"""The embedded voice behind the pipeline protocol; the real model throughout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from pipelines.audio import loudness
from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.hibari.pipeline import HibariPipeline, Utterance
from pipelines.hibari.text import EnglishReader
from pipelines.request import Event, Generation, Listener, Message, Pipeline, Speech, SynthesisRequest, submit

SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Rice is often served in round bowls.",
    "Hello. Two sentences here.",
)
LONG = "These days a chicken leg is a rare dish, and nobody knows why. " * 40


def request(text: str, request_id: str = "a", seed: int = 7, **settings: object) -> SynthesisRequest:
    generation = Generation(**settings)  # type: ignore[arg-type]
    return SynthesisRequest(request_id, (Message("user", "text", text),), generation, seed)


@pytest.fixture(scope="module")
def voice() -> Iterator[HibariPipeline]:
    pipeline = HibariPipeline(threads=2)
    yield pipeline
    pipeline.close()


def speak(pipeline: Pipeline, text: str, /, **settings: object) -> Speech:
    return submit(pipeline, request(text, **settings)).result(240)  # type: ignore[arg-type]


def test_speaks_at_the_loudness_of_the_house(voice: HibariPipeline) -> None:
    for text in SENTENCES:
        speech = speak(voice, text)
        assert speech.sample_rate == 24_000
        assert speech.samples.dtype == np.float32
        assert speech.text == text
        assert 1_000 < speech.duration_ms < 4_000
        assert loudness(speech.samples, 24_000) == pytest.approx(-23, abs=0.1)
        assert float(np.abs(speech.samples).max()) <= 0.97 + 1e-6
        assert speech.meta["loudness_lufs"] == -23.0


def test_same_request_same_samples_whatever_runs_beside_it(voice: HibariPipeline) -> None:
    alone = {(text, seed): speak(voice, text, seed=seed).samples for text in SENTENCES for seed in (1, 2)}
    crowd = [
        (text, seed, submit(voice, request(text, seed=seed)))
        for _ in range(4)
        for text in SENTENCES
        for seed in (1, 2)
    ]
    for text, seed, future in crowd:
        np.testing.assert_array_equal(future.result(240).samples, alone[text, seed])
    assert not np.array_equal(alone[SENTENCES[0], 1], alone[SENTENCES[0], 2])


@pytest.mark.parametrize(
    ("text", "settings", "code"),
    [
        (" \u200b", {}, ErrorCode.INPUT_EMPTY_TEXT),
        ("你好", {}, ErrorCode.INPUT_UNPRONOUNCEABLE),
        ("Hello 你好", {}, ErrorCode.INPUT_UNPRONOUNCEABLE),
        ("Hello.", {"temperature": 0.5}, ErrorCode.INPUT_UNSUPPORTED),
        ("Hello.", {"top_k": 5}, ErrorCode.INPUT_UNSUPPORTED),
        ("Hello.", {"cfg": 2.0}, ErrorCode.INPUT_UNSUPPORTED),
        ("Hello.", {"instruct": "Shout."}, ErrorCode.INPUT_UNSUPPORTED),
        ("Hello.", {"voice": "emma"}, ErrorCode.INPUT_UNKNOWN_VOICE),
        ("Hello.", {"language": "Chinese"}, ErrorCode.INPUT_UNKNOWN_LANGUAGE),
        ("a" * 5001, {}, ErrorCode.INPUT_TOO_LONG),
    ],
)
def test_refuses_at_submit(
    voice: HibariPipeline, text: str, settings: dict[str, object], code: ErrorCode
) -> None:
    done = voice.stats().requests_done
    with pytest.raises(InputError) as caught:
        submit(voice, request(text, **settings))  # type: ignore[arg-type]
    assert caught.value.code is code
    assert voice.stats().requests_done == done


def test_takes_its_own_names(voice: HibariPipeline) -> None:
    assert speak(voice, "Hello.", voice="HEART", language="english").duration_ms > 300


def test_max_seconds_is_a_limit(voice: HibariPipeline) -> None:
    assert speak(voice, SENTENCES[0], max_seconds=10.0).duration_ms < 10_000
    with pytest.raises(InputError) as caught:
        speak(voice, LONG, max_seconds=2.0)
    assert caught.value.code is ErrorCode.INPUT_TOO_LONG


def test_near_silence_is_an_error(voice: HibariPipeline) -> None:
    dash = Utterance(request("—"), "—", Listener(print, lambda _done: None))
    reader = EnglishReader().voice
    dash.pieces = iter([reader.ids("—")])
    while dash.advance(reader):
        continue
    with pytest.raises(SynthesisError) as caught:
        dash.finish()
    assert caught.value.code is ErrorCode.SYNTH_SILENT


def test_stats_count_speech(voice: HibariPipeline) -> None:
    before = voice.stats()
    speech = speak(voice, "Hello there.")
    after = voice.stats()
    assert after.requests_done - before.requests_done == 1
    assert after.audio_seconds - before.audio_seconds == pytest.approx(len(speech.samples) / 24_000)
    assert after.frames - before.frames == len(speech.samples) // 300


class Busy(HibariPipeline):
    """A voice that stays in the request `runs` until that is cancelled, as in a text of many hours."""

    def _advance(self, utterance: Utterance) -> bool:
        if utterance.request.request_id == "runs":
            _until(lambda: self._is_over(utterance))
        return super()._advance(utterance)


def test_closing_gives_up_a_text_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    voice = HibariPipeline(threads=1)
    begun = threading.Event()

    def pieces(_text: str, given_up: Callable[[], bool], *_: object) -> list[list[int]]:
        begun.set()
        for _ in range(2000):
            if given_up():
                return []
            time.sleep(0.01)
        raise AssertionError("it was not given up")

    monkeypatch.setattr(voice._reader, "pieces", pieces)
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(submit, voice, request(LONG, "reads"))
        assert begun.wait(240)
        voice.close()
        with pytest.raises(SynthesisError) as caught:
            submitted.result(240)
        assert caught.value.code is ErrorCode.SYNTH_ABORTED
    voice.close()


def test_cancel_ends_what_runs_and_what_waits() -> None:
    voice = Busy(threads=1)
    try:
        heard: list[Event] = []
        running, waiting = (
            voice.start(request(LONG, "runs"), heard.append),
            voice.start(request("Hello.", "waits"), heard.append),
        )
        last = submit(voice, request("Hello.", "stays"))
        _until(lambda: voice.stats().running == 1)
        waiting.cancel()
        running.cancel()
        running.cancel()
        assert last.result(240).duration_ms > 300
        assert not heard
    finally:
        voice.close()


def test_submit_waits_for_room() -> None:
    voice = Busy(threads=1, waiting_room=2)
    try:
        busy = voice.start(request(LONG, "runs"), print)
        futures: list[Future[Speech]] = []
        _until(lambda: voice.stats().running == 1)
        futures += [submit(voice, request("Hello.", str(number))) for number in range(2)]
        blocked = threading.Thread(target=lambda: futures.append(submit(voice, request("Hello.", "last"))))
        blocked.start()
        blocked.join(0.2)
        assert blocked.is_alive()
        assert voice.stats().waiting == 2
        busy.cancel()
        blocked.join(240)
        assert all(future.result(240).duration_ms > 300 for future in futures)
        assert len(futures) == 3
    finally:
        voice.close()


def test_close_fails_what_is_left_and_may_be_repeated() -> None:
    voice = Busy(threads=1, waiting_room=1)
    running = submit(voice, request(LONG, "runs"))
    _until(lambda: voice.stats().running == 1)
    waiting = submit(voice, request("Hello.", "waits"))
    caught: list[ErrorCode] = []

    def blocked() -> None:
        try:
            submit(voice, request("Hello.", "blocked"))
        except SynthesisError as error:
            caught.append(error.code)

    thread = threading.Thread(target=blocked)
    thread.start()
    time.sleep(0.05)
    voice.close()
    voice.close()
    thread.join(240)
    for future in (running, waiting):
        with pytest.raises(SynthesisError):
            future.result(240)
    with pytest.raises(SynthesisError):
        submit(voice, request("Hello."))
    assert caught == [ErrorCode.SYNTH_ABORTED]


def _until(condition: object, seconds: float = 240.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
