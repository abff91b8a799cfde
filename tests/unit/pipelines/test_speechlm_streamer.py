"""The end of a SpeechLM stream, without its engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import AudioChunk, Done, Event, Failed, Speech
from pipelines.results import SpeechPipeline
from pipelines.speechlm.pipeline import SpeechLmStreamer, SpeechLmUtterance


class _Engine:
    """Keeps who listens to its requests, and which requests were given up."""

    def __init__(self) -> None:
        self.receivers: list[Any] = []
        self.cancelled: list[Any] = []

    def submit(self, _request: object, receiver: object) -> None:
        self.receivers.append(receiver)

    def cancel(self, request: object) -> None:
        self.cancelled.append(request)


class _Started:
    """One stream, and all that is heard of it."""

    def __init__(self, stage: CodecStage) -> None:
        self.engine, self.heard = _Engine(), list[Event]()
        engine, streamer_class = self.engine, SpeechLmStreamer
        pipeline = SpeechPipeline[Any, Any](engine, stage, streamer_class, SpeechLmUtterance)  # pyright: ignore[reportArgumentType]
        wanted, info = SimpleNamespace(request_id="one"), SimpleNamespace(sample_rate=24_000)
        self.handle = pipeline._begin(wanted, info, self.heard.append, stream=True)  # pyright: ignore[reportPrivateUsage]
        (self.streamer,) = engine.receivers


@pytest.fixture
def started() -> Iterator[_Started]:
    decoder: Any = SimpleNamespace(new_state=lambda: None, utterances=None)
    stage: CodecStage = CodecStage(decoder)
    yield _Started(stage)
    stage.close()


def test_a_client_that_hangs_up_ends_the_stream(started: _Started) -> None:
    started.handle.cancel()
    assert len(started.engine.cancelled) == 1
    assert started.heard == []


def test_a_stream_ends_with_its_speech(started: _Started, caplog: pytest.LogCaptureFixture) -> None:
    started.streamer.done(Speech(np.ones(3, np.float32), 24_000, "", "Yes.", {}))
    text, audio, end = started.heard
    assert isinstance(text, AudioChunk)
    assert text.text == "Yes."
    assert isinstance(audio, AudioChunk)
    assert len(audio.samples) == 3
    assert isinstance(end, Done)
    assert (end.speech.text_out, len(end.speech.samples)) == ("Yes.", 0)
    assert not caplog.records


def test_a_stream_ends_with_its_error(started: _Started, caplog: pytest.LogCaptureFixture) -> None:
    error = SynthesisError(ErrorCode.SYNTH_NO_EOS, "The speech did not end.")
    started.streamer.failed(error)
    assert started.heard == [Failed(error)]
    assert not caplog.records
