"""Finds the words of a lexicon in a text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping

#: A run of letters and digits, or another character that follows none.
_TOKEN = re.compile(r"(?<!\w)(\w+|\S)")
_LETTER = re.compile(r"\w")


class WholeWords:
    """The entries of a lexicon, found in texts as whole words: no letter or digit is next to them.

    An entry without a capital letter matches any case, another one only its own. Of the entries that match at
    a place, the longest one counts, and of equally long ones the one in the text's own case.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._entries = entries
        #: First token in lower case -> entries, the longest first.
        self._starts: defaultdict[str, list[str]] = defaultdict(list)
        for word in sorted(entries, key=lambda word: (-len(word), word.islower(), word)):
            if (first := _TOKEN.match(word)) is not None:
                self._starts[first[0].lower()].append(word)

    def replaced(self, text: str, replacement: Callable[[str, str], str]) -> str:
        """The text with each word replaced by `replacement(word as written, value of its entry)`."""
        parts = list[str]()
        done = 0
        for token in _TOKEN.finditer(text) if self._entries else ():
            start = token.start()
            if start >= done and (entry := self._at(text, start, token[0])) is not None:
                end = start + len(entry)
                parts += [text[done:start], replacement(text[start:end], self._entries[entry])]
                done = end
        return "".join([*parts, text[done:]])

    def found(self, text: str) -> dict[str, str]:
        """The words of a text that have an entry, as they are written, and its values."""
        found = dict[str, str]()
        self.replaced(text, found.setdefault)
        return found

    def _at(self, text: str, start: int, token: str) -> str | None:
        """The entry that begins at a token."""
        for entry in self._starts.get(token.lower(), ()):
            end = start + len(entry)
            found = text[start:end]
            same = found == entry or (entry == entry.lower() and found.lower() == entry)
            if same and not _LETTER.match(text, end):
                return entry
        return None
