"""Unmodified clients of other services with a real server: Pipecat's services for Cartesia and ElevenLabs, and
LiveKit's plugins for Cartesia, ElevenLabs and Baseten."""

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
from pipecat.services.elevenlabs.tts import ElevenLabsTTSService
from pipecat.services.tts_service import TextAggregationMode, TTSService

FIRST, SECOND = "The library opens in the morning.", "Bring the green basket with you."
REPLY = f"{FIRST} {SECOND}"
#: Half a minute of speech without a full stop.
ONE_SENTENCE = "The boats went out to sea, " * 13 + "and then they all came home again."
KEY = "any"


Service = Callable[[NightjarServer, TextAggregationMode | None], TTSService]


def of_cartesia(server: NightjarServer, mode: TextAggregationMode | None = None) -> TTSService:
    settings = CartesiaTTSService.Settings(model="hibari", voice="heart")
    return CartesiaTTSService(
        api_key=KEY, url=server.websocket_url, settings=settings, text_aggregation_mode=mode
    )


def of_elevenlabs(server: NightjarServer, mode: TextAggregationMode | None = None) -> TTSService:
    settings = ElevenLabsTTSService.Settings(model="hibari", voice="heart")
    return ElevenLabsTTSService(
        api_key=KEY,
        url=server.url.replace("http", "ws"),
        settings=settings,
        text_aggregation_mode=mode,
    )


SERVICES = pytest.mark.parametrize("service", [of_cartesia, of_elevenlabs])


@SERVICES
@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])
def test_pipecats_own_service_speaks(
    server: NightjarServer, ears: Ears, service: Service, mode: TextAggregationMode
) -> None:
    async def script(conversation: Conversation) -> None:
        for count in (1, 2):
            await conversation.say(
                "The library ", "opens in the morning. ", "Bring the green basket with you."
            )
            await conversation.until_replies(count)

    done = asyncio.run(converse(service(server, mode), script))
    assert ears.word_error_rate(done.audio(), 24_000, f"{REPLY} {REPLY}") == 0
    assert done.errors() == []
    words = done.below.of(TTSTextFrame)
    assert [word.text for word in words] == [*REPLY.split(), *REPLY.split()]
    times = [word.pts or 0 for word in words]
    assert sorted(set(times)) == times


@SERVICES
def test_pipecats_own_service_can_be_interrupted(
    server: NightjarServer, ears: Ears, service: Service
) -> None:
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

    done = asyncio.run(converse(service(server, None), script))
    assert ears.word_error_rate(done.audio()[begin:], 24_000, REPLY) == 0


@SERVICES
def test_a_long_sentence_fits_into_the_messages_that_a_stock_client_takes(
    server: NightjarServer, service: Service
) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say(ONE_SENTENCE)
        await conversation.until_replies(1)

    done = asyncio.run(converse(service(server, None), script, rate=48_000))
    assert done.errors() == []
    assert len(done.audio()) / 2 / 48_000 > 15


cartesia = pytest.importorskip("livekit.plugins.cartesia", reason="livekit-plugins-cartesia is not installed")
from livekit.agents.types import USERDATA_TIMED_TRANSCRIPT  # noqa: E402  # it is installed with the plugin
from livekit.plugins import baseten, elevenlabs  # noqa: E402  # as above


def plugin_of(kind: str, server: NightjarServer, session: aiohttp.ClientSession) -> Any:
    """A plugin that is given the address and the key of the server, and the names of its model and voice."""
    given: dict[str, Any] = {"api_key": KEY, "http_session": session}
    if kind == "cartesia":
        return cartesia.TTS(base_url=server.url, model="hibari", voice="heart", **given)
    if kind == "elevenlabs":
        return elevenlabs.TTS(base_url=f"{server.url}/v1", model="hibari", voice_id="heart", **given)
    address = server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    return baseten.TTS(
        model="qwen3-tts", model_endpoint=address, voice="heart", word_timestamps=True, **given
    )


PLUGINS = pytest.mark.parametrize("kind", ["cartesia", "elevenlabs", "baseten"])
#: Rates at which the plugins play by default.
RATES = {"cartesia": 24_000, "elevenlabs": 22_050, "baseten": 24_000}


def with_livekit(
    server: NightjarServer, kind: str, use: Callable[[Any], Coroutine[Any, Any, bytes]]
) -> bytes:
    """The audio that `use` gets from the plugin."""

    async def run() -> bytes:
        async with aiohttp.ClientSession() as session:
            plugin = plugin_of(kind, server, session)
            try:
                async with asyncio.timeout(120):
                    return await use(plugin)
            finally:
                await plugin.aclose()

    return asyncio.run(run())


async def joined(events: AsyncIterator[Any]) -> bytes:
    return b"".join([bytes(event.frame.data) async for event in events])


@PLUGINS
def test_livekits_plugin_streams(server: NightjarServer, ears: Ears, kind: str) -> None:
    async def use(plugin: Any) -> bytes:
        async with plugin.stream() as stream:
            for word in REPLY.split(" "):
                stream.push_text(f"{word} ")
            stream.end_input()
            return await joined(stream)

    assert ears.word_error_rate(with_livekit(server, kind, use), RATES[kind], REPLY) == 0
    wait_until(server.is_idle)


@PLUGINS
def test_livekits_plugin_gets_the_times_of_words(server: NightjarServer, kind: str) -> None:
    said: list[Any] = []

    async def use(plugin: Any) -> bytes:
        assert plugin.capabilities.aligned_transcript
        async with plugin.stream() as stream:
            stream.push_text(REPLY)
            stream.end_input()
            async for event in stream:
                said.extend(event.frame.userdata.get(USERDATA_TIMED_TRANSCRIPT, []))
        return b""

    with_livekit(server, kind, use)
    assert "".join(said).split() == REPLY.split()
    times = [word.start_time for word in said]
    assert times == sorted(times)
    assert all(word.start_time < word.end_time for word in said)


@PLUGINS
def test_livekits_plugin_that_leaves_in_mid_sentence_holds_no_slot(
    server: NightjarServer, ears: Ears, kind: str
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

    assert ears.word_error_rate(with_livekit(server, kind, use), RATES[kind], REPLY) == 0


@pytest.mark.parametrize("kind", ["cartesia", "baseten"])
def test_livekits_plugin_asks_for_a_whole_text(server: NightjarServer, ears: Ears, kind: str) -> None:
    async def use(plugin: Any) -> bytes:
        async with plugin.synthesize(REPLY) as stream:
            return await joined(stream)

    assert ears.word_error_rate(with_livekit(server, kind, use), RATES[kind], REPLY) == 0
