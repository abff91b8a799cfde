"""When the embedded voice says each word: against its waveform, its text, and its speech without times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from hibari import Hibari
from hypothesis import given
from hypothesis import strategies as st

from pipelines.engine_process.client import EngineProcess
from pipelines.errors import InputError
from pipelines.hibari.pipeline import HibariPipeline
from pipelines.hibari.text import EnglishReader, readable
from pipelines.hibari.times import read_as
from pipelines.request import Message, Speech, SynthesisRequest, Word, stream, submit

TEXTS = (
    "She sells sea shells, she said, and six sick sheep sat still. The stitch was loose.",
    "The fish twisted and turned on the bent hook; press the pants and sew a button on the vest.",
    "Six seasons passed: the swan dive was far short of perfect. Say it slowly, she wishes.",
)
HARD = "The meeting is at 7:30 pm, on 3/4/2024, with Dr. Smith — and state-of-the-art tools of things. It costs $5 million!"


READER = EnglishReader()


def timed(text: str, *, timestamps: bool = True) -> SynthesisRequest:
    return SynthesisRequest("a", (Message("user", "text", text),), seed=7, timestamps=timestamps)


@pytest.fixture(scope="module")
def voice() -> Iterator[HibariPipeline]:
    pipeline = HibariPipeline(threads=1)
    yield pipeline
    pipeline.close()


def hiss(speech: Speech) -> tuple[np.ndarray, np.ndarray]:
    """The middles of frames of 10 ms in seconds [frames], and how much of each is above 4.5 kHz in dB [frames]."""
    windows = np.lib.stride_tricks.sliding_window_view(speech.samples, 240)[::60] * np.hanning(240)
    power = np.abs(np.fft.rfft(windows)) ** 2
    ratio = 10 * np.log10((power[:, 45:].sum(axis=1) + 1e-9) / (power[:, 2:20].sum(axis=1) + 1e-9))
    return (np.arange(len(windows)) * 60 + 120) / speech.sample_rate, ratio


def test_the_times_are_those_of_the_waveform(voice: HibariPipeline) -> None:
    """Hissing phonemes hiss in their own time, and words begin and end with their sound at pauses."""
    shifts = np.arange(-0.1, 0.101, 0.01)
    hissing: list[list[float]] = []
    begins: list[float] = []
    for text in TEXTS:
        speech = submit(voice, timed(text)).result()
        at, ratio = hiss(speech)
        for one in speech.phonemes:
            if one.text in ("s", "ʃ") and one.end_s - one.start_s > 0.05:
                inside = [(at >= one.start_s + by) & (at < one.end_s + by) for by in shifts]
                hissing.append([float(ratio[mask].mean()) for mask in inside])
        loud = np.abs(speech.samples).reshape(-1, 120).max(axis=1) > 0.01
        pauses = [
            (one, two) for one, two in zip(speech.words, speech.words[1:]) if two.start_s - one.end_s > 0.1
        ]
        assert pauses
        for before, after in pauses:
            span = slice(round(before.end_s * 200), round((after.start_s + 0.15) * 200))
            begins.append(before.end_s + np.flatnonzero(loud[span])[0] * 0.005 - after.start_s)
            quiet = slice(round((before.end_s + 0.02) * 200), round((after.start_s - 0.06) * 200))
            assert not loud[quiet].any(), (before, after)
    assert len(hissing) >= 25
    assert abs(shifts[np.mean(hissing, axis=0).argmax()]) <= 0.015
    assert np.median(np.abs(begins)) <= 0.03


def test_words_are_those_of_the_text_in_order(voice: HibariPipeline) -> None:
    speech = submit(voice, timed(HARD)).result()
    assert [word.text for word in speech.words] == [word for word in HARD.split() if word != "—"]
    edges = [edge for word in speech.words for edge in (word.start_s, word.end_s)]
    assert edges == sorted(edges)
    assert edges[0] > 0
    assert edges[-1] <= len(speech.samples) / speech.sample_rate
    length = {word.text: word.end_s - word.start_s for word in speech.words}
    assert length["3/4/2024,"] > 3 * length["Smith"]
    assert length["7:30"] > 0.5
    clock = next(word for word in speech.words if word.text == "7:30")
    heard = "".join(one.text for one in speech.phonemes if clock.start_s <= one.start_s < clock.end_s)
    assert heard == "sˈɛvənθˈɜɹTi"
    assert all(one.text.strip("ˈˌ") for one in speech.phonemes), "a mark of stress is no phoneme"


def test_speech_and_noise_do_not_change(voice: HibariPipeline) -> None:
    plain = submit(voice, timed(HARD, timestamps=False)).result()
    assert plain.words == plain.phonemes == ()
    assert np.array_equal(submit(voice, timed(HARD)).result().samples, plain.samples)
    ids = READER.voice.ids("həlˈO ðˈɛɹ, wˈɜɹld.")
    stock = Hibari().from_ids(ids, 1.0, np.random.default_rng(3))
    assert np.array_equal(READER.voice.timed(ids, np.random.default_rng(3))[0], stock)


def test_a_stream_has_the_same_words_with_their_sound(voice: HibariPipeline) -> None:
    whole, seconds = submit(voice, timed(HARD)).result(), 0.0
    words: list[Word] = []
    for chunk in stream(voice, timed(HARD)):
        assert all(seconds <= word.start_s <= word.end_s for word in chunk.words)
        seconds += len(chunk.samples) / chunk.sample_rate
        assert all(word.end_s <= seconds for word in (*chunk.words, *chunk.phonemes))
        words += chunk.words
    assert tuple(words) == whole.words


def test_times_cross_processes() -> None:
    process = EngineProcess("hibari", {"threads": 1})
    try:
        speech = submit(process, timed("Good evening. Good night.")).result()
        assert [word.text for word in speech.words] == ["Good", "evening.", "Good", "night."]
        chunks = list(stream(process, timed("Good evening. Good night.")))
        assert tuple(word for chunk in chunks for word in chunk.words) == speech.words
        assert tuple(one for chunk in chunks for one in chunk.phonemes) == speech.phonemes
        assert not any(chunk.words for chunk in stream(process, timed("Good.", timestamps=False)))
    finally:
        process.close()


@pytest.mark.parametrize(
    ("written", "read", "owners"),
    [
        ("a b c", "a b c", [0, 1, 2]),
        ("at 7:30 pm.", "at seven thirty P.M.", [0, 1, 1, 2]),
        ("Dr. No. 5", "Doctor Number 5", [0, 1, 2]),
        ("$5 million now", "5 million dollars now", [0, 1, 1, 2]),
        ("a — b", "a b", [0, 2]),
        ("10 km", "10 kilometers", [0, 1]),
        ("b", "x y b", [0, 0, 0]),
        ("7:30 seven", "seven thirty seven", [0, 0, 1]),
        (
            "At 7:30 7:30 7:30 we go.",
            "At seven thirty seven thirty seven thirty we go.",
            [0, 1, 1, 2, 2, 3, 3, 4, 5],
        ),
        ("7:30, 7:30, half five seven", "seven thirty, seven thirty, half five seven", [0, 0, 1, 1, 2, 3, 4]),
        ("3:16, 3.16, 316", "three sixteen, 3.16, 316", [0, 0, 1, 2]),
        ("$5 1/2 100% one", "$5 one half 100% one", [0, 1, 1, 2, 3]),
        ("Visit a=b&c=d or", "Visit a equals b&c equals d or", [0, 1, 1, 1, 1, 1, 2]),
        ("(555) 123-4567", "(555) 1 2 3, 4 5 6 7", [0, 1, 1, 1, 1, 1, 1, 1]),
        ("a b", "a" + " x" * 60, [0] * 31 + [1] * 30),
    ],
)
def test_words_that_are_read_otherwise(written: str, read: str, owners: list[int]) -> None:
    assert list(read_as(written.split(), read.split())) == owners


def test_repeated_words_all_have_a_time() -> None:
    """Also where a word is read as another one that follows."""
    random = Random(1)
    words = [
        "7:30",
        "7:30,",
        "$5",
        "5",
        "Dr.",
        "the",
        "3/4/2024",
        "3.16",
        "one",
        "seven",
        "thirty",
        "half",
        "five",
        "1/2",
        "&",
        "100%",
        "#1",
        "2nd",
        "$3.50",
    ]
    for number in range(400):
        chosen = random.choices(words, k=random.randint(2, 5)) if number % 2 else [random.choice(words)] * 3
        owners = deque[int]()
        list(READER.pieces(" ".join(chosen), lambda: False, owners=owners))
        said = [word for place, word in enumerate(chosen) if place in owners]
        assert said == chosen


@given(st.text("ab1.,-(]🙂é \n$&/", min_size=1, max_size=60))
def test_every_phoneme_has_a_word(text: str) -> None:
    owners = deque[int]()
    try:
        pieces = list(READER.pieces(text, lambda: False, owners=owners))
    except InputError:
        return
    assert len(owners) == sum(number not in (0, 16) for piece in pieces for number in piece)
    assert list(owners) == sorted(owners)
    assert max(owners) < len(text.split())
    assert sum(len(readable(word).split()) for word in text.split()) == len(readable(text).split())
