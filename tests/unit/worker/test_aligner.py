"""The aligner: its path is the best one, its times are those of the sound, and its score finds what was not said."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    SeamlessM4TFeatureExtractor,
    Wav2Vec2BertConfig,
    Wav2Vec2BertForCTC,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
)

from pipelines.errors import ErrorCode, ModelError
from pipelines.hibari.pipeline import HibariPipeline
from pipelines.request import Message, SynthesisRequest, submit
from worker.quality.aligner import viterbi, word_times
from worker.quality.meters import SAMPLE_RATE, Utterance, open_meter

MODEL = Path(__file__).parents[2] / "support" / "aligner"
SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It is easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "The hogs were fed chopped corn and garbage.",
    "Four hours of steady work faced us, and nobody complained.",
    "A large size in stockings is hard to sell.",
)
VOCABULARY = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "'": 5} | {
    chr(ord("A") + number): number + 6 for number in range(26)
}


def best_by_trial(log_probs: NDArray[np.float32], ids: list[int], blank: int) -> float:
    """The log probability of the best path, by trial of all."""
    found = -np.inf
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        kept = [one for one, _ in itertools.groupby(path) if one != blank]
        if kept == ids:
            found = max(found, float(sum(log_probs[frame, one] for frame, one in enumerate(path))))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_path_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    log_probs = random.normal(size=(6, 3)).astype(np.float32)
    ids = random.integers(1, 3, random.integers(1, 5)).tolist()
    path, best = viterbi(log_probs, ids, 0), best_by_trial(log_probs, ids, 0)
    if path is None:
        assert best == -np.inf
        return
    said = np.where(path < 0, 0, np.array([*ids, 0])[path])
    assert float(log_probs[np.arange(6), said].sum()) == pytest.approx(best, abs=1e-4)
    assert [one for one, _ in itertools.groupby(path.tolist()) if one >= 0] == list(range(len(ids)))


def test_too_little_speech_has_no_path() -> None:
    assert viterbi(np.zeros((3, 4), np.float32), [1, 1, 1], 0) is None


def test_words_meet_between_their_tokens_and_end_with_their_sound() -> None:
    audio = np.zeros(2 * SAMPLE_RATE, np.float32)
    audio[SAMPLE_RATE // 2 : SAMPLE_RATE] = audio[int(1.2 * SAMPLE_RATE) : int(1.6 * SAMPLE_RATE)] = 0.5
    owned = np.full(100, -1)
    owned[[28, 34]], owned[[40, 47]], owned[[65, 75]] = 0, 1, 2
    said = word_times(["a", "b", "c"], owned, 0.02, audio)
    assert [(word.start_s, word.end_s) for word in said] == [
        pytest.approx(times, abs=0.0201) for times in ((0.5, 0.74), (0.74, 1.0), (1.2, 1.6))
    ]


def test_words_are_within_the_sound_also_if_their_tokens_are_not() -> None:
    audio = np.zeros(2 * SAMPLE_RATE, np.float32)
    audio[SAMPLE_RATE // 2 : SAMPLE_RATE] = 0.5
    owned = np.full(100, -1)
    owned[1], owned[[30, 60]] = 0, 1
    said = word_times(["a", "b"], owned, 0.02, audio)
    assert (said[0].start_s, said[1].end_s) == pytest.approx((0.5, 1.0), abs=0.0201)
    assert word_times(["a"], np.zeros(100, int), 0.02, 0 * audio)[0].text == "a"


def saved(folder: Path, kind: str, vocabulary: dict[str, int] = VOCABULARY) -> Path:
    """A folder of a small random CTC model."""
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), word_delimiter_token="|").save_pretrained(folder)
    small = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    if kind == "wav2vec2":
        Wav2Vec2FeatureExtractor().save_pretrained(folder)
        config = Wav2Vec2Config(
            **small,
            intermediate_size=64,
            conv_dim=(32,) * 7,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
        )
        Wav2Vec2ForCTC(config).save_pretrained(folder)
    else:
        SeamlessM4TFeatureExtractor(feature_size=40, num_mel_bins=40).save_pretrained(folder)
        config = Wav2Vec2BertConfig(
            **small,
            intermediate_size=64,
            feature_projection_input_dim=80,
            output_hidden_size=32,
            add_adapter=False,
        )
        Wav2Vec2BertForCTC(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["wav2vec2", "wav2vec2-bert"])
def test_a_folder_of_each_kind_aligns_short_and_long_speech(tmp_path: Path, kind: str) -> None:
    meter = open_meter("align", {"model": str(saved(tmp_path / kind, kind))})
    random = np.random.default_rng(0)
    for seconds, text in ((0.3, "No."), (4.0, "It's 42 — or Zoë's 7 cats…"), (45.0, "word " * 60)):
        audio = random.normal(scale=0.1, size=round(seconds * 24_000)).astype(np.float32)
        reading = meter.measure(Utterance(audio, 24_000, text))["align"]
        assert reading[0] < 0
        words = reading.words  # type: ignore[union-attr]
        assert [word.text for word in words] == [word for word in text.split() if word != "—"]
        edges = [edge for word in words for edge in (word.start_s, word.end_s)]
        assert edges == sorted(edges)
        assert 0 <= edges[0] < edges[-1] <= seconds
    assert meter.measure(Utterance(audio, 24_000, "—")) == {}
    short = Utterance(audio[:2400], 24_000, "far too many words for a tenth of a second " * 4)
    assert meter.measure(short)["align"][1] == "the speech is shorter than its text"


def test_characters_without_spaces_are_words_without_a_space_between_them(tmp_path: Path) -> None:
    """The speech has as many frames as the text has letters: a token between them would not fit."""
    text, letters = (
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u0e19\u0e35\u0e48",
        "\u4f60\u597d\u4e16\u754c\u0e19\u0e35\u0e48",
    )
    vocabulary = {**VOCABULARY, **{letter: len(VOCABULARY) + number for number, letter in enumerate(letters)}}
    meter = open_meter("align", {"model": str(saved(tmp_path / "model", "wav2vec2", vocabulary))})
    audio = np.random.default_rng(0).normal(scale=0.1, size=len(letters) * 320 + 100).astype(np.float32)
    reading = meter.measure(Utterance(audio, SAMPLE_RATE, text, "zh"))["align"]
    words = reading.words  # type: ignore[union-attr]
    assert [word.text for word in words] == [
        "\u4f60",
        "\u597d\uff0c",
        "\u4e16",
        "\u754c\u3002",
        "\u0e19\u0e35\u0e48",
    ]
    assert words[4].end_s - words[4].start_s > 2 * (words[2].end_s - words[2].start_s), (
        "its vowels are tokens too"
    )


def test_a_folder_that_is_none_is_named() -> None:
    with pytest.raises(ModelError) as caught:
        open_meter("align", {"model": "no/such/folder"})
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT
    assert "no/such/folder" in caught.value.message


def test_times_of_the_words_are_within_30_and_80_ms_of_the_exact_ones() -> None:
    """The model was trained by CTC alone, on other sentences of the same voice; see tests/support/aligner."""
    meter = open_meter("align", {"model": str(MODEL)})
    voice = HibariPipeline(threads=1)
    errors: list[float] = []
    places: list[float] = []
    scores: dict[str, list[float]] = {"whole": [], "skipped": [], "repeated": []}
    for number, text in enumerate(SENTENCES):
        asked = SynthesisRequest(text, (Message("user", "text", text),), seed=number, timestamps=True)
        speech = submit(voice, asked).result()
        reading = meter.measure(Utterance(speech.samples, speech.sample_rate, text))["align"]
        scores["whole"].append(reading[0])
        found = reading.words  # type: ignore[union-attr]
        assert [word.text for word in found] == [word.text for word in speech.words]
        for one, exact in zip(found, speech.words, strict=True):
            errors += [abs(one.start_s - exact.start_s), abs(one.end_s - exact.end_s)]
        longest = max(speech.words[:-1], key=lambda word: word.end_s - word.start_s)
        begin, end = (round(at * speech.sample_rate) for at in (longest.start_s, longest.end_s))
        for name, parts in (
            ("skipped", (slice(begin), slice(end, None))),
            ("repeated", (slice(end), slice(begin, None))),
        ):
            samples = np.concatenate([speech.samples[part] for part in parts])
            reading = meter.measure(Utterance(samples, speech.sample_rate, text))["align"]
            scores[name].append(reading[0])
            place = float(reading[1].removeprefix("at ").removesuffix(" s"))
            places.append(abs(place - (longest.start_s if name == "skipped" else longest.end_s)))
    voice.close()
    assert np.median(errors) <= 0.03
    assert np.percentile(errors, 95) <= 0.08
    assert np.median(places) <= 0.3, "the detail says where a word is missing or said twice"
    for name in ("skipped", "repeated"):
        worse = sum(score < whole for score, whole in zip(scores[name], scores["whole"], strict=True))
        assert worse >= 0.9 * len(SENTENCES), scores
        assert np.median(scores[name]) < 1.5 * np.median(scores["whole"]), scores
