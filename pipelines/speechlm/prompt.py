"""Dialogues to prompts, after the checkpoint's serving template: `[bos]`, then for each message role, modality, content, `[eos]`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from pipelines.errors import ErrorCode, InputError, ModelError
from pipelines.request import Message, Mode
from pipelines.speechlm.config import SpeechLmConfig

_ADVICE = "Download the checkpoint again."


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of a prompt. Audio is its marker and one more of it for each feature; `features` are where those go."""

    ids: list[int]
    #: (first position, features) of each recording, in order.
    features: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class TextCoder:
    """The checkpoint's tokenizer for plain text: what looks like a control token is text like any other."""

    def __init__(self, config: SpeechLmConfig) -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) for a tokenizer that is missing or cannot be read."""
        self._start, self._end = config.text_start, config.text_end
        path = config.folder / "tokenizer.json"
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            # Without them nothing that a user writes can become a control token.
            table["added_tokens"] = []
            table["post_processor"] = None
            self.tokenizer = Tokenizer.from_str(json.dumps(table))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{path} cannot be read: {error}.", _ADVICE) from error

    def encode(self, text: str) -> list[int]:
        """Text ids. Raises `InputError` (`input.unsupported`) where the tokenizer writes something else."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if any(not self._start <= token < self._end for token in ids):
            message = "The text holds something that this model's tokenizer turns into control tokens."
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, message, "Remove control characters and markup from the text.")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; others than text ids are left out."""
        return self.tokenizer.decode([token for token in ids if self._start <= token < self._end])


def chosen_messages(messages: Sequence[Message], mode: Mode) -> list[Message]:
    """The messages that a prompt is made of: for audio generation the assistant's are what is asked for, and skipped."""
    return [one for one in messages if not (mode == "text_audio" and one.role == "assistant")]


def build_prompt(config: SpeechLmConfig, coder: TextCoder, messages: Sequence[Message], feature_counts: Sequence[int]) -> Prompt:
    """The prompt of these messages, up to the assistant's turn.

    `feature_counts` are the lengths of the audio messages, in order. Source: the checkpoint's chat_template.jinja.
    """
    special = config.specials
    roles = {"system": special.system, "user": special.user, "assistant": special.assistant}
    ids = [special.bos]
    features: list[tuple[int, int]] = []
    counts = iter(feature_counts)
    for message in messages:
        ids.append(roles[message.role])
        if message.modality == "audio":
            count = next(counts)
            ids.append(special.audio)
            features.append((len(ids), count))
            ids += [special.audio] * count
        else:
            assert isinstance(message.content, str)
            ids += [special.text, *coder.encode(message.content)]
        ids.append(special.eos)
    ids.append(special.assistant)
    return Prompt(ids, features)
