"""Prompts of the slow AR: a system message, then a user and an assistant message for each turn.

The parts of a prompt are tokenized separately, as in training: a merge across two parts would give other
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from pipelines.errors import ErrorCode, InputError
from pipelines.fish_speech.config import FishConfig
from pipelines.nn.config_keys import bad_checkpoint, read_tokenizer
from pipelines.request import IntArray
from pipelines.tokens import TokenPrompt
from pipelines.validation import check_unicode, control_token, is_visible

PHONEMES = ("<|phoneme_start|>", "<|phoneme_end|>")
#: Control tokens of prompts.
_CONTROLS = ("<|im_start|>", "<|im_end|>", "<|voice|>")
_SPEAKER = re.compile(r"<\|speaker:\d{1,4}\|>")
_OLD_SPEAKER = re.compile(r"<speaker:(\d{1,4})>")
_MARK = re.compile(r"<\|[^<>|]{0,80}\|>")
#: Phonemes between the two marks, with no other mark between them.
_SPAN = re.compile(r"<\|phoneme_start\|>((?!<\|[^<>|]{0,80}\|>).)*<\|phoneme_end\|>", re.DOTALL)


class Vocabulary:
    """The tokenizer of a checkpoint folder, checked against its config."""

    def __init__(self, tokenizer: Tokenizer, config: FishConfig, file: Path) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self.semantic = config.semantic
        names = {"<|im_end|>": config.end, "<|semantic:0|>": config.semantic.start}
        names[f"<|semantic:{len(config.semantic) - 1}|>"] = config.semantic[-1]
        for name in (*_CONTROLS, *names):
            found = tokenizer.token_to_id(name)
            if found is None or found >= config.slow.vocab:
                raise bad_checkpoint(
                    f"{file} has no token {name} within the vocabulary of {config.slow.vocab}."
                )
            if found != names.get(name, found):
                raise bad_checkpoint(f"{file} gives {name} the id {found}, config.json {names[name]}.")
        # Speaker tags are plain text in the published tokenizer; a tokenizer with tokens for them is accepted
        # too.
        self._spoken = frozenset(
            token for token, name in self._added.items() if name in PHONEMES or _SPEAKER.fullmatch(name)
        )

    @classmethod
    def from_folder(cls, config: FishConfig) -> Vocabulary:
        """Reads `tokenizer.json`. Raises `ModelError` (`model.bad_checkpoint`) that names the file or a wrong
        token."""
        path = config.folder / "tokenizer.json"
        return cls(read_tokenizer(path), config, path)

    def encode(self, text: str) -> list[int]:
        """The ids of a string; control tokens are written as `<|name|>` in it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def spoken(self, text: str) -> list[int]:
        """The ids of user text after `clean`.

        Raises `InputError` (`input.unpronounceable`) for a text that contains a control token.
        """
        ids = self.encode(text)
        for token in ids:
            if token in self._added and token not in self._spoken:
                raise control_token(self._added[token])
        return ids


def clean(text: str) -> str:
    """Converts speaker tags of user text to their current spelling.

    Raises `InputError` (`input.unpronounceable`) for control marks other than speaker tags and phoneme spans,
    for spans that are not closed, and for text that is not Unicode.
    """
    check_unicode(text)
    text = _OLD_SPEAKER.sub(r"<|speaker:\1|>", text)
    for name in _MARK.findall(_SPAN.sub("", text)):
        if name in PHONEMES:
            raise InputError(
                ErrorCode.INPUT_UNPRONOUNCEABLE,
                "A phoneme span of the text is not closed, not opened, or contains another mark.",
                "Write <|phoneme_start|>...<|phoneme_end|> around the phonemes.",
            )
        if _SPEAKER.fullmatch(name) is None:
            raise control_token(name)
    return text


def clean_reference(text: str) -> str:
    """Cleans the text of a recording. Raises `InputError` like `clean`, and `input.reference_text` for a speaker
    tag without words."""
    text = clean(text)
    try:
        turns(text)
    except InputError as error:
        raise InputError(
            ErrorCode.INPUT_REFERENCE_TEXT,
            "A speaker tag of `reference_text` has no words.",
            "Write the words of the recording in `generation.reference_text`.",
        ) from error
    return text


def has_speaker(text: str) -> bool:
    """Whether a text has a speaker tag."""
    return _SPEAKER.search(text) is not None


