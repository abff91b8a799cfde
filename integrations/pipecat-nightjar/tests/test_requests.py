"""The requests of both services for each of their settings, and the length of speech at the rate of a
pipeline.

The server here only records requests; Nightjar's own tests check how its server answers them.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from conversation import Conversation, converse
from pipecat.frames.frames import InterruptionFrame
from pipecat.transcriptions.language import Language
from pipecat_nightjar import NightjarHttpTTSService, NightjarTTSService, NightjarTTSSettings

#: Sample rate of the server's voice.
SERVER_RATE = 16_000
SECONDS = 2.0
#: Pause within the speech: Pipecat's default resampler drops its buffer after a fifth of a second.
PAUSE_SECONDS = 0.25
#: Setting -> its value, and the fields that it changes in the HTTP request and in the WebSocket message.
TABLE: dict[str, list[tuple[Any, dict[str, Any], dict[str, Any]]]] = {
    "model": [("other", {"model": "other"}, {"model_id": "other"})],
    "voice": [("ada", {"voice": "ada"}, {"voice": {"mode": "id", "id": "ada"}})],
    "language": [
        (Language.DE_AT, {"language": "German"}, {"language": "German"}),
        ("Klingon", {"language": "Klingon"}, {"language": "Klingon"}),
    ],
    "extra": [({"seed": 5}, {"seed": 5}, {"seed": 5})],
}
ROWS = [pytest.param(name, *row, id=f"{name}-{row[0]}") for name, rows in TABLE.items() for row in rows]


class Recorder:
    """A server that answers every text with a tone and records the requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def speech(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        answer = web.StreamResponse(headers={"x-sample-rate": str(SERVER_RATE)})
        await answer.prepare(request)
        audio = tone(SERVER_RATE)
        await answer.write(audio[: len(audio) // 2])
        await asyncio.sleep(PAUSE_SECONDS)
        await answer.write(audio[len(audio) // 2 :])
        return answer

    async def talk(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            given = json.loads(message.data)
            answer = {"context_id": given["context_id"], "done": False, "status_code": 206}
            if given.get("transcript"):
                self.asked.append({name: value for name, value in given.items() if name != "context_id"})
                audio = base64.b64encode(tone(given["output_format"]["sample_rate"])).decode()
                await socket.send_json({**answer, "type": "chunk", "data": audio})
            if not given.get("continue", False):
                await socket.send_json({**answer, "type": "done", "done": True})
        return socket


def tone(rate: int) -> bytes:
    """PCM of 16 bits."""
    return (8000 * np.sin(np.arange(int(SECONDS * rate)) * 440 * 2 * np.pi / rate)).astype("<i2").tobytes()


@asynccontextmanager
async def recorder() -> AsyncIterator[Recorder]:
    one = Recorder()
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", one.health),
            web.post("/v1/audio/speech", one.speech),
            web.get("/tts/websocket", one.talk),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield one
    finally:
        await runner.cleanup()


async def said(
    kind: type[NightjarHttpTTSService | NightjarTTSService], rate: int = 24_000, **settings: Any
) -> tuple[dict[str, Any], Conversation]:
    """The request of a service with these settings for one text, and the conversation."""

    async def script(conversation: Conversation) -> None:
        await conversation.say("Good morning.")
        await conversation.until_replies(1)

    async with recorder() as server:
        service = kind(base_url=server.url, settings=NightjarTTSSettings(**{"model": "tone", **settings}))
        done = await converse(service, script, rate=rate)
    assert done.errors() == []
    (asked,) = server.asked
    return asked, done


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    }


@pytest.mark.parametrize(("name", "value", "by_http", "by_websocket"), ROWS)
def test_a_setting_is_asked_for(
    name: str, value: Any, by_http: dict[str, Any], by_websocket: dict[str, Any]
) -> None:
    for kind, expected in ((NightjarHttpTTSService, by_http), (NightjarTTSService, by_websocket)):
        plain, asked = (asyncio.run(said(kind, **settings))[0] for settings in ({}, {name: value}))
        assert changed(plain, asked) == expected, kind


def test_no_setting_is_missing_in_the_table() -> None:
    assert set(TABLE) == {field.name for field in dataclasses.fields(NightjarTTSSettings)}


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 48_000])
@pytest.mark.parametrize("kind", [NightjarHttpTTSService, NightjarTTSService])
def test_speech_is_as_long_as_it_was_made(
    kind: type[NightjarHttpTTSService | NightjarTTSService], rate: int
) -> None:
    """Slowed speech can still be recognized, so samples are counted."""
    _, done = asyncio.run(said(kind, rate))
    assert done.rates() == {rate}
    assert len(done.audio()) / 2 == pytest.approx(SECONDS * rate, abs=rate / 1000)


def test_audio_of_an_interrupted_text_is_not_heard_in_the_next_one() -> None:
    """The speech of a text is cut off while a part of it is in the resampler."""
    begin = 0

    async def script(conversation: Conversation) -> None:
        nonlocal begin
        await conversation.say("Good morning.")
        await conversation.until_audio()
        await conversation.interrupt()
        await conversation.below.until(lambda: bool(conversation.below.of(InterruptionFrame)))
        begin = len(conversation.audio())
        await conversation.say("Good morning.")
        await conversation.until_replies(1)

    async def interrupted() -> Conversation:
        async with recorder() as server:
            service = NightjarHttpTTSService(base_url=server.url, settings=NightjarTTSSettings(model="tone"))
            return await converse(service, script)

    done = asyncio.run(interrupted())
    alone = asyncio.run(said(NightjarHttpTTSService))[1]
    assert 0 < begin < len(alone.audio())
    heard, expected = (np.frombuffer(audio, "<i2") for audio in (done.audio()[begin:], alone.audio()))
    assert len(heard) == len(expected)
    # The resampler dithers.
    np.testing.assert_allclose(heard, expected, atol=2)


def test_a_session_of_the_application_stays_open_for_its_other_services() -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say("Good morning.")
        await conversation.until_replies(1)

    async def both() -> list[Conversation]:
        settings = NightjarTTSSettings(model="tone")
        async with recorder() as server, ClientSession() as session:
            return [
                await converse(
                    NightjarHttpTTSService(base_url=server.url, aiohttp_session=session, settings=settings),
                    script,
                )
                for _ in range(2)
            ]

    for done in asyncio.run(both()):
        assert done.errors() == []
        assert len(done.audio()) > 0
