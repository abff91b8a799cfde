"""Speech of the embedded voice while it is made: what is heard, in which order, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.hibari.pipeline import DUE_SECONDS, STREAM_GAIN, HibariPipeline, Utterance
from pipelines.request import (
    AudioChunk,
    Done,
    Event,
    Failed,
    Generation,
    Listener,
    Message,
    SynthesisRequest,
    stream,
    submit,
)

TEXT = "The birch canoe slid on the smooth planks. Glue the sheet to the dark blue background! Is it easy to tell the depth of a well?"
LONG = "These days a chicken leg is a rare dish, and nobody knows why. " * 40
#: The grapheme model has no words for it, which only reading tells.
UNREADABLE = "1" * 200
Outcome = Event
NOBODY = Listener(print, lambda _done: None)


def request(text: str, request_id: str = "a", seed: int = 7, **settings: Any) -> SynthesisRequest:
    return SynthesisRequest(request_id, (Message("user", "text", text),), Generation(**settings), seed)


@pytest.fixture(scope="module")
def voice() -> Iterator[HibariPipeline]:
    pipeline = HibariPipeline(threads=2)
    yield pipeline
    pipeline.close()


def joined(chunks: list[AudioChunk]) -> NDArray[np.float32]:
    return np.concatenate([chunk.samples for chunk in chunks])


class Held(HibariPipeline):
    """A voice of one thread that makes one piece at a time, when told, and keeps the order of the requests
    whose pieces were made."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.begun = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        super().__init__(threads=1)

    def go(self, pieces: int = 1000) -> None:
        self._go.release(pieces)

    def _advance(self, utterance: Utterance) -> bool:
        self.begun.release()
        assert self._go.acquire(timeout=240)
        self.order.append(utterance.request.request_id)
        return super()._advance(utterance)


def test_a_stream_is_the_whole_speech_but_for_one_gain(voice: HibariPipeline) -> None:
    whole = submit(voice, request(TEXT)).result(240).samples
    chunks = list(stream(voice, request(TEXT)))
    assert [len(chunk.samples) > 0 for chunk in chunks] == [True, True, True]
    streamed = joined(chunks)
    assert len(streamed) == len(whole)
    gain = float(np.abs(streamed).max() / np.abs(whole).max())
    assert 0.8 < gain < 1.25
    np.testing.assert_allclose(streamed, whole * np.float32(gain), atol=1e-6)
    np.testing.assert_array_equal(streamed, joined(list(stream(voice, request(TEXT)))))


def test_pieces_meet_in_silence(voice: HibariPipeline) -> None:
    without_spaces = "supercalifragilistic" * 40
    for text in (TEXT, LONG, without_spaces):
        chunks = list(stream(voice, request(text)))
        assert len(chunks) > 1
        for chunk in chunks:
            assert float(np.abs(chunk.samples[[0, -1]]).max()) < 1e-3
            assert float(np.abs(chunk.samples).max()) > 0.1


class LoudVoice:
    """Makes pieces of a given peak."""

    def __init__(self, *peaks: float) -> None:
        self._peaks = iter(peaks)

    def timed(self, ids: list[int], generator: object) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        samples = np.zeros(2400, np.float32)
        samples[1200] = -next(self._peaks)
        return samples, np.linspace(0, 0.1, len(ids))


def spoken(voice: LoudVoice, pieces: int) -> tuple[Utterance, list[Outcome]]:
    heard: list[Outcome] = []
    utterance = Utterance(request("x"), "x", Listener(heard.append, lambda _done: None), True)
    utterance.pieces = iter([[0, 1, 0]] * pieces)
    while utterance.advance(voice):  # type: ignore[arg-type]
        continue
    return utterance, heard


def test_what_is_too_loud_is_scaled_and_not_clipped() -> None:
    _, heard = spoken(LoudVoice(0.3, 0.9, 2.5, 0.3), 4)
    peaks = [float(np.abs(chunk.samples).max()) for chunk in heard if isinstance(chunk, AudioChunk)]
    assert peaks == pytest.approx([0.3 * STREAM_GAIN, 0.97, 0.97, 0.3 * STREAM_GAIN], abs=1e-5)


def test_nothing_is_heard_of_a_text_without_a_voice() -> None:
    utterance, heard = spoken(LoudVoice(0.02, 0.02), 2)
    assert heard == []
    with pytest.raises(SynthesisError) as caught:
        utterance.finish()
    assert caught.value.code is ErrorCode.SYNTH_SILENT
    utterance, heard = spoken(LoudVoice(0.02, 0.3), 2)
    assert utterance.finish().meta["frames"] == 16
    assert [len(chunk.samples) for chunk in heard if isinstance(chunk, AudioChunk)] == [2400, 2400]


@pytest.mark.parametrize(
    ("text", "settings", "code"),
    [
        ("你好", {}, ErrorCode.INPUT_UNPRONOUNCEABLE),
        ("...", {}, ErrorCode.INPUT_UNPRONOUNCEABLE),
        ("Hello.", {"cfg": 2.0}, ErrorCode.INPUT_UNSUPPORTED),
        ("a" * 5001, {}, ErrorCode.INPUT_TOO_LONG),
    ],
)
def test_a_stream_is_refused_where_it_is_asked_for(
    voice: HibariPipeline, text: str, settings: dict[str, Any], code: ErrorCode
) -> None:
    for ask in (
        lambda: next(stream(voice, request(text, **settings))),
        lambda: voice.start(request(text, **settings), print, stream=True),
    ):
        with pytest.raises(InputError) as caught:
            ask()
        assert caught.value.code is code


