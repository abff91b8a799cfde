"""The end of a SpeechLM stream, without its engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import AudioChunk, Speech
from pipelines.results import SpeechPipeline
from pipelines.speechlm.results import SpeechLmFuture, SpeechLmStreamer
from pipelines.streams import End


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

    def __init__(self, stage: CodecStage[Any]) -> None:
        self.engine, self.heard = _Engine(), list[AudioChunk | NightjarError]()
        engine, streamer_class = self.engine, SpeechLmStreamer
        pipeline = SpeechPipeline[Any, Any](engine, stage, SpeechLmFuture, streamer_class)  # pyright: ignore[reportArgumentType]
        wanted, info = SimpleNamespace(request_id="one"), SimpleNamespace(sample_rate=24_000)
        self.end: End = pipeline._start(wanted, info, self.heard.append)  # pyright: ignore[reportPrivateUsage]
        (self.streamer,) = engine.receivers


@pytest.fixture
def started() -> Iterator[_Started]:
    decoder: Any = SimpleNamespace(new_state=lambda: None, utterances=None)
    stage: CodecStage[Any] = CodecStage(decoder)
    yield _Started(stage)
    stage.close()


def test_a_client_that_hangs_up_ends_the_stream(started: _Started) -> None:
    started.end()
    assert len(started.engine.cancelled) == 1
    assert started.streamer.future.exception().code is ErrorCode.SYNTH_ABORTED
    assert started.heard == []


def test_a_stream_ends_with_its_speech(started: _Started, caplog: pytest.LogCaptureFixture) -> None:
    started.streamer.future.set_result(Speech(np.ones(3, np.float32), 24_000, "", "Yes.", {}))
    assert [chunk.final for chunk in started.heard if isinstance(chunk, AudioChunk)] == [False, False, True]
    assert not caplog.records


def test_a_stream_ends_with_its_error(started: _Started, caplog: pytest.LogCaptureFixture) -> None:
    error = SynthesisError(ErrorCode.SYNTH_NO_EOS, "The speech did not end.")
    started.streamer.failed(error)
    assert started.heard == [error]
    assert not caplog.records
