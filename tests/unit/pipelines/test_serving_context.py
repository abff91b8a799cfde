"""One context of a WebSocket on its own: when its text is spoken, and how long it waits for a slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pipelines.registry import ModelCard
from pipelines.request import Capabilities, Done, Generation, Message, Speech, SynthesisRequest
from pipelines.serving import ServeOptions
from pipelines.serving.admission import AdmissionQueue, Permit
from pipelines.serving.cartesia import ContextMessage
from pipelines.serving.contexts import Context
from pipelines.serving.encoding import PcmStream
from pipelines.serving.errors import ApiError, unavailable
from pipelines.serving.streaming import Serving
from pipelines.text_units import MAX_UNIT_CHARACTERS, unit_request, unit_seed, units_of

RATE = 24_000
REQUEST = SynthesisRequest("one", (Message("user", "text", ""),), Generation(), 7)


class Model:
    """Says each text at once; `while_speaking` is called meanwhile."""

    takes_text = False
    card = ModelCard("m", "test", "cpu", RATE, Capabilities())

    def __init__(self, seconds: float, while_speaking: Any = lambda: None) -> None:
        self.seconds = seconds
        self.while_speaking = while_speaking
        self.texts: list[str] = []

    async def chunks(self, request: SynthesisRequest, _permit: Permit, _opened: Any) -> AsyncGenerator[Done]:
        self.texts.append(cast("str", request.messages[-1].content))
        if "cannot" in self.texts[-1]:
            raise unavailable("The engine is starting.", "engine_starting")
        self.while_speaking()
        yield Done(Speech(np.zeros(int(self.seconds * RATE), np.float32), RATE))


def context_of(model: Model, gate: AdmissionQueue, first: ContextMessage, **options: Any) -> Context:
    async def send(*_views: dict[str, Any]) -> None:
        await asyncio.sleep(0)

    metrics: Any = SimpleNamespace(audio_sent=lambda _: None, first_audio=lambda *_: None)
    serving = Serving(
        cast("Any", model), ServeOptions(("m",), **options), gate, metrics, cast("Any", None), {}
    )
    socket: Any = SimpleNamespace(
        route="/tts/websocket", send=send, encoder=lambda *_given: PcmStream(RATE, RATE)
    )
    return Context(socket, serving, first, REQUEST)


@pytest.mark.parametrize(("seconds", "waits"), [(60.0, True), (0.001, False)])
def test_a_context_waits_for_a_slot_as_long_as_its_listener_has_something_to_hear(
    seconds: float, waits: bool
) -> None:
    """The mean time of a slot is a second: without audio ahead the next sentence would come too late."""

    async def play() -> list[str]:
        gate = AdmissionQueue(slots=1, waiting_room=4)
        others: list[asyncio.Task[Permit]] = []
        model = Model(seconds, lambda: others.append(asyncio.create_task(gate.admit())))
        message = ContextMessage(context_id="a", transcript="First one. Second one.")
        context = context_of(model, gate, message, stream_queue_seconds=0.0)
        context.add(message)
        task = asyncio.create_task(context.run())
        async with asyncio.timeout(30):
            while not (gate.waiting and others and others[0].done()) and not task.done():
                await asyncio.sleep(0)
        if waits:
            others[0].result().disconnect()
        else:
            assert task.done(), "it waits"
        await task
        return model.texts

    if waits:
        assert asyncio.run(play()) == ["First one.", "Second one."]
    else:
        with pytest.raises(ApiError) as caught:
            asyncio.run(play())
        assert caught.value.status_code == 429


@pytest.mark.parametrize("text", ["This can be said.", "This cannot be said."])
def test_a_sentence_gives_its_slot_back_said_or_not(text: str) -> None:
    async def play() -> int:
        gate = AdmissionQueue(slots=1, waiting_room=4)
        message = ContextMessage(context_id="a", transcript=text)
        context = context_of(Model(0.1), gate, message)
        context.add(message)
        with suppress(ApiError):
            await context.run()
        return gate.running

    assert asyncio.run(play()) == 0


def test_without_a_delay_half_a_sentence_is_spoken_as_it_came() -> None:
    async def play() -> list[str]:
        model = Model(0.1)
        said = {"context_id": "a", "transcript": "Please hol", "continue": True, "max_buffer_delay_ms": 0}
        message = ContextMessage.model_validate(said)
        context = context_of(model, AdmissionQueue(slots=1, waiting_room=4), message)
        context.add(message)
        task = asyncio.create_task(context.run())
        async with asyncio.timeout(30):
            while not model.texts:
                await asyncio.sleep(0)
        task.cancel()
        return model.texts

    assert asyncio.run(play()) == ["Please hol"]


@pytest.mark.parametrize(("delay_ms", "said"), [(0, ["One.", "Two."]), (1_000, ["One. Two."])])
def test_without_a_delay_a_model_that_takes_text_in_pieces_is_given_sentences(
    delay_ms: int, said: list[str]
) -> None:
    async def play() -> list[str]:
        model = Model(0.1)
        model.takes_text = True
        message = ContextMessage(context_id="a", transcript="One. Two.", max_buffer_delay_ms=delay_ms)
        context = context_of(model, AdmissionQueue(slots=1, waiting_room=4), message)
        context.add(message)
        await context.run()
        return model.texts

    assert asyncio.run(play()) == said


def test_seeds_of_units_are_those_of_their_request() -> None:
    """Equal requests say the same in every release: these are numbers, not what the code makes of them."""
    seeds = {
        (7, 0): 7,
        (7, 1): 2776804601523485429,
        (7, 2): 603544939596092586,
        (8, 1): 5276175785312541883,
        (2**63 - 1, 1): 4081251273433349919,
    }
    assert {key: unit_seed(*key) for key in seeds} == seeds
    assert [unit_request(REQUEST, "Hi.", number).seed for number in range(3)] == [7, seeds[7, 1], seeds[7, 2]]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("word " * 50 + "end, " + "more " * 80, ("word " * 50 + "end,").strip()),
        (
            "word " * 50 + "end, " + "more " * 20 + "then, " + "more " * 60,
            ("word " * 50 + "end, " + "more " * 20 + "then,").strip(),
        ),
        ("early, " + "word " * 100, ("early, " + "word " * 78).strip()),
        ("word " * 100, ("word " * 80).strip()),
        ("x" * 500, "x" * MAX_UNIT_CHARACTERS),
        ("x" * 399 + "e\u0301" + "x" * 100, "x" * 399),
    ],
    ids=["comma", "last comma", "comma too early", "words", "one word", "grapheme"],
)
def test_a_long_sentence_is_cut_where_it_is_least_heard(text: str, first: str) -> None:
    units = units_of(text)
    assert (units[0], len(units)) == (first, 2)
    assert "".join("".join(units).split()) == "".join(text.split())
