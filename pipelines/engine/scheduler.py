"""The scheduler: admission, slots, pages, prefill in chunks, shared prefixes of prompts, and preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from pipelines.engine.executor import EngineOptions
from pipelines.engine.state import PagedKV, SamplingParams
from pipelines.engine.turns import Playback
from pipelines.errors import NightjarError
from pipelines.request import FloatArray, IntArray

Finish = Literal["eos", "length"]

#: Full turns (with nearly as many requests as the limit allows) that must succeed after an out-of-memory
#: error before the limit grows. With a large batch they take some seconds. Each error doubles their number, up
#: to the maximum.
FIRST_PATIENCE = 128
MAX_PATIENCE = 1 << 14


class FrameReceiver(Protocol):
    """Receives the frames of one request. Called on the engine's thread, so it must be quick."""

    def frames(self, codes: IntArray) -> None:
        """Receives the next frames [frames, codebooks] of a stream; only `finished` receives the last
        ones."""
        ...

    def finished(self, codes: IntArray, finish: Finish, log_probabilities: FloatArray) -> None:
        """Receives all frames [frames, codebooks] of a request, and the log probabilities [frames] of codebook 0;
        `finish` is "length" if it reached its limit."""
        ...

    def failed(self, error: NightjarError) -> None: ...


