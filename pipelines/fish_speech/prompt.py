"""Prompts of the slow AR: a conversation of a system message, and of user and assistant messages turn by turn.

Its parts are tokenized one by one, as in training: a merge over the seam of two parts would make other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.fish_speech.vocabulary import Vocabulary, has_speaker, turns

_SYSTEM, _USER, _ASSISTANT, _END = "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n<|voice|>", "<|im_end|>\n"
_PLAIN = "convert the provided text to speech"
_CLONING = "convert the provided text to speech reference to the following:\n\nText:\n"
_SPEECH = "\n\nSpeech:\n"


@dataclass(frozen=True, slots=True)
class Reference:
    """A recording to clone, as a prompt holds it."""

    text: str
    #: int64 [frames, codebooks].
    codes: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a prompt, and the codes at its semantic positions in their order: int64 [semantic positions, codebooks]."""

    ids: tuple[int, ...]
    codes: NDArray[np.int64]


class Conversation:
    """What the slow AR is asked to go on with: a system message, then turns.

    conversation = Conversation(vocabulary, references)
    prompt = conversation.ask(text)
    conversation.answer(codes)
    """

    def __init__(self, vocabulary: Vocabulary, codebooks: int, references: Sequence[Reference] = ()) -> None:
        """Raises `InputError` (`input.unpronounceable`) for a reference whose text names a control token."""
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._codes: list[NDArray[np.int64]] = [np.zeros((0, codebooks), np.int64)]
        self._add(_SYSTEM)
        if references:
            self._add(_CLONING)
            self._ids += vocabulary.spoken("\n".join(_tagged(reference.text, i) for i, reference in enumerate(references)))
            self._add(_SPEECH)
            for reference in references:
                self._speech(reference.codes)
        else:
            self._add(_PLAIN)
        self._add(_END)

    def ask(self, text: str) -> Prompt:
        """The prompt that asks for `text` next. Raises `InputError` (`input.unpronounceable`)."""
        spoken = self._vocabulary.spoken(text)
        self._add(_USER)
        self._ids += spoken
        self._add(_END)
        self._add(_ASSISTANT)
        return Prompt(tuple(self._ids), np.concatenate(self._codes))

    def answer(self, codes: NDArray[np.int64]) -> None:
        """What was spoken after the last `ask`, int64 [frames, codebooks]."""
        self._speech(codes)
        self._add(_END)

    def _add(self, part: str) -> None:
        self._ids += self._vocabulary.encode(part)

    def _speech(self, codes: NDArray[np.int64]) -> None:
        self._ids += (codes[:, 0] + self._vocabulary.semantic.start).tolist()
        self._codes.append(codes)


def groups(text: str, most_bytes: int, most_turns: int) -> list[str]:
    """The user messages of a text: its turns, one a line, as many together as fit; a text without speaker tags is never cut.

    Raises `InputError` (`input.empty_text`) for a speaker who says nothing.
    """
    if not has_speaker(text):
        return [text]
    found: list[list[str]] = []
    for turn in turns(text):
        size = sum(len(one.encode()) for one in found[-1]) if found else 0
        if found and len(found[-1]) < most_turns and size + len(turn.encode()) <= most_bytes:
            found[-1].append(turn)
        else:
            found.append([turn])
    return ["\n".join(group) for group in found]


def columns(prompt: Prompt, semantic: range) -> NDArray[np.int64]:
    """A prompt as the published model takes it: int64 [1 + codebooks, positions], zeros where there is no speech."""
    ids = np.array(prompt.ids, dtype=np.int64)
    table = np.zeros((1 + prompt.codes.shape[1], len(ids)), np.int64)
    table[0] = ids
    table[1:, (ids >= semantic.start) & (ids < semantic.stop)] = prompt.codes.T
    return table


def _tagged(text: str, index: int) -> str:
    return text if has_speaker(text) else f"<|speaker:{index}|>{text}"
