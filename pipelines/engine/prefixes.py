"""Prefixes that prompts have in common, such as a voice's recording or a dialogue so far: computed once
and read by many requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelines.engine.state import PagedKV


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The first positions of a prompt, which other prompts can begin with too."""

    #: A digest of everything that the embeddings of these positions are made from, such as token ids and
    #: codes.
    content: bytes
    #: How many positions.
    length: int


@dataclass(eq=False, slots=True)
class SharedPrefix:
    """Pages whose keys and values several running requests read. Nobody writes them again."""

    content: bytes
    #: The shorter prefix that it goes on from. Whoever reads this one reads that one too.
    before: SharedPrefix | None
    #: Its own, behind those of the shorter one.
    pages: Sequence[int]
    #: Running requests that read it.
    users: int = 1
    #: Whether it can hold NaN.
    doubtful: bool = False

    @property
    def chain(self) -> list[SharedPrefix]:
        """It and the shorter ones that it goes on from, the longest first."""
        found, one = [], self
        while one is not None:
            found.append(one)
            one = one.before
        return found

    @property
    def all_pages(self) -> list[int]:
        """In the order of positions, from the first one on."""
        return [page for one in reversed(self.chain) for page in one.pages]


class PrefixCache:
    """The prefixes whose keys and values are in pages, and the pages that are free beside them.

    A prefix that nobody reads stays until its pages are needed; the one that was read longest ago goes
    first. So prefixes take no page from a request, and need no bound. A prefix is known by its content,
    its pages and the shorter prefix that it goes on from: prompts that share other numbers of pages cut
    their chunks elsewhere, and its bits could differ. Since whoever reads a prefix reads the shorter ones
    too, and leaves them after it, they never go before it.
    """

    def __init__(self, kv: PagedKV) -> None:
        self._kv = kv
        self._known: dict[tuple[SharedPrefix | None, bytes, int], SharedPrefix] = {}
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
        """That many pages, of prefixes that nobody reads where no others are free; None when there are
        fewer."""
        if count > self.free:
            return None
        if self._unclean:
            self._kv.scrub(self._unclean)
            self._kv.give_back(self._unclean)
            self._unclean = []
        while count > self._kv.free:
            self._evict()
        return self._kv.take(count)

    def use(self, prefixes: Iterable[tuple[bytes, int]]) -> SharedPrefix | None:
        """For one more request the longest prefix that is known, with the shorter ones; None when there is
        none.

        `prefixes`: each goes on from the one before it: (content, pages from the first position to its end).
        """
        found, behind = None, 0
        for content, end in prefixes:
            longer = self._known.get((found, content, end - behind))
            if longer is None:
                break
            found, behind = longer, end
        for prefix in found.chain if found is not None else ():
            if not prefix.users:
                self._leave_unused(prefix)
            prefix.users += 1
        return found

    def keep(self, before: SharedPrefix | None, content: bytes, pages: Sequence[int]) -> SharedPrefix | None:
        """Makes pages of a running request a prefix with this request as its user; `before`: the one that
        they go on from, in use by it.

        None when it is known already, and behind what can hold NaN.
        """
        key = before, content, len(pages)
        if key in self._known or (before is not None and before.doubtful):
            return None
        prefix = self._known[key] = SharedPrefix(content, before, pages)
        return prefix

    def release(self, prefix: SharedPrefix) -> None:
        """One user less, of the shorter ones too."""
        for one in prefix.chain:
            one.users -= 1
            if one.users:
                continue
            if one.doubtful:
                self._unclean += one.pages
            else:
                self._unused[one] = None
                self._unused_pages += len(one.pages)

    def doubt(self, prefix: SharedPrefix) -> None:
        """Gives a prefix that can hold NaN to nobody any more, nor what it goes on from, nor what goes on
        from that.

        Those that read them go on, and the pages are zeroed after them.
        """
        first = prefix.chain[-1]
        for one in [one for one in self._known.values() if one.chain[-1] is first]:
            one.doubtful = True
            del self._known[one.before, one.content, len(one.pages)]
            if not one.users:
                self._leave_unused(one)
                self._unclean += one.pages

    def clear(self) -> None:
        """Forgets the prefixes that nobody reads."""
        while self._unused:
            self._evict()

    def _evict(self) -> None:
        prefix = next(iter(self._unused))
        self._leave_unused(prefix)
        del self._known[prefix.before, prefix.content, len(prefix.pages)]
        self._kv.give_back(list(prefix.pages))

    def _leave_unused(self, prefix: SharedPrefix) -> None:
        del self._unused[prefix]
        self._unused_pages -= len(prefix.pages)
