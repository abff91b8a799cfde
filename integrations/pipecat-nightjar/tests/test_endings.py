"""A reply of `NightjarTTSService` ends as soon as its speech is complete or cannot come.

Pipecat also ends a reply after a silence, which would hide a missing end; here that silence is longer than a test
waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import NightjarServer, free_port, wait_until
from conversation import Conversation, Script, converse
from pipecat.frames.frames import (
    AggregatedTextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.services.tts_service import TextAggregationMode
from pipecat_nightjar import NightjarTTSService, NightjarTTSSettings

FIRST, SECOND = "The library opens in the morning.", "Bring the green basket with you."
#: Longer than a test waits for an end.
NEVER_SECONDS = 60.0
#: Maximum time that a test waits for an end, which takes moments on a quiet machine.
SOON_SECONDS = 10.0
MODES = pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])


def service(
    url: str,
    mode: TextAggregationMode | None = None,
    *,
    key: str | None = None,
    connect_seconds: float = NEVER_SECONDS,
) -> NightjarTTSService:
    return NightjarTTSService(
        base_url=url,
        api_key=key,
        text_aggregation_mode=mode,
        connect_seconds=connect_seconds,
        stop_frame_timeout_s=NEVER_SECONDS,
        settings=NightjarTTSSettings(model="hibari"),
    )


async def soon(event: Awaitable[Any]) -> None:
    async with asyncio.timeout(SOON_SECONDS):
        await event


async def begin(conversation: Conversation, text: str) -> None:
    """The beginning of a reply whose end the LLM has not written yet."""
    await conversation.send(LLMFullResponseStartFrame())
    await conversation.send(LLMTextFrame(text))


async def end(conversation: Conversation, text: str) -> None:
    await conversation.send(LLMTextFrame(text))
    await conversation.send(LLMFullResponseEndFrame())


def until_error(conversation: Conversation, what: str) -> Awaitable[None]:
    return conversation.above.until(lambda: any(what in error for error in conversation.errors()))


def ended(done: Conversation) -> bool:
    """Whether each context that began has ended."""
    started = [frame.context_id for frame in done.below.of(TTSStartedFrame)]
    return started == [frame.context_id for frame in done.below.of(TTSStoppedFrame)]


class Network:
    """A way to a real server that can be cut like a cable: neither side closes its connection in good
    order."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers = list[asyncio.StreamWriter]()

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, server_writer]
        await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))

    def cut(self) -> None:
        while self._writers:
            self._writers.pop().transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def network(server: NightjarServer, port: int = 0) -> AsyncIterator[tuple[Network, str]]:
    """A network, and the server's address in it. `port`: that of the address; 0: any."""
    cable = Network(server.port)
    async with await asyncio.start_server(cable.join, "127.0.0.1", port) as listener:
        try:
            yield cable, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            cable.cut()


@MODES
def test_a_reply_ends_when_its_speech_is_complete(server: NightjarServer, mode: TextAggregationMode) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say(f"{FIRST} ", SECOND)
        await soon(conversation.until_replies(1))

    done = asyncio.run(converse(service(server.url, mode), script))
    assert ended(done)
    assert done.errors() == []


@MODES
def test_the_speech_before_a_change_of_settings_is_made_and_ends_at_once(
    server: NightjarServer, mode: TextAggregationMode
) -> None:
    async def script(conversation: Conversation) -> None:
        await begin(conversation, f"{FIRST} Then" if mode is TextAggregationMode.SENTENCE else "Good morning")
        if mode is TextAggregationMode.SENTENCE:
            await conversation.until_audio()
        await conversation.send(TTSUpdateSettingsFrame(delta=NightjarTTSSettings(language="English")))
        await soon(conversation.until_replies(1))
        await end(conversation, f" rest. {SECOND}")
        await soon(conversation.until_replies(2))

    done = asyncio.run(converse(service(server.url, mode), script))
    assert ended(done)
    assert done.errors() == []