def turns(text: str) -> list[str]:
    """Splits a text before every speaker tag and strips the parts; text before the first tag is a part too.

    Raises `InputError` (`input.empty_text`) for a speaker tag without words.
    """
    starts = [match.start() for match in _SPEAKER.finditer(text)]
    parts = [text[start:end].strip() for start, end in pairwise([*sorted({0, *starts}), len(text)])]
    for part in parts:
        if part and not is_visible(_SPEAKER.sub("", part)):
            raise InputError(
                ErrorCode.INPUT_EMPTY_TEXT,
                f"Nothing follows the speaker tag {part}.",
                "Remove the tag, or add words after it.",
            )
    return [part for part in parts if part]


_SYSTEM = "<|im_start|>system\n"
_USER = "<|im_start|>user\n"
_ASSISTANT = "<|im_start|>assistant\n<|voice|>"
_END = "<|im_end|>\n"
_PLAIN = "convert the provided text to speech"
_CLONING = "convert the provided text to speech reference to the following:\n\nText:\n"
_SPEECH = "\n\nSpeech:\n"


class Reference(NamedTuple):
    """A recording to clone, as part of a prompt."""

    text: str
    #: int64 [frames, codebooks].
    codes: IntArray


class Conversation:
    """The conversation that the slow AR continues: a system message, then turns.

    conversation = Conversation(vocabulary, codebooks, references)
    prompt = conversation.ask(text)
    conversation.answer(codes)
    """

    def __init__(self, vocabulary: Vocabulary, codebooks: int, references: Sequence[Reference]) -> None:
        """Raises `InputError` (`input.unpronounceable`) for a reference text that contains a control token."""
        self._vocabulary = vocabulary
        self._ids = list[int]()
        self._codes = [np.zeros((0, codebooks), np.int64)]
        self._add(_SYSTEM)
        if references:
            self._add(_CLONING)
            self._ids += vocabulary.spoken(
                "\n".join(
                    ("" if has_speaker(reference.text) else f"<|speaker:{index}|>") + reference.text
                    for index, reference in enumerate(references)
                )
            )
            self._add(_SPEECH)
            for reference in references:
                self._speech(reference.codes)
        else:
            self._add(_PLAIN)
        self._add(_END)
        self._shared = [len(self._ids)]

    def ask(self, text: str, more: bool = False) -> TokenPrompt:
        """The prompt for `text` as the next turn; `more`: whether another turn follows. It shares the system
        message with its references, and the prompt of each turn except the last. Raises `InputError`
        (`input.unpronounceable`)."""
        spoken = self._vocabulary.spoken(text)
        self._add(_USER)
        self._ids += spoken
        self._add(_END)
        self._add(_ASSISTANT)
        if more:
            self._shared.append(len(self._ids) - 1)
        return TokenPrompt(tuple(self._ids), np.concatenate(self._codes), tuple(self._shared))

    def answer(self, codes: IntArray) -> None:
        """Adds the speech of the last `ask`, int64 [frames, codebooks]."""
        self._speech(codes)
        self._add(_END)

    def _add(self, part: str) -> None:
        self._ids += self._vocabulary.encode(part)

    def _speech(self, codes: IntArray) -> None:
        self._ids += (codes[:, 0] + self._vocabulary.semantic.start).tolist()
        self._codes.append(codes)


def groups(text: str, max_bytes: int, max_turns: int) -> list[str]:
    """Divides a text into user messages of one or more turns each, with one turn per line. A text without
    speaker tags is not divided.

    Raises `InputError` (`input.empty_text`) for a speaker tag without words.
    """
    if not has_speaker(text):
        return [text]
    found = list[list[str]]()
    for turn in turns(text):
        size = sum(len(part.encode()) for part in found[-1]) if found else 0
        if found and len(found[-1]) < max_turns and size + len(turn.encode()) <= max_bytes:
            found[-1].append(turn)
        else:
            found.append([turn])
    return ["\n".join(group) for group in found]


def columns(prompt: TokenPrompt, semantic: range) -> IntArray:
    """A prompt in the published model's format: int64 [1 + codebooks, positions], zeros at positions without
    speech."""
    ids = np.array(prompt.ids, dtype=np.int64)
    table = np.zeros((1 + prompt.codes.shape[1], len(ids)), np.int64)
    table[0] = ids
    table[1:, is_speech(ids, semantic)] = prompt.codes.T
    return table


def is_speech(ids: Any, semantic: range) -> Any:
    """Which ids, an array or a tensor, are semantic tokens: bool of the same shape."""
    return (ids >= semantic.start) & (ids < semantic.stop)
