"""Text to ids. Control tokens are found by name, and user text may hold only those that a speaker of the language may want."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from pipelines.errors import ErrorCode, InputError, ModelError
from pipelines.fish_speech.config import FishConfig
from pipelines.task import is_visible

PHONEMES = ("<|phoneme_start|>", "<|phoneme_end|>")
#: Control tokens that prompts are made of.
_CONTROLS = ("<|im_start|>", "<|im_end|>", "<|voice|>")
_SPEAKER = re.compile(r"<\|speaker:\d{1,4}\|>")
_OLD_SPEAKER = re.compile(r"<speaker:(\d{1,4})>")
_MARK = re.compile(r"<\|[^<>|]{0,80}\|>")


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
            if found is None:
                raise _bad(f"{file} has no token {name}.")
            if found != names.get(name, found):
                raise _bad(f"{file} gives {name} the id {found}, config.json {names[name]}.")
            if found >= config.slow.vocab:
                raise _bad(f"{file} gives {name} the id {found}, beyond the vocabulary of {config.slow.vocab}.")
        # Speakers are plain text in the published tokenizer; one that has tokens for them means the same.
        self._spoken = frozenset(token for token, name in self._added.items() if name in PHONEMES or _SPEAKER.fullmatch(name))

    @classmethod
    def from_folder(cls, config: FishConfig) -> Vocabulary:
        """Reads `tokenizer.json`. Raises `ModelError` (`model.bad_checkpoint`) that names the file or the token at fault."""
        path = config.folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise _bad(f"{path} cannot be read as a tokenizer: {error}.") from error
        return cls(tokenizer, config, path)

    def encode(self, text: str) -> list[int]:
        """The ids of a string of ours, control tokens by their names."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def spoken(self, text: str) -> list[int]:
        """The ids of user text that `clean` has passed.

        Raises `InputError` (`input.unpronounceable`) for a text that names a control token.
        """
        ids = self.encode(text)
        for token in ids:
            if token in self._added and token not in self._spoken:
                raise _control(self._added[token])
        return ids


def clean(text: str) -> str:
    """User text with speaker tags in today's spelling.

    Raises `InputError` (`input.unpronounceable`) for control marks other than speaker tags and phoneme spans, for spans that are not
    closed, and for what is no Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = "The text holds half of a surrogate pair, which is no character."
        raise InputError(ErrorCode.INPUT_UNPRONOUNCEABLE, message, "Correct its encoding.") from error
    text = _OLD_SPEAKER.sub(r"<|speaker:\1|>", text)
    inside = False
    for mark in _MARK.finditer(text):
        name = mark.group()
        if name in PHONEMES:
            if inside is (name == PHONEMES[0]):
                raise _spans()
            inside = not inside
        elif _SPEAKER.fullmatch(name) is None:
            raise _control(name)
        elif inside:
            raise _spans()
    if inside:
        raise _spans()
    return text


def has_speaker(text: str) -> bool:
    """Whether a text says who speaks."""
    return _SPEAKER.search(text) is not None


def turns(text: str) -> list[str]:
    """A text cut before every speaker tag, without white space around the parts; what stands before the first tag is one of them.

    Raises `InputError` (`input.empty_text`) for a speaker who says nothing.
    """
    starts = [match.start() for match in _SPEAKER.finditer(text)]
    parts = [text[start:end].strip() for start, end in pairwise([*sorted({0, *starts}), len(text)])]
    for part in parts:
        if part and not is_visible(_SPEAKER.sub("", part)):
            raise InputError(ErrorCode.INPUT_EMPTY_TEXT, f"Nothing follows the speaker tag {part}.", "Remove the tag, or say something.")
    return [part for part in parts if part]


def _spans() -> InputError:
    message = "A phoneme span of the text is not closed, not opened, or holds another mark."
    return InputError(ErrorCode.INPUT_UNPRONOUNCEABLE, message, "Write <|phoneme_start|>...<|phoneme_end|> around the phonemes.")


def _control(name: str) -> InputError:
    message = f"The text holds the control token {name}, which cannot be spoken."
    return InputError(ErrorCode.INPUT_UNPRONOUNCEABLE, message, "Remove it from the text.")


def _bad(message: str) -> ModelError:
    return ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, message, "Download the checkpoint's tokenizer.json and config.json again.")