class PromptPrefix(NamedTuple):
    """The first positions of a prompt, which other prompts can share."""

    #: A digest of everything that the embeddings of these positions depend on, such as token ids and codes.
    content: bytes
    #: Number of positions.
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One utterance for the engine, compared by identity.

    `max_tokens` counts draws of codebook 0; the last one only decides whether speech has ended.
    """

    request_id: str
    #: Made by the model's family. The engine only uses its length and its attribute `trailing`: int64, the ids
    #: of the text that follows it.
    prompt: Any
    sampling: SamplingParams
    seed: int
    max_tokens: int
    #: Whether its frames are delivered in chunks while it runs; streams have priority over whole utterances.
    stream: bool = False
    #: Frames of a stream before the first audible one, including those that the codec holds back.
    inaudible: int = 0
    #: Whether more text follows by `EngineCore.append`; only for streams.
    text_open: bool = False
    #: Codes of the prompt that the repetition penalty counts as drawn.
    drawn: Sequence[int] = ()
    #: Prefixes of the prompt that others can share, the shortest first.
    prefixes: Sequence[PromptPrefix] = ()
    #: An object of the caller, by which the request can be cancelled.
    origin: object = None
    #: Maximum frames that its text can need, see `longest_seconds`; None: unknown.
    longest: int | None = None

    def prefix_ends(self, page_size: int) -> list[tuple[bytes, int]]:
        """(content, whole pages up to its end) of each prefix that has more pages than the one before.

        The last position of the prompt is in no prefix, since the first frame writes it.
        """
        found = list[tuple[bytes, int]]()
        for prefix in self.prefixes:
            pages = min(prefix.length, len(self.prompt) - 1) // page_size
            if pages > (found[-1][1] if found else 0):
                found.append((prefix.content, pages))
        return found


@dataclass(eq=False, slots=True)
class SharedPrefix:
    """Read-only pages whose keys and values several running requests share."""

    content: bytes
    #: The shorter prefix that this one extends. A user of this prefix is also a user of its parent.
    parent: SharedPrefix | None
    #: Its own pages, after those of the parent.
    pages: Sequence[int]
    #: Number of running requests that use it.
    users: int = 1
    #: Whether it can hold NaN.
    invalid: bool = False

    @property
    def chain(self) -> list[SharedPrefix]:
        """This prefix and its ancestors, the longest first."""
        found = []
        one = self
        while one is not None:
            found.append(one)
            one = one.parent
        return found

    @property
    def all_pages(self) -> list[int]:
        """The pages of all its positions, in order."""
        return [page for one in reversed(self.chain) for page in one.pages]


class PrefixCache:
    """The prefixes whose keys and values are in pages, and the free pages.

    An unused prefix stays until its pages are needed; the least recently used one is evicted first. So
    prefixes take no page from a request and need no limit. The key of a prefix is its parent, its content and
    its number of pages. The number is part of it because prompts that share a different number of pages are
    divided into other chunks, so the bits could differ. A parent is never evicted before its children, since
    it is released after them.
    """

    def __init__(self, kv: PagedKV) -> None:
        self._kv = kv
        #: By parent, content and number of pages.
        self.known = dict[tuple[SharedPrefix | None, bytes, int], SharedPrefix]()
        #: Prefixes without users, the least recently used first.
        self._unused = dict[SharedPrefix, None]()
        self._unused_pages = 0
        #: Free pages that can hold NaN.
        self._unclean = list[int]()

    @property
    def free(self) -> int:
        """The number of pages that no running request uses."""
        return len(self._kv.free) + self._unused_pages + len(self._unclean)

    def take(self, count: int) -> list[int] | None:
        """Takes free pages, and evicts unused prefixes if needed. Returns None if there are too few."""
        if count > self.free:
            return None
        if self._unclean:
            self._kv.scrub(self._unclean)
            self._kv.free += self._unclean
            self._unclean = []
        while count > len(self._kv.free):
            self.evict()
        return [self._kv.free.pop() for _ in range(count)]

    def use(self, prefixes: Iterable[tuple[bytes, int]]) -> SharedPrefix | None:
        """Adds a user to the longest known prefix and its ancestors, and returns it; None if none is known.

        `prefixes`: (content, pages from the first position to its end), each one the parent of the next.
        """
        found = None
        start = 0
        for content, end in prefixes:
            longer = self.known.get((found, content, end - start))
            if longer is None:
                break
            found = longer
            start = end
        for prefix in found.chain if found is not None else ():
            if not prefix.users:
                self._remove_unused(prefix)
            prefix.users += 1
        return found

    def keep(self, parent: SharedPrefix | None, content: bytes, pages: Sequence[int]) -> SharedPrefix | None:
        """Makes pages of a running request a shared prefix. The request becomes its first user, and already
        uses `parent`.

        Returns None if the prefix is already known, or the parent is invalid.
        """
        key = parent, content, len(pages)
        if key in self.known or (parent is not None and parent.invalid):
            return None
        prefix = self.known[key] = SharedPrefix(content, parent, pages)
        return prefix

    def release(self, prefix: SharedPrefix) -> None:
        """Removes a user from a prefix and its ancestors."""
        for one in prefix.chain:
            one.users -= 1
            if one.users:
                continue
            if one.invalid:
                self._unclean += one.pages
            else:
                self._unused[one] = None
                self._unused_pages += len(one.pages)

    def invalidate(self, prefix: SharedPrefix) -> None:
        """Invalidates a prefix that can hold NaN, its ancestors and all their descendants.

        Their users continue; the pages are zeroed once they are released.
        """
        first = prefix.chain[-1]
        for one in [one for one in self.known.values() if one.chain[-1] is first]:
            one.invalid = True
            del self.known[one.parent, one.content, len(one.pages)]
            if not one.users:
                self._remove_unused(one)
                self._unclean += one.pages

    def clear(self) -> None:
        """Evicts all unused prefixes."""
        while self._unused:
            self.evict()

    def evict(self) -> None:
        prefix = next(iter(self._unused))
        self._remove_unused(prefix)
        del self.known[prefix.parent, prefix.content, len(prefix.pages)]
        self._kv.free += prefix.pages

    def _remove_unused(self, prefix: SharedPrefix) -> None:
        del self._unused[prefix]
        self._unused_pages -= len(prefix.pages)


@dataclass(eq=False, slots=True)
class Utterance:
    """The state of a request in the engine."""

    request: GenerationRequest
    receiver: FrameReceiver
    slot: int = -1
    #: In the order of positions: the pages of its shared prefix (`shared_pages` of them), then its own.
    pages: list[int] = field(default_factory=list)
    shared: SharedPrefix | None = None
    shared_pages: int = 0
    #: The prompt's embeddings [length, hidden], until it is prefilled.
    embeddings: Tensor | None = None
    #: Number of prompt positions whose keys are written, and number of frames started.
    prefilled: int = 0
    started: int = 0
    #: Number of frames already delivered, which a restart must not deliver again.
    delivered: int = 0
    #: Number of times that the utterance has left a slot.
    run: int = 0
    #: The playback of a stream; None for a whole utterance.
    playback: Playback | None = None
    #: int64: the known text ids, one of which is added after each frame; and whether more can follow.
    trailing: IntArray = field(init=False)
    text_open: bool = field(init=False)
    #: Position of the prompt's last token, the input of the first frame.
    last: int = field(init=False)

    def __post_init__(self) -> None:
        self.last = len(self.request.prompt) - 1
        self.trailing = np.asarray(self.request.prompt.trailing, np.int64)
        self.text_open = self.request.text_open

    @property
    def starved(self) -> bool:
        """Whether the next frame needs text that is not known yet."""
        return self.text_open and self.started >= len(self.trailing)


class BatchLimit:
    """The maximum number of running requests: all slots, or fewer for a time after an out-of-memory error.

    An out-of-memory error halves the number of running requests. After `patience` successful full turns the
    limit grows by an eighth of the slots. An error in a larger batch than the last proven limit restores that
    limit. Each error doubles the patience, so that retries become rare; success with all slots resets it.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: The current limit.
        self.now = slots
        #: Successful full turns that a limit needs before it grows, and how many it has had.
        self._patience = FIRST_PATIENCE
        self._successes = 0
        #: The last limit that had enough successful turns; 0: none.
        self._proven = 0

    def reduce(self, running: int) -> None:
        """Lowers the limit after an out-of-memory error with `running` requests."""
        self.now = self._proven if 0 < self._proven < running else max(running // 2, 1)
        self._proven = min(self._proven, self.now)
        self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._successes = 0

    def record_success(self, running: int) -> None:
        """Counts a successful turn with `running` requests, unless that is far below the limit."""
        if running < self.now - self.now // 8:
            return
        self._successes += 1
        if self._successes < self._patience:
            return
        self._successes = 0
        self._proven = self.now
        if self.now == self.slots:
            self._patience = FIRST_PATIENCE
        self.now = min(self.now + max(self.slots // 8, 1), self.slots)


#: Streams leave a sixteenth of all slots to whole utterances, so that these progress at any load of streams.
_WHOLE_PART = 16


class Scheduler:
    """First come, first served, streams before whole utterances.

    A request that needs pages, and a stream that needs a slot, preempt the youngest whole utterance, or the
    youngest stream if there is none. A preempted request starts again later, with the same result, since noise
    depends only on the request.
    """

    def __init__(self, kv: PagedKV, slots: int, options: EngineOptions) -> None:
        self.kv = kv
        self.prefixes = PrefixCache(kv)
        #: Whole utterances and streams without a slot.
        self.waiting = deque[Utterance]()
        self.waiting_streams = deque[Utterance]()
        self.running = list[Utterance]()
        #: Number of utterances in `waiting` that were preempted.
        self.preempted = 0
        self.limit = BatchLimit(slots)
        self.free_slots = list(range(slots - 1, -1, -1))
        #: Increases when an utterance leaves the slot, so that its pending frames are dropped.
        self.runs = np.zeros(slots, np.int64)
        self._whole_slots = max(slots - options.stream_slots, 1)
        self._kept_whole = slots // _WHOLE_PART
        self._options = options

    @property
    def free_whole_slots(self) -> int:
        """The number of slots free for whole utterances."""
        return min(len(self.free_slots), self._whole_slots - len(self.whole))

    @property
    def streams(self) -> list[Utterance]:
        """Streams with a slot, in the order of admission."""
        return [one for one in self.running if one.playback is not None]

    @property
    def whole(self) -> list[Utterance]:
        """Whole utterances with a slot, in the order of admission."""
        return [one for one in self.running if one.playback is None]

    def admit(self) -> list[Utterance]:
        """Admits waiting whole utterances, in order, while there is room beside streams."""
        admitted = list[Utterance]()
        room = self.free_whole_slots
        while self.waiting and len(admitted) < room and self._admit(self.waiting[0]):
            utterance = self.waiting.popleft()
            self.preempted -= utterance.run > 0
            admitted.append(utterance)
        return admitted

    def admit_streams(self) -> list[Utterance]:
        """Admits waiting streams; preempts whole utterances, the youngest first, down to their minimum."""
        admitted = list[Utterance]()
        while self.waiting_streams:
            whole = self.whole
            kept = min(self._kept_whole, len(whole) + len(self.waiting))
            if len(self.free_slots) + len(whole) > kept and self._admit(self.waiting_streams[0]):
                admitted.append(self.waiting_streams.popleft())
            elif len(whole) > kept:
                self.preempt(whole[-1])
            else:
                break
        return admitted

    def _admit(self, utterance: Utterance) -> bool:
        """Gives an utterance a slot and the pages of its prompt. Returns False if there is no room."""
        if not self.free_slots or len(self.running) >= self.limit.now:
            return False
        request = utterance.request
        shared = self.prefixes.use(request.prefix_ends(self.kv.page_size)) if request.prefixes else None
        known = [] if shared is None else shared.all_pages
        room = len(request.prompt) + min(request.max_tokens - 1, self._options.reserve_frames)
        enough = not self.running or self.kv.pages_for(room) - len(known) <= self.prefixes.free
        pages = self.prefixes.take(self.kv.pages_for(len(request.prompt)) - len(known)) if enough else None
        if pages is None:
            if shared is not None:
                self.prefixes.release(shared)
            return False
        utterance.slot = self.free_slots.pop()
        utterance.pages = [*known, *pages]
        utterance.shared = shared
        utterance.shared_pages = len(known)
        utterance.prefilled = len(known) * self.kv.page_size
        self.running.append(utterance)
        return True

    def adopt_prefixes(self, among: Iterable[Utterance]) -> list[Utterance]:
        """Shares new prefixes with utterances whose prefill has not begun. Returns those with changed pages.

        No utterance waits for a prefix that another one is computing, because streams would then wait for
        whole utterances. The duplicated work is bounded by the budget of a turn.
        """
        adopted = list[Utterance]()
        for utterance in among:
            if utterance.prefilled:
                continue
            shared = self.prefixes.use(utterance.request.prefix_ends(self.kv.page_size))
            if shared is None:
                continue
            known = shared.all_pages
            count = utterance.shared_pages = len(known)
            self.kv.free += utterance.pages[:count]
            utterance.pages[:count], utterance.shared = known, shared
            utterance.prefilled = count * self.kv.page_size
            if utterance.prefilled == utterance.last:
                utterance.embeddings = None
            adopted.append(utterance)
        return adopted

    def keep_prefix(self, utterance: Utterance) -> None:
        """Shares the prefilled prefixes of a request, up to the first one that is already known."""
        for content, end in utterance.request.prefix_ends(self.kv.page_size):
            held = utterance.shared_pages
            if end > held and end * self.kv.page_size <= utterance.prefilled:
                longer = self.prefixes.keep(utterance.shared, content, utterance.pages[held:end])
                if longer is None:
                    break
                utterance.shared = longer
                utterance.shared_pages = end

    def prefill(self, among: Iterable[Utterance], share: int = 1) -> list[tuple[Utterance, int]]:
        """Plans chunks of prompts as (utterance, positions), the oldest first, within the turn's budget
        divided by `share`.

        A chunk has the full chunk size, unless a prefix or the prompt ends before. So the results of a prompt do
        not depend on others, or on which request computed its prefixes.
        """
        chunks = list[tuple[Utterance, int]]()
        budget = self._options.prefill_tokens // share
        for utterance in [one for one in among if one.prefilled < one.last]:
            at = utterance.prefilled
            request = utterance.request
            size = self.kv.page_size
            ends = [pages * size for _, pages in request.prefix_ends(size)] if request.prefixes else []
            while at < utterance.last and budget > 0:
                end = next((end for end in ends if end > at), utterance.last)
                count = min(end - at, self._options.prefill_chunk)
                chunks.append((utterance, count))
                at += count
                budget -= count
        return chunks

    def ready(self) -> list[Utterance]:
        """Utterances whose next frame can be started. One that needs more text waits in its slot."""
        # Runs for every row of every turn, so the common case calls no function.
        return [
            one
            for one in self.running
            if one.prefilled == one.last
            and one.started < one.request.max_tokens
            and not (one.text_open and one.starved)
        ]

    def grow(self, batch: list[Utterance], frames: int) -> list[tuple[Utterance, list[int]]]:
        """Gives each utterance pages for `frames` more positions, preempting the youngest if needed. Returns
        (utterance, new pages)."""
        grown = list[tuple[Utterance, list[int]]]()
        size = self.kv.page_size
        # Runs for every row of every turn, and few need a page.
        for utterance in [one for one in batch if one.last + one.started + frames > len(one.pages) * size]:
            missing = -(-(utterance.last + utterance.started + frames) // size) - len(utterance.pages)
            while missing > 0 and utterance.slot >= 0:
                pages = self.prefixes.take(missing)
                if pages is not None:
                    utterance.pages.extend(pages)
                    grown.append((utterance, pages))
                    break
                self.preempt_youngest()
        return grown

    def preempt_youngest(self) -> None:
        """Preempts the youngest whole utterance, or the youngest stream if there is none."""
        self.preempt((self.whole or self.running)[-1])

    def preempt(self, utterance: Utterance) -> None:
        """Moves an utterance back to the head of its queue, to start again from its prompt, without any frames."""
        self.remove(utterance)
        utterance.embeddings = None
        utterance.prefilled = utterance.started = 0
        if utterance.playback is None:
            self.waiting.appendleft(utterance)
            self.preempted += 1
        else:
            utterance.playback.missing = utterance.playback.wanted + utterance.delivered
            self.waiting_streams.appendleft(utterance)

    def remove(self, utterance: Utterance) -> None:
        """Takes an utterance out of its queue, or out of its slot; then its pending frames become invalid."""
        if utterance.slot < 0:
            if utterance.playback is None:
                self.waiting.remove(utterance)
                self.preempted -= utterance.run > 0
            else:
                self.waiting_streams.remove(utterance)
            return
        self.running.remove(utterance)
        self.free_slots.append(utterance.slot)
        self.runs[utterance.slot] += 1
        self.kv.free += utterance.pages[utterance.shared_pages :]
        if utterance.shared is not None:
            self.prefixes.release(utterance.shared)
        utterance.slot = -1
        utterance.pages = []
        utterance.shared = None
        utterance.shared_pages = 0
        utterance.run += 1

    def scrub(self, utterance: Utterance) -> None:
        """Zeroes the pages of a running utterance, which can hold NaN. The pages of its prefix are zeroed once
        no request uses the prefix."""
        self.kv.scrub(utterance.pages[utterance.shared_pages :])
        if utterance.shared is not None:
            self.prefixes.invalidate(utterance.shared)

    def all(self) -> list[Utterance]:
        """All utterances, running or waiting."""
        return [*self.running, *self.waiting_streams, *self.waiting]

    def find(self, which: object) -> list[Utterance]:
        """The utterances of this request, or of requests with this origin or id."""
        return [
            one for one in self.all() if which in (one.request, one.request.origin, one.request.request_id)
        ]
