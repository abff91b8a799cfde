"""What a server counts of its clients comes back to nothing once they are gone or were refused."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.request import (
    AudioChunk,
    Done,
    EngineInfo,
    EngineStats,
    Generation,
    Listener,
    Message,
    Speech,
    SynthesisRequest,
)
from pipelines.serving import ServeOptions
from pipelines.serving.admission import AdmissionQueue
from pipelines.serving.errors import ApiError
from pipelines.serving.middleware import RequestMiddleware
from pipelines.serving.model import UNREAD_BYTES, ServedModel
from pipelines.serving.request_body import BodyMemory, LimitedBody
from tests.support.serving_kit import Running, card_of
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import talk

REQUEST = SynthesisRequest("one", (Message("user", "text", "Hello."),), Generation(), 1)
CHUNK = AudioChunk(np.zeros(100, np.float32), 24_000)


class _AtOnce:
    """Has three chunks ready where a stream begins, the second one with `samples`; `whole`: and that is
    all."""

    name, info = "at once", EngineInfo()
    starts_at_once = True

    def __init__(self, samples: NDArray[np.float32] = CHUNK.samples, *, whole: bool = False) -> None:
        self.second = AudioChunk(samples, CHUNK.sample_rate)
        self.last = Done(Speech(CHUNK.samples, 24_000)) if whole else CHUNK

    def start(self, _request: object, heard: Any, stream: bool = False) -> Any:
        self.heard = heard
        for event in (CHUNK, self.second, self.last):
            heard(event)
        return Listener(heard, lambda _done: None)

    def stats(self) -> EngineStats:
        return EngineStats()


async def served(pipeline: Any) -> ServedModel:
    model = ServedModel(card_of(StreamVoice()), lambda: pipeline, ServeOptions(("fake",)))
    await model.open()
    return model


def test_audio_of_a_client_that_left_counts_as_unread_no_longer() -> None:
    async def leave_early() -> list[int]:
        pipeline = _AtOnce()
        model = await served(pipeline)
        gate = AdmissionQueue(slots=1, waiting_room=1)
        async with aclosing(model.chunks(REQUEST, await gate.admit())) as chunks:
            await anext(chunks)
            counts = [model.unread_bytes]
        counts.append(model.unread_bytes)
        pipeline.heard(CHUNK)
        await asyncio.sleep(0)
        return [*counts, model.unread_bytes]

    assert asyncio.run(leave_early()) == [2 * CHUNK.samples.nbytes, 0, 0]


@pytest.mark.parametrize(
    "refused",
    [{"transcript": "A text of more than twenty characters."}, {"generation_config": {"temperature": -1}}],
    ids=["text", "setting"],
)
def test_contexts_that_were_refused_take_no_place(refused: dict[str, Any]) -> None:
    with Running(StreamVoice(), contexts=2, context_characters=20) as server, talk(server.url) as client:
        for name in ("a", "b", "c"):
            client.send({"context_id": name, "transcript": "Hello.", **refused})
            assert client.error(name)["status_code"] == 400
        client.say("d", "Hello.")
        assert client.hear("d")


def test_a_stream_is_over_once_it_is_made() -> None:
    async def listen() -> int:
        model, gate = await served(_AtOnce(whole=True)), AdmissionQueue(slots=1, waiting_room=1)
        permit = await gate.admit()
        async with aclosing(model.chunks(REQUEST, permit)) as chunks:
            async for _ in chunks:
                pass
        permit.disconnect()
        return gate.running

    assert asyncio.run(listen()) == 0


@pytest.mark.parametrize(("unread_bytes", "running"), [(1 << 20, 0), (UNREAD_BYTES, 1)])
def test_a_slow_reader_keeps_a_slot_only_where_much_is_unread(unread_bytes: int, running: int) -> None:
    # These samples share the memory of one.
    samples = np.broadcast_to(np.float32(0.1), (unread_bytes // 4,))

    async def listen() -> int:
        model = await served(_AtOnce(samples, whole=True))
        gate = AdmissionQueue(slots=1, waiting_room=1)
        async with aclosing(model.chunks(REQUEST, await gate.admit())) as chunks:
            await anext(chunks)
            return gate.running

    assert asyncio.run(listen()) == running


def test_a_stream_that_would_wait_too_long_is_refused() -> None:
    """A player waits for it. It is refused at once, since a slot is held for a minute on average."""

    async def ask() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        gate = AdmissionQueue(slots=1, waiting_room=4)
        await gate.admit()
        gate.leave(600.0)
        await gate.admit()
        metrics: Any = SimpleNamespace()
        server = RequestMiddleware(metrics, ServeOptions(("m",), stream_queue_seconds=30.0), gate, metrics)
        async with asyncio.timeout(10):
            await server._admit([], gate, True, LimitedBody(receive, BodyMemory(1000), 60.0), None)

    with pytest.raises(ApiError) as caught:
        asyncio.run(ask())
    assert caught.value.status_code == 429
