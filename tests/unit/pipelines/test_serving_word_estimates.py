"""Estimated times of words, beside the exact ones of `hibari`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.duration import text_units
from pipelines.hibari import pipeline as hibari
from pipelines.registry import open_pipeline
from pipelines.request import Message, SynthesisRequest, Word, stream
from pipelines.serving.word_estimates import UNITS_PER_SECOND, WordEstimates

RATE = hibari.SAMPLE_RATE
EVENING = Path(__file__).parents[3] / "examples" / "evening.jsonl"


def estimated(samples: np.ndarray, text: str, chunk_seconds: float) -> list[Word]:
    estimates, step = WordEstimates(RATE), int(chunk_seconds * RATE)
    chunks = [samples[begin : begin + step] for begin in range(0, len(samples), step)]
    words = [word for chunk in chunks for word in estimates.add(chunk, text, False)]
    return [*words, *estimates.add(samples[:0], text, True)]


@pytest.mark.parametrize("chunk_seconds", [0.08, 2.0])
def test_half_of_the_estimates_are_within_80_ms_and_95_of_100_within_250(chunk_seconds: float) -> None:
    lines = [json.loads(line)["messages"] for line in EVENING.read_text().splitlines()]
    texts = [content for line in lines for _, kind, content in line if kind == "text"][:30]
    errors: list[float] = []
    pipeline = open_pipeline("hibari")
    for seed, text in enumerate(texts):
        request = SynthesisRequest("one", (Message("user", "text", text),), seed=seed, timestamps=True)
        chunks = list(stream(pipeline, request))
        exact = [word for chunk in chunks for word in chunk.words]
        found = estimated(np.concatenate([chunk.samples for chunk in chunks]), text, chunk_seconds)
        assert [word.text for word in found] == [word.text for word in exact]
        for one, other in zip(found, exact, strict=True):
            errors += abs(one.start_s - other.start_s), abs(one.end_s - other.end_s)
    pipeline.close()
    assert len(errors) > 400
    assert np.median(errors) < 0.08
    assert np.quantile(errors, 0.95) < 0.25


def test_silence_and_text_without_sound_have_words_all_the_same() -> None:
    words = estimated(np.zeros(RATE, np.float32), "Good morning, all.", 0.1)
    assert [word.text for word in words] == ["Good", "morning,", "all."]
    assert {(word.start_s, word.end_s) for word in words} == {(1.0, 1.0)}
    assert estimated(np.zeros(0, np.float32), "", 0.1) == []


def test_a_word_is_given_once_it_is_written_whole() -> None:
    sound = np.full(2 * RATE, 0.1, np.float32)
    estimates = WordEstimates(RATE)
    assert [word.text for word in estimates.add(sound, "Good mor", False)] == ["Good"]
    assert [word.text for word in estimates.add(sound, "Good morning, all ", False)] == ["morning,", "all"]


def test_a_text_without_spaces_has_a_time_for_each_character() -> None:
    text = "\u4f60\u597d\uff0c\u6211\u7528Python 3.5\u3002"
    sound, pause = np.full(RATE // 2, 0.1, np.float32), np.zeros(RATE // 4, np.float32)
    words = estimated(np.concatenate([sound, pause, *[sound] * 3]), text, 0.1)
    assert [word.text for word in words] == [
        "\u4f60",
        "\u597d\uff0c",
        "\u6211",
        "\u7528",
        "Python",
        "3.5\u3002",
    ]
    assert 0.2 < words[0].end_s < 0.3, "two characters share the sound before the comma"
    assert words[2].start_s == pytest.approx(0.75, abs=0.03)
    estimates, grown = WordEstimates(RATE), list[str]()
    for end in range(1, len(text) + 1):
        grown += [word.text for word in estimates.add(sound[: RATE // 5], text[:end], False)]
        assert all(grown[number] == words[number].text for number in range(len(grown)))
    assert len(grown) > 2


def test_a_pause_at_a_mark_corrects_the_pace() -> None:
    """The voice is a third faster than the expected one; each part says eight words of one length."""
    part = " ".join(["house"] * 8)
    seconds = text_units("house") * 8 / (UNITS_PER_SECOND * 4 / 3)
    sound, pause = np.full(round(seconds * RATE), 0.1, np.float32), np.zeros(RATE // 2, np.float32)
    estimates, step = WordEstimates(RATE), RATE // 10
    samples, text = np.concatenate([sound, pause, sound]), f"{part}, {part} "
    chunks = [samples[begin : begin + step] for begin in range(0, len(samples), step)]
    words = [word for chunk in chunks for word in estimates.add(chunk, text, False)]
    late = [word.start_s - (seconds + 0.5 + number * seconds / 8) for number, word in enumerate(words[8:])]
    assert len(late) >= 3
    assert late[0] == pytest.approx(0, abs=0.03)
    # Half of the difference is learned: a sixth and not a third of the time is too much.
    assert late[2] == pytest.approx(2 * seconds / 8 / 6, abs=0.03)


def test_a_text_that_grows_ends_with_the_words_of_the_whole() -> None:
    text, sound = "Good morning \u2014 all of you. 7:30? Yes!", np.full(RATE // 2, 0.1, np.float32)
    estimates, words = WordEstimates(RATE), list[str]()
    for end in range(1, len(text) + 1, 3):
        words += [word.text for word in estimates.add(sound, text[:end], False)]
    words += [word.text for word in estimates.add(sound, text, True)]
    assert words == ["Good", "morning", "all", "of", "you.", "7:30?", "Yes!"], "a dash is not said"
