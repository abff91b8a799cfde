"""A stream of a server, as the event loop waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipelines.errors import ErrorCode, InputError
from pipelines.request import (
    AudioChunk,
    Done,
    EngineInfo,
    EngineState,
    EngineStats,
    Generation,
    Message,
    SynthesisRequest,
)
from pipelines.serving import ServeOptions
from pipelines.serving.admission import AdmissionQueue
from pipelines.serving.model import ServedModel
from tests.support.serving_kit import card_of
from tests.support.stream_voice import SAMPLE_RATE, StreamVoice

REQUEST = SynthesisRequest("one", (Message("user", "text", "Hello."),), Generation(), 1)


class _Refusing:
    """Takes its time over a request, such as for its recording, and refuses it."""

    name, info = "refusing", EngineInfo()
    starts_at_once = False

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()

    def stats(self) -> EngineStats:
        return EngineStats()

    def start(self, *_: object) -> Any:
        self.asked.set()
        self.answer.wait()
        raise InputError(
            ErrorCode.INPUT_REFERENCE_SILENT,
            "The reference audio is silent.",
            "Give a recording with a clear voice.",
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_slot_is_free_after_a_client_left_and_its_request_was_refused(stream: bool) -> None:
    async def leave_early() -> None:
        pipeline: Any = _Refusing()
        model = ServedModel(card_of(StreamVoice()), lambda: pipeline, ServeOptions(("fake",)))
        await model.open()
        gate = AdmissionQueue(slots=1, waiting_room=1)
        permit = await gate.admit()

        async def listen() -> None:
            async with aclosing(model.chunks(REQUEST, permit, stream=stream)) as chunks:
                async for _ in chunks:
                    pass

        listening = asyncio.create_task(listen())
        await asyncio.to_thread(pipeline.asked.wait)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        permit.disconnect()
        assert gate.running == 1, "the pipeline still has the request"
        pipeline.answer.set()
        async with asyncio.timeout(30):
            while gate.running:
                await asyncio.sleep(0.01)

    asyncio.run(leave_early())


class _Dying(StreamVoice):
    """An engine that the test ends."""

    state: EngineState = "ready"

    def stats(self) -> EngineStats:
        return EngineStats(state=self.state)


def test_what_comes_between_an_engines_death_and_its_discovery_waits_for_the_next_one() -> None:
    async def speak() -> None:
        first, second = _Dying(), _Dying()
        engines = iter([first, second])
        model = ServedModel(card_of(first), lambda: next(engines), ServeOptions(("fake",)))
        running = asyncio.create_task(model.run(lambda: pytest.fail("it did not open")))
        async with asyncio.timeout(30):
            while model.pipeline is None:
                await asyncio.sleep(0.01)
            first.state = "broken"
            permit = await AdmissionQueue(slots=1, waiting_room=1).admit()
            async with aclosing(model.chunks(REQUEST, permit)) as chunks:
                assert [type(one) async for one in chunks][-1] is Done
        assert (first.texts, second.texts) == ([], ["Hello."])
        running.cancel()

    asyncio.run(speak())


def test_a_model_that_cannot_be_opened_again_is_tried_until_it_can() -> None:
    first, second = _Dying(), _Dying()
    left: list[Any] = [first, RuntimeError("can't start new thread"), OSError("no memory"), second]

    def open_next() -> Any:
        if isinstance(found := left.pop(0), Exception):
            raise found
        return found

    async def live() -> None:
        model = ServedModel(card_of(first), open_next, ServeOptions(("fake",)))
        running = asyncio.create_task(model.run(lambda: pytest.fail("it did not open")))
        async with asyncio.timeout(30):
            while model.pipeline is None:
                await asyncio.sleep(0.01)
            first.state = "broken"
            while model.pipeline is not second:
                assert not running.done()
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(live())


class _Later:
    """Starts at once; the test sends the events."""

    name, info, starts_at_once = "later", EngineInfo(), True

    def __init__(self) -> None:
        self.send: Any = None

    def stats(self) -> EngineStats:
        return EngineStats()

    def start(self, _request: object, on_event: Any, _stream: bool) -> Any:
        self.send = on_event
        return SimpleNamespace(cancel=lambda: None)


class _Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is that of the test."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_a_player_waits_for_chunks_that_are_late() -> None:
    loop, late = _Clock(), list[float]()
    chunk = AudioChunk(np.zeros(SAMPLE_RATE, np.float32), SAMPLE_RATE)

    async def listen() -> None:
        pipeline: Any = _Later()
        model = ServedModel(
            card_of(StreamVoice()), lambda: pipeline, ServeOptions(("fake",)), on_underrun=late.append
        )
        await model.open()
        permit = await AdmissionQueue(slots=1, waiting_room=1).admit()
        async with aclosing(model.chunks(REQUEST, permit)) as chunks:
            hearing = asyncio.ensure_future(anext(chunks))
            while pipeline.send is None:
                await asyncio.sleep(0)
            for loop.now in (10.0, 10.1, 12.0, 12.5, 15.0, 15.1, 18.5):
                pipeline.send(chunk)
                await hearing
                hearing = asyncio.ensure_future(anext(chunks))
            hearing.cancel()

    with contextlib.closing(loop):
        loop.run_until_complete(listen())
    # The second one goes on when the late chunk comes, not when it was due.
    assert late == [1.0, 1.5]
