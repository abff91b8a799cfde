"""`NightjarHttpTTSService` in a real pipeline, against a real server."""

from __future__ import annotations

import asyncio

import pytest
from conftest import Ears, NightjarServer, wait_until
from conversation import Conversation, Script, converse
from pipecat.frames.frames import InterruptionFrame, MetricsFrame
from pipecat.metrics.metrics import TTFBMetricsData, TTSUsageMetricsData
from pipecat_nightjar import NightjarHttpTTSService

REPLY = "The library opens in the morning. Bring the green basket with you."


def service(server: NightjarServer, **settings: str) -> NightjarHttpTTSService:
    return NightjarHttpTTSService(
        base_url=server.url, settings=NightjarHttpTTSService.Settings(**{"model": "hibari", **settings})
    )


@pytest.mark.parametrize("rate", [24_000, 16_000])
def test_a_reply_is_heard_at_the_rate_of_the_pipeline(server: NightjarServer, ears: Ears, rate: int) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say("The library opens ", "in the morning. Bring the ", "green basket with you.")
        await conversation.until_replies(1)

    done = asyncio.run(converse(service(server), script, rate=rate))
    assert done.rates() == {rate}
    assert ears.word_error_rate(done.audio(), rate, REPLY) == 0
    assert done.errors() == []
    metrics = [data for frame in done.below.of(MetricsFrame) for data in frame.data]
    assert any(isinstance(data, TTFBMetricsData) and data.value > 0 for data in metrics)
    assert sum(data.value for data in metrics if isinstance(data, TTSUsageMetricsData)) == len(REPLY) - 1
    wait_until(server.is_idle)


def test_a_text_that_cannot_be_spoken_leaves_the_service_usable(server: NightjarServer, ears: Ears) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say("???!!! ... ")
        await conversation.above.until(lambda: bool(conversation.errors()))
        await conversation.say("Good morning to everybody.")
        await conversation.until_audio()

    speech = service(server)
    done = asyncio.run(converse(speech, script))
    assert speech.is_usable
    assert "input." in done.errors()[0]
    assert ears.word_error_rate(done.audio(), 24_000, "Good morning to everybody.") == 0


def test_a_voice_that_the_model_does_not_have_makes_the_service_unusable(server: NightjarServer) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say("Good morning.")
        await conversation.above.until(lambda: bool(conversation.errors()))

    speech = service(server, voice="nobody")
    done = asyncio.run(converse(speech, script))
    assert not speech.is_usable
    assert "input.unknown_voice" in done.errors()[0]


def test_an_interruption_ends_the_reply_and_the_next_one_is_heard_whole(
    server: NightjarServer, ears: Ears
) -> None:
    heard_before = 0

    async def script(conversation: Conversation) -> None:
        nonlocal heard_before
        await conversation.say("This is a long answer. " * 40)
        await conversation.until_audio()
        await conversation.interrupt()
        await conversation.below.until(lambda: bool(conversation.below.of(InterruptionFrame)))
        await asyncio.to_thread(wait_until, server.is_idle)
        heard_before = len(conversation.audio())
        await conversation.say(REPLY)
        await conversation.until_replies(1)

    done = asyncio.run(converse(service(server), script))
    assert ears.word_error_rate(done.audio()[heard_before:], 24_000, REPLY) == 0
    assert done.errors() == []


def test_two_services_speak_at_once(server: NightjarServer, ears: Ears) -> None:
    replies = ("The river was high after the rain.", "Seven boats were waiting near the bridge.")

    async def both() -> list[Conversation]:
        def script(reply: str) -> Script:
            async def speak(conversation: Conversation) -> None:
                await conversation.say(reply)
                await conversation.until_replies(1)

            return speak

        return await asyncio.gather(*(converse(service(server), script(reply)) for reply in replies))

    for done, reply in zip(asyncio.run(both()), replies, strict=True):
        assert ears.word_error_rate(done.audio(), 24_000, reply) <= 0.2
        assert done.errors() == []
