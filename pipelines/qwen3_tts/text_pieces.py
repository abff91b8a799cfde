"""A text that comes in pieces, as token ids that are right whatever follows. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.errors import ErrorCode, InputError

if TYPE_CHECKING:
    from pipelines.qwen3_tts.prompt import TextTokenizer


class OpenTokens:
    """The text of one utterance. `add` is a `pipelines.request.TextPieces`: the ids that it gives, joined, are those of the joined text."""

    def __init__(self, tokenizer: TextTokenizer, max_characters: int) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._text = ""
        #: Ids that were given, and the characters that they are made of.
        self._given = 0
        self._characters = 0

    def add(self, text: str, final: bool = False) -> list[int]:
        """The ids that are certain with this text and were not given before; `final`: all of the rest.

        Raises `InputError` for a text that is too long, and for one that is no Unicode.
        """
        joined = (self._text + text).lstrip()
        if len(joined) > self._max_characters:
            message = f"The text has {len(joined)} characters; this model takes at most {self._max_characters}."
            raise InputError(ErrorCode.INPUT_TOO_LONG, message, "Begin another utterance.")
        self._text = joined
        whole = joined.rstrip() if final else joined
        end = len(whole) if final else self._tokenizer.certain(whole)
        if end <= self._characters and not final:
            return []
        ids = self._tokenizer.target(whole[:end])[1]
        fresh, self._given, self._characters = ids[self._given :], len(ids), end
        return fresh
