"""What user text of Fish Speech S2 may hold, how long dialogues are cut, and what a conversation keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipelines.errors import ErrorCode, InputError
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.prompt import (
    Conversation,
    Reference,
    Vocabulary,
    clean,
    clean_reference,
    columns,
    groups,
    turns,
)
from tests.support.fish_checkpoint import whole

CONFIG = FishConfig.from_folder(whole())
VOCABULARY = Vocabulary.from_folder(CONFIG)


@pytest.mark.parametrize(
    "text",
    [
        "plain [whisper] and [excited tone] text",
        "Say <|phoneme_start|>HH AH0<|phoneme_end|> and <|phoneme_start|>L<|phoneme_end|>",
        "<|speaker:0|>Hello. <|speaker:12|>Hi.",
        "a | b <c> | d < e > f",
        "x < 3 and y |> z",
    ],
)
def test_what_may_be_said(text: str) -> None:
    assert clean(text) == text
    VOCABULARY.spoken(text)


@pytest.mark.parametrize(
    "text", ["<|speaker:0|>", " <speaker:1> ", "<|speaker:0|>Hello.<|speaker:1|>", "<|speaker:0|>\u200b"]
)
def test_the_words_of_a_recording_are_more_than_a_speaker_tag(text: str) -> None:
    """A tag alone would be no words of a recording, which this model cannot clone by."""
    with pytest.raises(InputError, match="no words") as caught:
        clean_reference(text)
    assert caught.value.code is ErrorCode.INPUT_REFERENCE_TEXT
    assert "generation.reference_text" in caught.value.advice


def test_the_words_of_a_recording_may_have_speakers() -> None:
    for text in ("Hello.", "<|speaker:1|>Hello.", "Before. <|speaker:0|>One. <|speaker:1|>Two."):
        assert clean_reference(text) == text
    assert clean_reference("<speaker:1>Hello.") == "<|speaker:1|>Hello."


def test_the_old_speaker_tag_is_today_s() -> None:
    assert clean("<speaker:3>Hello") == "<|speaker:3|>Hello"


@pytest.mark.parametrize(
    "text",
    [
        "read <|im_end|> this",
        "<|semantic:17|>",
        "<|voice|>",
        "<|audio_start|>",
        "<|no_such_token|>",
        "<|speaker:x|>",
        "<|speaker:99999|>",
        "<|phoneme_start|>open",
        "close<|phoneme_end|>",
        "<|phoneme_start|><|phoneme_start|>twice<|phoneme_end|><|phoneme_end|>",
        "<|phoneme_start|><|speaker:0|><|phoneme_end|>",
        "half a pair \ud800",
    ],
)
def test_control_tokens_are_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        clean(text)
    assert caught.value.code is ErrorCode.INPUT_UNPRONOUNCEABLE
    assert caught.value.advice


@pytest.mark.parametrize("name", ["<|im_start|>", "<|semantic:63|>", "<|pad|>", "<|endoftext|>"])
def test_a_control_token_that_slips_through_is_seen_among_the_ids(name: str) -> None:
    with pytest.raises(InputError, match="cannot be spoken"):
        VOCABULARY.spoken(f"a{name}b")


def test_a_tokenizer_may_have_tokens_of_speakers() -> None:
    tokenizer = Tokenizer.from_file(str(CONFIG.folder / "tokenizer.json"))
    before = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<|speaker:0|>", "<|speaker|>"])
    vocabulary = Vocabulary(tokenizer, CONFIG, Path("tokenizer.json"))
    assert vocabulary.spoken("<|speaker:0|>")[0] >= before
    with pytest.raises(InputError, match="speaker"):
        vocabulary.spoken("<|speaker|>Hello.")


def test_turns_are_cut_before_their_tags() -> None:
    assert turns("Before. <|speaker:0|> One. \n<|speaker:1|>Two.") == [
        "Before.",
        "<|speaker:0|> One.",
        "<|speaker:1|>Two.",
    ]


@pytest.mark.parametrize(
    "text", ["<|speaker:0|>", "<|speaker:0|>One. <|speaker:1|> \n", "<|speaker:0|><|speaker:1|>Two."]
)
def test_a_speaker_who_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        groups(text, 200, 5)
    assert caught.value.code is ErrorCode.INPUT_EMPTY_TEXT


def test_text_without_speakers_is_never_cut() -> None:
    assert groups("word " * 500, 20, 5) == ["word " * 500]


def test_turns_are_joined_up_to_so_many_bytes_and_turns() -> None:
    short = [f"<|speaker:{index % 2}|>Hi." for index in range(12)]
    assert [len(group.split("\n")) for group in groups(" ".join(short), 1000, 5)] == [5, 5, 2]
    assert groups(" ".join(short[:4]), 32, 5) == ["\n".join(short[:2]), "\n".join(short[2:4])]
    umlauts = ["<|speaker:0|>" + "ü" * 10, "<|speaker:1|>" + "ü" * 10]
    assert len(groups("".join(umlauts), 66, 5)) == 1
    assert len(groups("".join(umlauts), 65, 5)) == 2
    long = ["<|speaker:0|>" + "a" * 100, "<|speaker:1|>b"]
    assert groups("".join(long), 50, 5) == long, "a turn that is too long stands alone"


def test_a_conversation_carries_references_and_what_was_spoken() -> None:
    dice = np.random.default_rng(0)
    first, second, spoken = (dice.integers(0, 24, (frames, 10)) for frames in (3, 2, 4))
    conversation = Conversation(
        VOCABULARY, 10, [Reference("One.", first), Reference("<|speaker:7|>Two.", second)]
    )
    conversation.ask("Hello.")
    conversation.answer(spoken)
    prompt = conversation.ask("Go on.")
    assert np.array_equal(prompt.codes, np.concatenate([first, second, spoken]))
    table = columns(prompt, CONFIG.semantic)
    speech = (table[0] >= CONFIG.semantic.start) & (table[0] < CONFIG.semantic.stop)
    assert np.array_equal(table[1:, speech].T, prompt.codes)
    assert np.array_equal(table[0, speech] - CONFIG.semantic.start, prompt.codes[:, 0])
    assert not table[1:, ~speech].any()
    text = VOCABULARY._tokenizer.decode(
        [token for token in prompt.ids if token not in CONFIG.semantic], skip_special_tokens=False
    )
    assert "Text:\n<|speaker:0|>One.\n<|speaker:7|>Two.\n\nSpeech:\n" in text
    assert text.endswith("<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n<|voice|>")
