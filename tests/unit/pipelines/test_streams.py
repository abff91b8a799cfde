"""Streams as calls: what a listener hears and in which order, and that its end is the request's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.request import AudioChunk, Capabilities, Done, Event, Failed, Listener, Speech
from pipelines.tokens import Tokens
from tests.support.rounds import wait_until
from tests.unit.pipelines.test_results import REQUEST, Chunks, Host, Pipeline, Ramp, say


class Heard:
    """What one listener heard."""

    def __init__(self) -> None:
        self.outcomes: list[Event] = []
        self.over = threading.Event()
        self.threads: set[str] = set()

    def __call__(self, outcome: Event) -> None:
        self.outcomes.append(outcome)
        self.threads.add(threading.current_thread().name)
        if not isinstance(outcome, AudioChunk):
            self.over.set()

    @property
    def samples(self) -> list[float]:
        return np.concatenate([one.samples for one in self.outcomes if isinstance(one, AudioChunk)]).tolist()

    @property
    def errors(self) -> list[NightjarError]:
        return [one.error for one in self.outcomes if isinstance(one, Failed)]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def pipeline(host: Host) -> Iterator[Pipeline]:
    pipeline = Pipeline(host, CodecStage(Ramp()), Chunks)
    yield pipeline
    pipeline.close()


def chunk(*values: float) -> AudioChunk:
    return AudioChunk(np.array(values, np.float32), 10)


DONE = Done(Speech(np.zeros(0, np.float32), 10))
LATE = Failed(SynthesisError(ErrorCode.SYNTH_ENGINE, "broken"))


def test_a_listener_hears_chunks_until_the_final_one_on_the_codecs_thread(
    host: Host, pipeline: Pipeline
) -> None:
    host.play = say([1, 2, 3])
    heard = Heard()
    pipeline.start(REQUEST, heard, stream=True)
    assert heard.over.wait(240)
    assert heard.samples == [code for code in (1, 2, 3) for _ in range(4)] + [1]
    end = heard.outcomes[-1]
    assert isinstance(end, Done)
    assert (len(end.speech.samples), end.speech.text, end.speech.meta) == (
        0,
        "text",
        {"engine": "none", "frames": 3, "finish": "stop"},
    )
    assert heard.threads == {"codec-chunks"}
    assert pipeline.stats().audio_seconds == len(heard.samples) / 100


def test_a_stream_that_is_ended_leaves_the_engine(host: Host, pipeline: Pipeline) -> None:
    receivers: list[Any] = []
    host.play = receivers.append
    heard = Heard()
    handle = pipeline.start(REQUEST, heard, stream=True)
    handle.cancel()
    handle.cancel()
    assert len(host.cancelled) == 1
    wait_until(lambda: receivers)
    receivers[0].failed(SynthesisError(ErrorCode.SYNTH_ABORTED, "too late"))
    assert not heard.outcomes


@pytest.mark.parametrize("ending", ["final", "cancelled", "failed"])
def test_however_a_stream_ends_the_codecs_state_goes_back(host: Host, ending: str) -> None:
    class State(list[int]):
        closed = False

        def close(self) -> None:
            self.closed = True

    class Ending(Chunks):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._state = states[-1]

    states = [State()]
    receivers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    host.play = say([1, 2, 3]) if ending == "final" else receivers.put
    pipeline, heard = Pipeline(host, CodecStage(Ramp()), Ending), Heard()
    handle = pipeline.start(REQUEST, heard, stream=True)
    assert ending == "final" or not states[0].closed
    if ending == "cancelled":
        handle.cancel()
    elif ending == "failed":
        receivers.get(timeout=240).failed(SynthesisError(ErrorCode.SYNTH_ENGINE, "broken"))
    assert ending == "cancelled" or heard.over.wait(240)
    pipeline.close()
    assert states[0].closed


def test_nothing_follows_the_end_whichever_thread_it_comes_from() -> None:
    """An error while a chunk is being heard waits for it; what comes later is dropped."""
    hearing, go_on = threading.Event(), threading.Event()
    heard = Heard()

    def slow(outcome: Event) -> None:
        hearing.set()
        assert go_on.wait(240)
        heard(outcome)

    ends: list[bool] = []
    listener = Listener(slow, ends.append)
    speaking = threading.Thread(target=listener, args=(chunk(1, 2),))
    speaking.start()
    assert hearing.wait(240)
    failing = threading.Thread(target=listener, args=(LATE,))
    failing.start()
    go_on.set()
    speaking.join()
    failing.join()
    listener(chunk(3))
    listener(DONE)
    listener.cancel()
    assert [type(one) for one in heard.outcomes] == [AudioChunk, Failed]
    assert ends == [False]
    assert listener.seconds == 0.2


def test_an_error_after_the_end_is_not_heard() -> None:
    heard = Heard()
    ends: list[bool] = []
    listener = Listener(heard, ends.append)
    listener(chunk(1))
    listener(DONE)
    listener(LATE)
    assert [type(one) for one in heard.outcomes] == [AudioChunk, Done]
    assert ends == [True]


def test_a_fault_of_a_stream_is_its_error(host: Host, pipeline: Pipeline) -> None:
    host.play = lambda receiver: receiver.finished(Tokens([1], "length"))
    heard = Heard()
    pipeline.start(REQUEST, heard, stream=True)
    assert heard.over.wait(240)
    assert [one.code for one in heard.errors] == [ErrorCode.SYNTH_NO_EOS]


def test_a_whole_utterance_that_is_cancelled_is_not_heard_and_leaves_the_engine(
    host: Host, pipeline: Pipeline
) -> None:
    receivers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    host.play = receivers.put
    heard = Heard()
    handle = pipeline.start(REQUEST, heard)
    with pytest.raises(ValueError, match="complete"):
        handle.append("more", final=True)
    handle.cancel()
    receivers.get(timeout=240).finished(Tokens([1], "stop"))
    assert [request.request_id for request in host.cancelled] == ["one"]
    pipeline.close()
    assert not heard.outcomes
    assert pipeline.stats().audio_seconds == 0


def test_what_a_model_cannot_do_is_refused_before_the_engine_hears_of_it(
    host: Host, pipeline: Pipeline
) -> None:
    pipeline.capabilities = Capabilities()
    for request, stream in ((REQUEST, True), (replace(REQUEST, text_open=True), False)):
        with pytest.raises(InputError) as caught:
            pipeline.start(request, Heard(), stream)
        assert caught.value.code is ErrorCode.INPUT_UNSUPPORTED
    assert not host.entering.is_set()
