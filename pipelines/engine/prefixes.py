"""Prefixes that prompts have in common, such as a voice's recording: their keys and values are computed once and read by many requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.engine.state import PagedKV


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The first positions of a prompt, which other prompts can begin with too."""

    #: A digest of everything that the embeddings of these positions are made from, such as token ids and codes.
    content: bytes
    #: How many positions.
    length: int


@dataclass(eq=False, slots=True)
class SharedPrefix:
    """Pages whose keys and values several running requests read. Nobody writes them again."""

    content: bytes
    pages: Sequence[int]
    #: Running requests that read it.
    users: int = 1
    #: Whether it can hold NaN.
    doubtful: bool = False


class PrefixCache:
    """The prefixes whose keys and values are in pages, and the pages that are free beside them.

    A prefix that nobody reads stays until its pages are needed; the one that was read longest ago goes first. So prefixes take no page
    from a request, and need no bound. A prefix is known by its content and its pages: prompts that share another number of pages cut
    their chunks elsewhere, and its bits could differ.
    """

    def __init__(self, kv: PagedKV) -> None:
        self._kv = kv
        self._known: dict[tuple[bytes, int], SharedPrefix] = {}
        #: Those that nobody reads, in the order in which they were left.
        self._unused: dict[SharedPrefix, None] = {}
        self._unused_pages = 0
        #: Free pages that can hold NaN.
        self._unclean: list[int] = []

    def __len__(self) -> int:
        return len(self._known)

    @property
    def free(self) -> int:
        """Pages that no running request has."""
        return self._kv.free + self._unused_pages + len(self._unclean)

    def take(self, count: int) -> list[int] | None:
        """That many pages, of prefixes that nobody reads where no others are free; None when there are fewer."""
        if count > self.free:
            return None
        if self._unclean:
            self._kv.scrub(self._unclean)
            self._kv.give_back(self._unclean)
            self._unclean = []
        while count > self._kv.free:
            self._evict()
        return self._kv.take(count)

    def use(self, content: bytes, pages: int) -> SharedPrefix | None:
        """The prefix of so many pages for one more request; None when it is not known."""
        prefix = self._known.get((content, pages))
        if prefix is not None:
            if not prefix.users:
                del self._unused[prefix]
                self._unused_pages -= pages
            prefix.users += 1
        return prefix

    def keep(self, content: bytes, pages: Sequence[int]) -> SharedPrefix | None:
        """Makes the first pages of a running request a prefix, with this request as its user; None when it is known already."""
        key = content, len(pages)
        if key in self._known:
            return None
        prefix = self._known[key] = SharedPrefix(content, pages)
        return prefix

    def release(self, prefix: SharedPrefix) -> None:
        """One user less."""
        prefix.users -= 1
        if prefix.users:
            return
        if prefix.doubtful:
            self._unclean += prefix.pages
        else:
            self._unused[prefix] = None
            self._unused_pages += len(prefix.pages)

    def doubt(self, prefix: SharedPrefix) -> None:
        """Gives a prefix that can hold NaN to nobody any more. Those that read it go on, and its pages are zeroed after them."""
        if not prefix.doubtful:
            prefix.doubtful = True
            del self._known[prefix.content, len(prefix.pages)]

    def clear(self) -> None:
        """Forgets the prefixes that nobody reads."""
        while self._unused:
            self._evict()

    def _evict(self) -> None:
        prefix = next(iter(self._unused))
        del self._unused[prefix], self._known[prefix.content, len(prefix.pages)]
        self._unused_pages -= len(prefix.pages)
        self._kv.give_back(list(prefix.pages))
