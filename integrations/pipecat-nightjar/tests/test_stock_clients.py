"""Unmodified clients for Cartesia with a real server: Pipecat's service, and LiveKit's plugin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from conftest import Ears, NightjarServer, wait_until
from conversation import Conversation, converse
from pipecat.frames.frames import InterruptionFrame, TTSTextFrame
from pipecat.services.cartesia.tts import CartesiaTTSService
from pipecat.services.tts_service import TextAggregationMode

FIRST, SECOND = "The library opens in the morning.", "Bring the green basket with you."
REPLY = f"{FIRST} {SECOND}"
#: Half a minute of speech without a full stop.
ONE_SENTENCE = "The boats went out to sea, " * 13 + "and then they all came home again."
KEY = "any"


def stock(server: NightjarServer, mode: TextAggregationMode | None = None) -> CartesiaTTSService:
    settings = CartesiaTTSService.Settings(model="hibari", voice="heart")
    return CartesiaTTSService(
        api_key=KEY, url=server.websocket_url, settings=settings, text_aggregation_mode=mode
    )


@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])
def test_pipecats_own_cartesia_service_speaks(
    server: NightjarServer, ears: Ears, mode: TextAggregationMode
) -> None:
    async def script(conversation: Conversation) -> None:
        for count in (1, 2):
            await conversation.say(
                "The library ", "opens in the morning. ", "Bring the green basket with you."
            )
            await conversation.until_replies(count)

    done = asyncio.run(converse(stock(server, mode), script))
    assert ears.word_error_rate(done.audio(), 24_000, f"{REPLY} {REPLY}") == 0
    assert done.errors() == []
    words = done.below.of(TTSTextFrame)
    assert [word.text for word in words] == [*REPLY.split(), *REPLY.split()]
    times = [word.pts or 0 for word in words]
    assert sorted(set(times)) == times


def test_pipecats_own_cartesia_service_can_be_interrupted(server: NightjarServer, ears: Ears) -> None:
    begin = 0

    async def script(conversation: Conversation) -> None:
        nonlocal begin
        await conversation.say("The old captain told a story about the northern sea. " * 60)
        await conversation.until_audio()
        await conversation.interrupt()
        await conversation.below.until(lambda: bool(conversation.below.of(InterruptionFrame)))
        await asyncio.to_thread(wait_until, server.is_idle)
        begin = len(conversation.audio())
        await conversation.say(REPLY)
        await conversation.until_replies(1)

    done = asyncio.run(converse(stock(server), script))
    assert ears.word_error_rate(done.audio()[begin:], 24_000, REPLY) == 0


def test_a_long_sentence_fits_into_the_messages_that_a_stock_client_takes(server: NightjarServer) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say(ONE_SENTENCE)
        await conversation.until_replies(1)

    done = asyncio.run(converse(stock(server), script, rate=48_000))
    assert done.errors() == []
    assert len(done.audio()) / 2 / 48_000 > 15


livekit = pytest.importorskip("livekit.plugins.cartesia", reason="livekit-plugins-cartesia is not installed")
from livekit.agents.types import USERDATA_TIMED_TRANSCRIPT  # noqa: E402  # it is installed with the plugin


def with_livekit(server: NightjarServer, use: Callable[[Any], Coroutine[Any, Any, bytes]]) -> bytes:
    """The audio that `use` gets from the plugin."""

    async def run() -> bytes:
        async with aiohttp.ClientSession() as session:
            plugin = livekit.TTS(
                api_key=KEY, base_url=server.url, model="hibari", voice="heart", http_session=session
            )
            try:
                async with asyncio.timeout(120):
                    return await use(plugin)
            finally:
                await plugin.aclose()

    return asyncio.run(run())


async def joined(events: AsyncIterator[Any]) -> bytes:
    return b"".join([bytes(event.frame.data) async for event in events])


def test_livekits_plugin_streams(server: NightjarServer, ears: Ears) -> None:
    async def use(plugin: Any) -> bytes:
        async with plugin.stream() as stream:
            for word in REPLY.split(" "):
                stream.push_text(f"{word} ")
            stream.end_input()
            return await joined(stream)

    assert ears.word_error_rate(with_livekit(server, use), 24_000, REPLY) == 0
    wait_until(server.is_idle)


def test_livekits_plugin_gets_the_times_of_words(server: NightjarServer) -> None:
    said: list[Any] = []

    async def use(plugin: Any) -> bytes:
        assert plugin.capabilities.aligned_transcript
        async with plugin.stream() as stream:
            stream.push_text(REPLY)
            stream.end_input()
            async for event in stream:
                said.extend(event.frame.userdata.get(USERDATA_TIMED_TRANSCRIPT, []))
        return b""

    with_livekit(server, use)
    assert "".join(said).split() == REPLY.split()
    times = [word.start_time for word in said]
    assert times == sorted(times)
    assert all(word.start_time < word.end_time for word in said)


def test_livekits_plugin_that_leaves_in_mid_sentence_holds_no_slot(
    server: NightjarServer, ears: Ears
) -> None:
    async def use(plugin: Any) -> bytes:
        async with plugin.stream() as stream:
            stream.push_text("The old captain told a story about the northern sea. " * 60)
            stream.end_input()
            await anext(stream)
        await asyncio.to_thread(wait_until, server.is_idle)
        async with plugin.stream() as stream:
            stream.push_text(REPLY)
            stream.end_input()
            return await joined(stream)

    assert ears.word_error_rate(with_livekit(server, use), 24_000, REPLY) == 0


def test_livekits_plugin_asks_for_a_whole_text(server: NightjarServer, ears: Ears) -> None:
    async def use(plugin: Any) -> bytes:
        async with plugin.synthesize(REPLY) as stream:
            return await joined(stream)

    assert ears.word_error_rate(with_livekit(server, use), 24_000, REPLY) == 0