@MODES
def test_a_lost_connection_ends_the_speech_under_way_and_the_rest_of_the_reply_is_said(
    server: NightjarServer, mode: TextAggregationMode
) -> None:
    async def run() -> tuple[NightjarTTSService, Conversation]:
        async with network(server) as (cable, url):

            async def script(conversation: Conversation) -> None:
                await begin(conversation, f"{FIRST} Then")
                await conversation.until_audio()
                cable.cut()
                await soon(conversation.until_replies(1))
                await end(conversation, f" rest. {SECOND}")
                await soon(conversation.until_replies(2))

            speech = service(url, mode)
            return speech, await converse(speech, script)

    speech, done = asyncio.run(run())
    assert ended(done)
    assert len(done.errors()) == 1
    assert speech.is_usable
    words = [frame.text.strip() for frame in done.below.of(TTSTextFrame)]
    assert words[-7:] == ["rest.", *SECOND.split()]
    wait_until(server.is_idle)


def saying(text: str) -> Script:
    async def script(conversation: Conversation) -> None:
        await conversation.say(text)
        await soon(conversation.until_replies(1))

    return script


async def saying_without_an_llm(conversation: Conversation) -> None:
    await conversation.send(AggregatedTextFrame(FIRST, "sentence"))
    await soon(conversation.until_replies(1))


@pytest.mark.parametrize(
    ("script", "mode"),
    [
        pytest.param(saying(FIRST), TextAggregationMode.SENTENCE, id="reply"),
        pytest.param(saying(FIRST), TextAggregationMode.TOKEN, id="tokens"),
        pytest.param(saying_without_an_llm, TextAggregationMode.SENTENCE, id="text"),
    ],
)
def test_a_reply_ends_unspoken_once_the_time_to_connect_is_over(
    script: Script, mode: TextAggregationMode
) -> None:
    speech = service(f"http://127.0.0.1:{free_port()}", mode, connect_seconds=0.5)
    done = asyncio.run(converse(speech, script))
    assert ended(done)
    assert sum("cannot be reached" in error for error in done.errors()) == 2, (
        "one of the start, one of the text"
    )
    assert speech.is_usable
    assert not any(frame.append_to_context for frame in done.below.of(TTSTextFrame)), "nothing was said"


def test_a_reply_whose_first_text_failed_remains_open_for_the_rest(server: NightjarServer) -> None:
    port = free_port()

    async def script(conversation: Conversation) -> None:
        await begin(conversation, f"{FIRST} Then")
        await conversation.above.until(lambda: len(conversation.errors()) == 2)
        async with network(server, port):
            await end(conversation, f" rest. {SECOND}")
            await soon(conversation.until_replies(1))

    done = asyncio.run(converse(service(f"http://127.0.0.1:{port}", connect_seconds=0.0), script))
    assert len(done.below.of(TTSStartedFrame)) == len(done.below.of(TTSStoppedFrame)) == 1
    words = [frame.text.strip() for frame in done.below.of(TTSTextFrame)]
    assert words[-8:] == ["Then", "rest.", *SECOND.split()]
    wait_until(server.is_idle)


def test_a_wrong_key_is_reported_at_once_though_the_time_to_connect_is_not_over(tmp_path: Path) -> None:
    server = NightjarServer(tmp_path, SPEECH_SERVE__API_KEY="right")

    async def script(conversation: Conversation) -> None:
        # The first attempt finds no server, so that the text is the first to meet the wrong key.
        await until_error(conversation, "cannot be reached")
        server.start(wait=False)
        await asyncio.to_thread(wait_until, server.is_ready)
        await conversation.say(FIRST)
        await soon(conversation.until_replies(1))

    speech = service(server.url, key="wrong")
    try:
        done = asyncio.run(converse(speech, script))
    finally:
        server.stop()
    assert ended(done)
    assert "401" in done.errors()[1]
    assert not speech.is_usable
