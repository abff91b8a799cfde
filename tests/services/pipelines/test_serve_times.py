"""When each word is said, in the messages and events of the server."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import soundfile

from pipelines.request import AudioChunk, SynthesisRequest, Word
from tests.services.pipelines.test_serve_clients import OFFICIAL
from tests.services.pipelines.test_serve_websocket import SEEDED, TEXT, UNITS, output
from tests.support.fakes import spoken_text
from tests.support.serving_kit import Running, error_of, events
from tests.support.stream_voice import SAMPLE_RATE, StreamVoice, tone
from tests.support.websocket_kit import talk

#: Tolerance of a time behind audio that was resampled before.
TOLERANCE_S = 0.001


class TimedVoice(StreamVoice):
    """Says each unit as one word, whose phoneme takes half of it."""

    def __init__(self) -> None:
        super().__init__(word_times="exact", max_text_characters=80)

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        text = spoken_text(request)
        seconds = len(tone(text, request.seed)) / SAMPLE_RATE
        *chunks, last = super().stream(request)
        yield from chunks
        if request.timestamps:
            last = replace(last, words=(Word(text, 0, seconds),), phonemes=(Word(text[0], 0, seconds / 2),))
        yield last


@pytest.fixture
def server() -> Iterator[Running]:
    with Running(TimedVoice()) as running:
        yield running
        running.until_idle()


def expected(units: list[str]) -> list[Word]:
    """The words of the units, one after the other."""
    words, begin = list[Word](), 0.0
    for unit in units:
        words.append(Word(unit, begin, begin + len(tone(unit, 0)) / SAMPLE_RATE))
        begin = words[-1].end_s
    return words


def check_messages(messages: list[dict[str, Any]], phonemes: bool = True) -> None:
    """The times of words are those of `UNITS`, each behind its audio, and so are those of phonemes."""
    words = expected(UNITS)
    times = [one["word_timestamps"] for one in messages if one["type"] == "timestamps"]
    assert [one["words"] for one in times] == [[word.text] for word in words]
    for name, of_words in (("start", "start_s"), ("end", "end_s")):
        found = [one[name][0] for one in times]
        assert found == pytest.approx([getattr(word, of_words) for word in words], abs=TOLERANCE_S)
    of_phonemes = [one["phoneme_timestamps"] for one in messages if one["type"] == "phoneme_timestamps"]
    assert [one["phonemes"] for one in of_phonemes] == ([[unit[0]] for unit in UNITS] if phonemes else [])
    middles = [(word.start_s + word.end_s) / 2 for word in words][: len(of_phonemes)]
    assert [one["end"][0] for one in of_phonemes] == pytest.approx(middles, abs=TOLERANCE_S)
    kinds = [one["type"] for one in messages]
    assert kinds[0] == "chunk"
    assert kinds[-1] == "done"


@pytest.mark.parametrize("rate", [24_000, 8_000])
def test_a_context_has_the_times_since_its_beginning(server: Running, rate: int) -> None:
    wanted = {"add_timestamps": True, "add_phoneme_timestamps": True}
    with talk(server.url) as client:
        client.say("a", UNITS[0], more=True, **SEEDED, **output(rate=rate), **wanted)
        client.say("a", f" {UNITS[1]} {UNITS[2]}", **SEEDED, **output(rate=rate))
        messages = [client.next("a")]
        while messages[-1]["type"] != "done":
            messages.append(client.next("a"))
    check_messages(messages)


def test_events_of_cartesia_have_the_times(server: Running) -> None:
    body = {**OFFICIAL, **SEEDED, "add_timestamps": True, "context_id": "c1"}
    for fields in ({}, {"add_phoneme_timestamps": True}):
        with server.http.stream("POST", "/tts/sse", json={**body, **fields}) as answer:
            messages = list(events(answer.iter_lines()))
        check_messages(messages, phonemes=bool(fields))
        assert {one["context_id"] for one in messages} == {"c1"}


@pytest.mark.parametrize("text", [UNITS[1], f"{UNITS[1]} " * 10])
def test_events_of_openai_have_the_times_of_their_audio(server: Running, text: str) -> None:
    body = {"model": "tone", "input": text, "response_format": "pcm", "stream_format": "sse"}
    found = {}
    for timestamps in (True, False):
        with server.http.stream(
            "POST", "/v1/audio/speech", json={**body, "timestamps": timestamps}
        ) as answer:
            found[timestamps] = list(events(answer.iter_lines()))
    words = [word for one in found[True][:-1] for word in one["words"]]
    seconds = len(tone(UNITS[1], 0)) / SAMPLE_RATE
    count = text.count("Smith")
    assert [word[0] for word in words] == [UNITS[1]] * count
    assert [at for word in words for at in word[1:]] == pytest.approx(
        [number * seconds + end for number in range(count) for end in (0, seconds)], abs=TOLERANCE_S
    )
    assert not any("words" in one for one in found[False])


def test_times_that_cannot_be_are_refused(server: Running) -> None:
    body = {"model": "tone", "input": TEXT, "response_format": "pcm", "timestamps": True}
    refused = server.http.post("/v1/audio/speech", json=body)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "timestamps")
    with Running(StreamVoice()) as other, talk(other.url) as client:
        client.say("b", **{**OFFICIAL, "add_phoneme_timestamps": True})
        assert client.error("b")["error_code"] == "input.unsupported"


def test_a_model_that_does_not_know_its_times_has_estimates() -> None:
    body = {"model": "tone", "input": TEXT, "response_format": "pcm", "stream_format": "sse"}
    with Running(StreamVoice()) as server, talk(server.url) as client:
        client.say("a", **{**OFFICIAL, **SEEDED, "add_timestamps": True})
        messages = [client.next("a")]
        while messages[-1]["type"] != "done":
            messages.append(client.next("a"))
        with server.http.stream("POST", "/v1/audio/speech", json={**body, "timestamps": True}) as answer:
            *deltas, _ = events(answer.iter_lines())
    times = [one for one in messages if one["type"] == "timestamps"]
    assert [word for one in times for word in one["word_timestamps"]["words"]] == TEXT.split()
    assert all(one["estimated"] for one in [*times, *deltas])
    words = [word for one in deltas for word in one["words"]]
    assert [word[0] for word in words] == TEXT.split()
    seconds = sum(len(base64.b64decode(one["audio"])) for one in deltas) / 2 / SAMPLE_RATE
    at = [time for word in words for time in word[1:]]
    assert at == sorted(at)
    assert 0 <= at[0] < at[-1] <= seconds + 0.02


def test_the_rest_of_a_compressed_stream_is_as_estimated_as_its_beginning() -> None:
    body = {"model": "tone", "input": TEXT, "response_format": "mp3", "stream_format": "sse"}
    with (
        Running(StreamVoice()) as server,
        server.http.stream("POST", "/v1/audio/speech", json={**body, "timestamps": True}) as answer,
    ):
        *deltas, _ = events(answer.iter_lines())
    assert not deltas[-1]["words"], "the encoder's rest has no words"
    assert all(one["estimated"] for one in deltas)


def middles_of(audio: bytes, words: list[Word]) -> list[float]:
    """For each word: how much later the middle of its sound, in decoded audio, is than the middle of its time."""
    samples, rate = soundfile.read(io.BytesIO(audio), dtype="float32")
    found = list[float]()
    for word in words:
        begin, end = round(word.start_s * rate), round(word.end_s * rate)
        power = samples[begin:end] ** 2
        found.append(float((power * np.arange(len(power))).sum() / power.sum() - len(power) / 2) / rate)
    return found


@pytest.mark.parametrize("kind", ["mp3", "opus"])
def test_times_are_those_of_the_decoded_speech(server: Running, kind: str) -> None:
    """An MP3 begins with the delay of its encoder and decoder."""
    text = f"{UNITS[1]} " * 10
    body = {
        "model": "tone",
        "input": text,
        "response_format": kind,
        "stream_format": "sse",
        "timestamps": True,
    }
    with server.http.stream("POST", "/v1/audio/speech", json=body) as answer:
        *deltas, _ = events(answer.iter_lines())
    words = [Word(*word) for one in deltas for word in one["words"]]
    assert len(words) == 10
    audio = b"".join(base64.b64decode(one["audio"]) for one in deltas)
    assert middles_of(audio, words) == pytest.approx([0.0] * 10, abs=0.002)


@pytest.mark.parametrize("name", ["add_timestamps", "add_phoneme_timestamps"])
def test_settings_of_times_cannot_change_in_a_context(server: Running, name: str) -> None:
    """Cartesia: inputs of a context keep all fields but the transcript and `continue`."""
    with talk(server.url) as client:
        client.say("a", UNITS[0], more=True, **SEEDED, **output())
        client.say("a", UNITS[1], more=True, **SEEDED, **output(), **{name: True})
        error = client.error("a")
        assert (error["error_code"], f"`{name}` cannot change" in error["message"]) == (
            "invalid_value",
            True,
        )