def test_an_error_comes_after_what_was_heard_and_nothing_comes_after_it(voice: HibariPipeline) -> None:
    chunks = stream(voice, request(LONG, max_seconds=6.0))
    assert len(next(chunks).samples) > 24_000
    with pytest.raises(InputError) as caught:
        list(chunks)
    assert caught.value.code is ErrorCode.INPUT_TOO_LONG
    heard: SimpleQueue[Outcome] = SimpleQueue()
    voice.start(request(f"Hello there. {UNREADABLE}"), heard.put, stream=True)
    first, last = heard.get(timeout=240), heard.get(timeout=240)
    assert isinstance(first, AudioChunk)
    assert isinstance(last, Failed)
    assert last.error.code is ErrorCode.INPUT_UNPRONOUNCEABLE
    assert list(stream(voice, request("Hello.")))
    assert heard.empty()


def test_streams_come_before_whole_utterances_and_first_pieces_first() -> None:
    voice = Held()
    try:
        whole = submit(voice, request(TEXT, "whole"))
        assert voice.begun.acquire(timeout=240)
        heard: SimpleQueue[Outcome] = SimpleQueue()
        for name in ("one", "two"):
            voice.start(request(TEXT, name), heard.put, stream=True)
        voice.go()
        assert whole.result(240).duration_ms > 5000
        # A sentence puts a listener ahead; then the whole utterance goes on.
        assert voice.order[:3] == ["whole", "one", "two"]
        assert sum(isinstance(one, Done) for one in [heard.get(timeout=240) for _ in range(8)]) == 2
    finally:
        voice.go()
        voice.close()


def test_a_stream_that_is_ended_says_nothing_more() -> None:
    voice = Held()
    try:
        heard: SimpleQueue[Outcome] = SimpleQueue()
        others: SimpleQueue[Outcome] = SimpleQueue()
        handle = voice.start(request(LONG, "runs"), heard.put, stream=True)
        assert voice.begun.acquire(timeout=240)
        waiting = voice.start(request(LONG, "waits"), heard.put, stream=True)
        voice.start(request("Hello.", "stays"), others.put, stream=True)
        waiting.cancel()
        voice.go(1)
        assert isinstance(heard.get(timeout=240), AudioChunk)
        handle.cancel()
        handle.cancel()
        voice.go()
        assert isinstance(others.get(timeout=240), AudioChunk)
        assert isinstance(others.get(timeout=240), Done)
        # One more piece may have been under way.
        assert heard.empty() or isinstance(heard.get(), AudioChunk)
        assert heard.empty()
        _until(lambda: voice.stats().running == voice.stats().waiting == 0)
        assert "waits" not in voice.order
        assert voice.order.count("runs") <= 2
    finally:
        voice.go()
        voice.close()


def test_closing_the_iterator_ends_the_stream(voice: HibariPipeline) -> None:
    chunks = stream(voice, request(LONG))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    _until(lambda: voice.stats().running == voice.stats().waiting == 0)


def test_a_stream_of_a_closed_voice_ends_with_its_error() -> None:
    voice = Held()
    running: SimpleQueue[Outcome] = SimpleQueue()
    waiting: SimpleQueue[Outcome] = SimpleQueue()
    voice.start(request(LONG, "runs"), running.put, stream=True)
    assert voice.begun.acquire(timeout=240)
    voice.start(request(LONG, "waits"), waiting.put, stream=True)
    closing = threading.Thread(target=voice.close)
    closing.start()
    ended = waiting.get(timeout=240)
    assert isinstance(ended, Failed)
    assert ended.error.code is ErrorCode.SYNTH_ABORTED
    voice.go()
    while isinstance(ended := running.get(timeout=240), AudioChunk):
        continue
    assert isinstance(ended, Failed)
    assert ended.error.code is ErrorCode.SYNTH_ABORTED
    closing.join(240)
    assert running.empty()
    assert waiting.empty()
    with pytest.raises(SynthesisError):
        voice.start(request("Hello."), running.put, stream=True)


def test_a_listener_that_fails_ends_its_stream_and_no_other(
    voice: HibariPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_heard: Outcome) -> None:
        raise RuntimeError("gone")

    voice.start(request(LONG, "broken"), broken, stream=True)
    assert list(stream(voice, request("Hello.")))
    _until(lambda: voice.stats().running == voice.stats().waiting == 0)
    assert caplog.text.count("the listener of a request failed") == 1


def test_many_streams_share_the_threads(voice: HibariPipeline) -> None:
    alone = joined(list(stream(voice, request(TEXT))))
    heard: dict[str, SimpleQueue[Outcome]] = {f"stream-{number}": SimpleQueue() for number in range(40)}
    for name, queue in heard.items():
        voice.start(request(TEXT, name), queue.put, stream=True)
    for queue in heard.values():
        chunks: list[AudioChunk] = []
        while isinstance(event := queue.get(timeout=240), AudioChunk):
            chunks.append(event)
        assert isinstance(event, Done)
        np.testing.assert_array_equal(joined(chunks), alone)


def test_first_pieces_come_then_who_runs_dry_then_whole_utterances_then_those_ahead() -> None:
    def queued(arrival: int, deadline: float | None = None) -> Utterance:
        utterance = Utterance(request("x"), "x", NOBODY, stream=deadline is not None)
        utterance.deadline, utterance.arrival = deadline or 0.0, arrival
        return utterance

    now = 100.0
    old, new = queued(1), queued(2)
    ahead, due, dry = (queued(3 + n, now + lead) for n, lead in enumerate((DUE_SECONDS + 0.1, 1.0, -5.0)))
    first, second = queued(6, 0.0), queued(7, 0.0)
    order = sorted((new, ahead, old, due, second, dry, first), key=lambda one: one.priority(now))
    assert order == [first, second, dry, due, old, new, ahead]


def _until(condition: Any, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
