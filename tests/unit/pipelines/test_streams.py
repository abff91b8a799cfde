"""Streams as calls: what a listener hears and in which order, and that its end is the request's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import AudioChunk, SynthesisRequest
from pipelines.streams import Listener, Playback, start_stream
from pipelines.tokens import Tokens, TokenUtteranceFuture
from tests.support.fakes import FakePipeline
from tests.unit.pipelines.test_results import REQUEST, Host, Pipeline, Ramp, Streamer, say


class Heard:
    """What one listener heard."""

    def __init__(self) -> None:
        self.outcomes: list[AudioChunk | NightjarError] = []
        self.over = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, outcome: AudioChunk | NightjarError) -> None:
        self.outcomes.append(outcome)
        self.threads.add(threading.current_thread().name)
        if isinstance(outcome, NightjarError) or outcome.final:
            self.over.set()

    @property
    def samples(self) -> list[float]:
        return np.concatenate([one.samples for one in self.outcomes if isinstance(one, AudioChunk)]).tolist()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def pipeline(host: Host) -> Iterator[Pipeline]:
    pipeline = Pipeline(host, CodecStage(Ramp()), TokenUtteranceFuture, Streamer)
    yield pipeline
    pipeline.close()


def chunk(*values: float, final: bool = False) -> AudioChunk:
    return AudioChunk(np.array(values, np.float32), 10, final)


def test_a_listener_hears_chunks_until_the_final_one_on_the_codecs_thread(host: Host, pipeline: Pipeline) -> None:
    host.play = say([1, 2, 3])
    heard = Heard()
    pipeline.start_stream(REQUEST, heard)
    assert heard.over.wait(240)
    assert heard.samples == [code for code in (1, 2, 3) for _ in range(4)] + [1]
    assert [isinstance(one, AudioChunk) and one.final for one in heard.outcomes][-2:] == [False, True]
    assert heard.threads == {"codec-chunks"}
    assert not pipeline._receivers
    assert pipeline.stats().audio_seconds == len(heard.samples) / 100


def test_a_stream_that_is_ended_leaves_the_engine(host: Host, pipeline: Pipeline) -> None:
    receivers: list[Any] = []
    host.play = receivers.append
    heard = Heard()
    end = pipeline.start_stream(REQUEST, heard)
    end()
    end()
    assert len(host.cancelled) == 1
    assert not pipeline._receivers
    wait = threading.Event()
    while not receivers:
        wait.wait(0.01)
    receivers[0].failed(SynthesisError(ErrorCode.SYNTH_ABORTED, "too late"))
    assert not heard.outcomes


def test_an_abort_is_the_one_error_of_a_stream(host: Host, pipeline: Pipeline) -> None:
    receivers: list[Any] = []
    host.play = receivers.append
    heard = Heard()
    end = pipeline.start_stream(REQUEST, heard)
    pipeline.abort("one")
    end()
    assert [type(one) for one in heard.outcomes] == [SynthesisError]
    assert not pipeline._receivers


@pytest.mark.parametrize("ending", ["final", "cancelled", "aborted", "failed"])
def test_however_a_stream_ends_the_codecs_state_goes_back(host: Host, ending: str) -> None:
    class State(list[int]):
        closed = False

        def close(self) -> None:
            self.closed = True

    class Ending(Streamer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._state = states[-1]

    states = [State()]
    receivers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    host.play = say([1, 2, 3]) if ending == "final" else receivers.put
    pipeline, heard = Pipeline(host, CodecStage(Ramp()), TokenUtteranceFuture, Ending), Heard()
    end = pipeline.start_stream(REQUEST, heard)
    assert ending == "final" or not states[0].closed
    if ending == "cancelled":
        end()
    elif ending == "aborted":
        pipeline.abort("one")
    elif ending == "failed":
        receivers.get(timeout=240).failed(SynthesisError(ErrorCode.SYNTH_ENGINE, "broken"))
    assert ending == "cancelled" or heard.over.wait(240)
    pipeline.close()
    assert states[0].closed


def test_nothing_follows_the_end_whichever_thread_it_comes_from() -> None:
    """An error while a chunk is being heard waits for it; what comes later is dropped."""
    hearing, go_on = threading.Event(), threading.Event()
    heard = Heard()

    def slow(outcome: AudioChunk | NightjarError) -> None:
        hearing.set()
        assert go_on.wait(240)
        heard(outcome)

    ends: list[bool] = []
    listener = Listener(slow, ends.append)
    speaking = threading.Thread(target=listener, args=(chunk(1, 2),))
    speaking.start()
    assert hearing.wait(240)
    failing = threading.Thread(target=listener, args=(SynthesisError(ErrorCode.SYNTH_ENGINE, "broken"),))
    failing.start()
    go_on.set()
    speaking.join()
    failing.join()
    listener(chunk(3, final=True))
    listener.close()
    assert [type(one) for one in heard.outcomes] == [AudioChunk, SynthesisError]
    assert ends == [False]
    assert listener.seconds == 0.2


def test_an_error_after_the_final_chunk_is_not_heard() -> None:
    heard = Heard()
    ends: list[bool] = []
    listener = Listener(heard, ends.append)
    listener(chunk(1, final=True))
    listener(SynthesisError(ErrorCode.SYNTH_ENGINE, "late"))
    assert [type(one) for one in heard.outcomes] == [AudioChunk]
    assert ends == [True]


def test_a_pipeline_without_calls_streams_on_a_thread() -> None:
    heard = Heard()
    start_stream(FakePipeline(), SynthesisRequest("r", REQUEST.messages), heard)
    assert heard.over.wait(240)
    assert len(heard.outcomes) == 1
    assert heard.threads == {"stream"}


def test_a_pipeline_that_pauses_is_ended_by_an_abort() -> None:
    class Slow(FakePipeline):
        ended = threading.Event()
        closed = threading.Event()

        def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
            try:
                yield chunk(1)
                assert self.ended.wait(240)
                yield chunk(2)
            finally:
                self.closed.set()

        def abort(self, request_id: str) -> None:
            self.ended.set()

    class First(Heard):
        first = threading.Event()

        def __call__(self, outcome: AudioChunk | NightjarError) -> None:
            super().__call__(outcome)
            self.first.set()

    pipeline, heard = Slow(), First()
    end = start_stream(pipeline, REQUEST, heard)
    assert heard.first.wait(240)
    end()
    assert pipeline.closed.wait(240)
    assert len(heard.outcomes) == 1


def test_a_pipeline_without_a_final_chunk_gets_one() -> None:
    class Endless(FakePipeline):
        def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
            yield chunk(1)

    heard = Heard()
    start_stream(Endless(), REQUEST, heard)
    assert heard.over.wait(240)
    assert [isinstance(one, AudioChunk) and one.final for one in heard.outcomes] == [False, True]


def test_a_player_waits_for_chunks_that_are_late() -> None:
    player = Playback()
    assert [player.add(at, 1.0) for at in (10.0, 10.1, 12.0, 12.5, 15.0, 15.1)] == [0, 0, 0, 0, 1.0, 0]
    assert player.add(18.5, 1.0) == 1.5, "it goes on when the late chunk comes, not when it was due"


def test_a_fault_of_a_stream_is_its_error(host: Host, pipeline: Pipeline) -> None:
    class Broken(FakePipeline):
        def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
            raise ZeroDivisionError

    heard = Heard()
    start_stream(Broken(), REQUEST, heard)
    assert heard.over.wait(240)
    assert [one.code for one in heard.outcomes if isinstance(one, NightjarError)] == [ErrorCode.SYNTH_ENGINE]
    host.play = lambda receiver: receiver.finished(Tokens([1], "length"))
    heard = Heard()
    pipeline.start_stream(REQUEST, heard)
    assert heard.over.wait(240)
    assert [one.code for one in heard.outcomes if isinstance(one, NightjarError)] == [ErrorCode.SYNTH_NO_EOS]
    assert not pipeline._receivers
