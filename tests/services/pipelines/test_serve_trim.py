"""`trim_leading_silence_ms`: the silence before a stream's first sound is left out, and times of words follow."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.sync.client import connect

from pipelines.request import AudioChunk, Speech, SynthesisRequest, Word
from tests.support.fakes import spoken_text
from tests.support.serving_kit import Running, error_of, events
from tests.support.stream_voice import SAMPLE_RATE, StreamVoice
from tests.support.websocket_kit import talk

SILENT_S, SOUND_S = 0.5, 0.4
#: A sound with a pause in its middle, which is never left out.
SOUND = np.full(int(SOUND_S * SAMPLE_RATE), 0.25, np.float32)
SOUND[2000:6000] = 0


class Late(StreamVoice):
    """Says a text of one word after half a second of faint noise, in chunks of 80 ms."""

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        noise = np.random.default_rng(0).uniform(-0.005, 0.005, int(SILENT_S * SAMPLE_RATE))
        samples = np.concatenate([noise.astype(np.float32), SOUND])
        for at in range(0, len(samples), 1920):
            yield AudioChunk(samples[at : at + 1920], SAMPLE_RATE)
        word = Word(spoken_text(request), SILENT_S, SILENT_S + SOUND_S)
        return Speech(samples[:0], SAMPLE_RATE, words=(word,))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(Late(word_times="exact")) as running:
        yield running


def pcm(data: bytes) -> NDArray[np.float32]:
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def lead_ms(samples: NDArray[np.float32]) -> float:
    """Silence before the sound, of which nothing may be missing."""
    begin = int(np.flatnonzero(np.abs(samples) > 0.1)[0])
    np.testing.assert_allclose(samples[begin:], SOUND, atol=0.001)
    return 1000 * begin / SAMPLE_RATE


@pytest.mark.parametrize(
    ("trim_ms", "left_ms"), [(None, 500), (0, 500), (100, 400), (250.5, 249.5), (5000, 20)]
)
def test_silence_before_the_first_sound_is_left_out(
    server: Running, trim_ms: float | None, left_ms: float
) -> None:
    fields: dict[str, Any] = {} if trim_ms is None else {"trim_leading_silence_ms": trim_ms}
    answer = server.speak("Hello.", response_format="pcm", **fields)
    assert lead_ms(pcm(answer.content)) == pytest.approx(left_ms, abs=0.1)
    said = {"transcript": "Hello.", "output_format": {"container": "raw"}, "generation_config": fields}
    assert lead_ms(pcm(server.http.post("/tts/bytes", json=said).content)) == pytest.approx(left_ms, abs=0.1)


def test_words_are_where_they_are_heard(server: Running) -> None:
    fields = {"response_format": "pcm", "stream_format": "sse", "timestamps": True}
    for trim_ms, begin_s in ((0, 0.5), (300, 0.2), (5000, 0.02)):
        answer = server.speak("Hello.", trim_leading_silence_ms=trim_ms, **fields)
        *deltas, _ = events(iter(answer.text.splitlines()))
        ((word, start, end),) = [word for delta in deltas for word in delta["words"]]
        samples = pcm(b"".join(base64.b64decode(delta["audio"]) for delta in deltas))
        assert (word, start) == ("Hello.", pytest.approx(begin_s, abs=0.002))
        assert end == pytest.approx(begin_s + SOUND_S, abs=0.002)
        assert lead_ms(samples) == pytest.approx(1000 * begin_s, abs=2)


def test_in_a_context_only_the_beginning_is_trimmed(server: Running) -> None:
    settings = {"voice": {"id": "ada"}, "generation_config": {"trim_leading_silence_ms": 5000}}
    with talk(server.url) as client:
        client.say("a", "One. ", more=True, **settings)
        client.say("a", "Two.", **settings)
        samples = pcm(client.hear("a"))
    loud = np.flatnonzero(np.abs(samples) > 0.1)
    assert 1000 * loud[0] / SAMPLE_RATE == pytest.approx(20, abs=2)
    assert 1000 * np.diff(loud).max() / SAMPLE_RATE == pytest.approx(500, abs=2)


def test_an_utterance_in_pieces_is_trimmed(server: Running) -> None:
    for trim_ms, left_ms in ((0, 500), (5000, 20)):
        with connect(f"ws{server.url.removeprefix('http')}/v1/audio/speech/stream", proxy=None) as client:
            for message in (
                {
                    "type": "session.config",
                    "response_format": "pcm",
                    "stream_audio": True,
                    "trim_leading_silence_ms": trim_ms,
                },
                {"type": "input.text", "text": "Hello."},
                {"type": "input.done"},
                {"type": "session.close"},
            ):
                client.send(json.dumps(message))
            audio = b"".join(message for message in client if isinstance(message, bytes))
        assert lead_ms(pcm(audio)) == pytest.approx(left_ms, abs=2)


@pytest.mark.parametrize("value", [-1, 5001, "many", True])
def test_a_wrong_length_is_refused(server: Running, value: object) -> None:
    answer = server.speak("Hello.", response_format="pcm", trim_leading_silence_ms=value)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "trim_leading_silence_ms")


def test_a_file_that_is_not_streamed_is_not_trimmed(server: Running) -> None:
    answer = server.speak("Hello.", trim_leading_silence_ms=100)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "input.unsupported")
    assert error_of(answer)["param"] == "trim_leading_silence_ms"
