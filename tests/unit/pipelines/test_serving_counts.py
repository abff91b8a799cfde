"""What a server counts of its clients comes back to nothing once they are gone or were refused."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from pipelines.daemon_threads import DaemonThreads
from pipelines.request import AudioChunk, Generation, Message, SynthesisRequest
from pipelines.serving.async_bridge import StreamCall, Unread
from tests.support.serving_kit import Running
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import talk

REQUEST = SynthesisRequest("one", (Message("user", "text", "Hello."),), Generation(), 1)
CHUNK = AudioChunk(np.zeros(100, np.float32), 24_000)


class _AtOnce:
    """Has three chunks ready where a stream begins."""

    starts_at_once = True

    def start_stream(self, _request: object, heard: Any) -> Any:
        self.heard = heard
        for _ in range(3):
            heard(CHUNK)
        return lambda: None


def test_audio_of_a_client_that_left_counts_as_unread_no_longer() -> None:
    async def leave_early() -> list[int]:
        pipeline, unread = _AtOnce(), Unread()
        call: Any = StreamCall(pipeline, REQUEST, lambda: None, unread, lambda _seconds: None)  # pyright: ignore[reportArgumentType]
        async with aclosing(call.chunks(DaemonThreads(1, "starter"))) as chunks:
            await anext(chunks)
            counts = [unread.bytes]
        counts.append(unread.bytes)
        pipeline.heard(CHUNK)
        await asyncio.sleep(0)
        return [*counts, unread.bytes]

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
