"""When each word is said, in the messages and events of the server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

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
