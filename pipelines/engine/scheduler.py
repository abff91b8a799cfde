"""Which requests run, and what they do next: admission, slots, pages, prefill in chunks, the prefixes that
prompts have in common, and who makes way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipelines.engine.executor import EngineOptions
from pipelines.engine.state import PagedKV, SamplingParams
from pipelines.engine.turns import Listening
from pipelines.errors import NightjarError

Finish = Literal["eos", "length"]

#: Full turns after a lack of memory before more requests may run: some seconds of a large batch. Doubled up
#: to the maximum.
FIRST_PATIENCE, MAX_PATIENCE = 128, 1 << 14


class FrameReceiver(Protocol):
    """Who waits for one request. Called on the engine's thread, so it must be quick."""

    def frames(self, codes: NDArray[np.int64]) -> None:
        """A chunk of a stream's frames [frames, codebooks], in order; the last ones come with `finished`
        alone."""
        ...

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        """All frames [frames, codebooks] of a request; `finish` is "length" when it did not end by itself."""
        ...

    def failed(self, error: NightjarError) -> None: ...


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """The first positions of a prompt, which other prompts can begin with too."""

    #: A digest of everything that the embeddings of these positions are made from, such as token ids and
    #: codes.
    content: bytes
    #: How many positions.
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One utterance for the engine, known by its identity.

    `max_tokens` counts draws of codebook 0; the last one only tells whether speech has ended.
    """

    request_id: str
    #: As its family builds it; the engine only needs its length, and the text that follows it: `trailing`,
    #: int64.
    prompt: Any
    sampling: SamplingParams
    seed: int
    max_tokens: int
    #: Whether somebody listens while it is made: its frames are handed on in chunks, and its deadlines come
    #: before whole utterances.
    stream: bool = False
    #: Frames of a stream before the first one that is heard, with those that the codec holds back.
    unheard: int = 0
    #: Whether more text follows that of the prompt: `EngineCore.append`. Of streams only.
    text_open: bool = False
    #: Codes of the prompt that the repetition penalty counts as drawn.
    drawn: Sequence[int] = ()
    #: The first positions of the prompt, where others have them too: shorter ones before longer ones.
    prefixes: Sequence[PromptPrefix] = ()
    #: What whoever asked knows it by, to end it.
    origin: object = None

    @property
    def positions(self) -> int:
        """Positions of the longest context that this request can come to."""
        return len(self.prompt) + self.max_tokens - 1

    def prefix_ends(self, page_size: int) -> list[tuple[bytes, int]]:
        """Content of each prefix, and whole pages up to its end, where these are more than those of the
        one before.

        The last position of the prompt is never in them: the first frame writes it.
        """
        found: list[tuple[bytes, int]] = []
        for prefix in self.prefixes:
            pages = min(prefix.length, len(self.prompt) - 1) // page_size
            if pages > (found[-1][1] if found else 0):
                found.append((prefix.content, pages))
        return found


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


@dataclass(eq=False, slots=True)
class Utterance:
    """A request on its way through the engine."""

    request: GenerationRequest
    receiver: FrameReceiver
    slot: int = -1
    #: In the order of positions: those of a prefix that it shares, and how many these are, then its own, which
    #: nobody else has.
    pages: list[int] = field(default_factory=list)
    shared: SharedPrefix | None = None
    shared_pages: int = 0
    #: The prompt, [length, hidden], until it is prefilled.
    embeddings: Tensor | None = None
    #: Prompt positions whose keys are written; frames that were started, and that came back, as parts
    #: [frames, codebooks].
    prefilled: int = 0
    started: int = 0
    made: int = 0
    parts: list[NDArray[np.int64]] = field(default_factory=list)
    #: Frames already handed on, which a restart must not hand on again.
    delivered: int = 0
    #: Rises when the utterance leaves its slot: frames under way of an earlier run are then dropped.
    run: int = 0
    #: Of a stream; None for a whole utterance.
    listening: Listening | None = None
    #: int64: the text id that is added after each frame, as far as the text is known; and whether more of it
    #: may come.
    trailing: NDArray[np.int64] = field(init=False)
    text_open: bool = field(init=False)
    #: Position of the prompt's last token, which is the first frame's input.
    last: int = field(init=False)

    def __post_init__(self) -> None:
        self.last = len(self.request.prompt) - 1
        self.trailing = np.asarray(self.request.prompt.trailing, np.int64)
        self.text_open = self.request.text_open

    @property
    def starved(self) -> bool:
        """Whether the next frame needs text that has not come."""
        return self.text_open and self.started >= len(self.trailing)

    def restart(self) -> None:
        """Begins anew, out of its slot."""
        self.embeddings = None
        self.prefilled = self.started = self.made = 0
        self.parts = []
        if self.listening is not None:
            self.listening.missing = self.listening.wanted + self.delivered


class BatchLimit:
    """How many requests may run: all slots, and fewer for a time after the device ran out of memory.

    A lack of memory halves what ran. After `patience` full turns that go well the limit grows by an eighth
    of the slots, and so on up to all of them. A lack of memory at a larger batch than the last one that
    went well goes back to that one, and each lack doubles the patience, so that a device that stays small
    is asked less and less often. All slots for as long make the patience short again.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        #: Requests that may run now.
        self.now = slots
        #: Full turns that a limit has to go well, and that it has gone well.
        self._patience = FIRST_PATIENCE
        self._quiet = 0
        #: The last limit that went well for its time; 0 where there is none.
        self._proven = 0

    def drop(self, running: int) -> None:
        """The device ran out of memory with so many requests."""
        self.now = self._proven if 0 < self._proven < running else max(running // 2, 1)
        self._proven = min(self._proven, self.now)
        self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._quiet = 0

    def went_well(self, running: int) -> None:
        """A turn with so many requests went well. Much smaller batches than the limit tell nothing about
        it."""
        if running < self.now - self.now // 8:
            return
        self._quiet += 1
        if self._quiet < self._patience:
            return
        self._quiet, self._proven = 0, self.now
        if self.now == self.slots:
            self._patience = FIRST_PATIENCE
        self.now = min(self.now + max(self.slots // 8, 1), self.slots)


#: Streams leave this part of all slots to whole utterances that are there, so that these go on whatever
#: streams come.
_WHOLE_PART = 16


class Scheduler:
    """First come, first served, streams before whole utterances.

    A request that ran out of pages, and a stream that finds no room, make the youngest whole utterance
    start again later, or the youngest stream where there is none. Noise depends only on the request, so
    one that starts again says the same.
    """

    def __init__(self, kv: PagedKV, slots: int, options: EngineOptions) -> None:
        self.kv = kv
        self.prefixes = PrefixCache(kv)
        #: Whole utterances and streams that have no slot.
        self.waiting: deque[Utterance] = deque()
        self.waiting_streams: deque[Utterance] = deque()
        self.running: list[Utterance] = []
        #: How many of `waiting` were running before and start again.
        self.returned = 0
        self.limit = BatchLimit(slots)
        self._free_slots = list(range(slots - 1, -1, -1))
        self._whole_slots = max(slots - options.stream_slots, 1)
        self._kept_whole = slots // _WHOLE_PART
        self._options = options

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_whole_slots(self) -> int:
        """Slots that whole utterances may still take."""
        return min(len(self._free_slots), self._whole_slots - len(self.whole))

    @property
    def streams(self) -> list[Utterance]:
        """Streams that have a slot, in the order in which they got it."""
        return [one for one in self.running if one.listening is not None]

    @property
    def whole(self) -> list[Utterance]:
        """Whole utterances that have a slot, in the order in which they got it."""
        return [one for one in self.running if one.listening is None]

    def admit(self) -> list[Utterance]:
        """Gives slots and the pages of their prompts to waiting whole utterances, in order, as long as
        there is room beside streams."""
        admitted: list[Utterance] = []
        room = self.free_whole_slots
        while self.waiting and len(admitted) < room and self._let_in(self.waiting[0]):
            utterance = self.waiting.popleft()
            self.returned -= utterance.run > 0
            admitted.append(utterance)
        return admitted

    def admit_streams(self) -> list[Utterance]:
        """As `admit`, for streams: as long as there is no room, whole utterances make way, the youngest
        first, but for the last ones."""
        admitted: list[Utterance] = []
        while self.waiting_streams:
            whole = self.whole
            kept = min(self._kept_whole, len(whole) + len(self.waiting))
            if len(self._free_slots) + len(whole) > kept and self._let_in(self.waiting_streams[0]):
                admitted.append(self.waiting_streams.popleft())
            elif len(whole) > kept:
                self._preempt(whole[-1])
            else:
                break
        return admitted

    def _let_in(self, utterance: Utterance) -> bool:
        """Gives a slot and the pages of its prompt to an utterance, if there is room."""
        if not self._free_slots or len(self.running) >= self.limit.now:
            return False
        request = utterance.request
        shared = self._known_prefix(request) if request.prefixes else None
        known = [] if shared is None else shared.all_pages
        room = min(request.positions, len(request.prompt) + self._options.reserve_frames)
        enough = not self.running or self.kv.pages_for(room) - len(known) <= self.prefixes.free
        pages = self.prefixes.take(self.kv.pages_for(len(request.prompt)) - len(known)) if enough else None
        if pages is None:
            if shared is not None:
                self.prefixes.release(shared)
            return False
        utterance.slot, utterance.pages = self._free_slots.pop(), [*known, *pages]
        utterance.shared, utterance.shared_pages = shared, len(known)
        utterance.prefilled = len(known) * self.kv.page_size
        self.running.append(utterance)
        return True

    def _known_prefix(self, request: GenerationRequest) -> SharedPrefix | None:
        """For one more user the longest prefix of a request that is known."""
        return self.prefixes.use(request.prefix_ends(self.kv.page_size))

    def adopt_prefixes(self, among: Iterable[Utterance] | None = None) -> list[Utterance]:
        """Lets those whose prefill has not begun share prefixes that came after them; returns them, since
        their pages are others now.

        Nobody waits for a prefix that another one prefills: a stream would wait for a whole utterance, and
        what is computed twice is no more than the budget of a turn.
        """
        adopted: list[Utterance] = []
        for utterance in (self.running if among is None else among) if len(self.prefixes) else ():
            if utterance.prefilled or (shared := self._known_prefix(utterance.request)) is None:
                continue
            known = shared.all_pages
            count = utterance.shared_pages = len(known)
            self.kv.give_back(utterance.pages[:count])
            utterance.pages[:count], utterance.shared = known, shared
            utterance.prefilled = count * self.kv.page_size
            if utterance.prefilled == utterance.last:
                utterance.embeddings = None
            adopted.append(utterance)
        return adopted

    def keep_prefix(self, utterance: Utterance) -> None:
        """Lets others share the prefixes of a request that it has prefilled, but for those behind one that
        another request has kept."""
        for content, end in utterance.request.prefix_ends(self.kv.page_size):
            held = utterance.shared_pages
            if end > held and end * self.kv.page_size <= utterance.prefilled:
                longer = self.prefixes.keep(utterance.shared, content, utterance.pages[held:end])
                if longer is None:
                    break
                utterance.shared, utterance.shared_pages = longer, end

    def prefill(
        self, among: Iterable[Utterance] | None = None, share: int = 1
    ) -> list[tuple[Utterance, int]]:
        """Whole chunks of prompts within the turn's budget, or a part of it, as (utterance, positions),
        oldest first.

        Chunks end at multiples of the chunk size from the prompt's beginning, and from each end of a
        prefix that can be shared: what is computed for a prompt does not depend on the others, or on who
        computed its prefixes.
        """
        chunks: list[tuple[Utterance, int]] = []
        budget = self._options.prefill_tokens // share
        for utterance in self.running if among is None else among:
            at, request, size = utterance.prefilled, utterance.request, self.kv.page_size
            ends = [pages * size for _, pages in request.prefix_ends(size)] if request.prefixes else []
            while at < utterance.last and budget > 0:
                end = next((end for end in ends if end > at), utterance.last)
                count = min(end - at, self._options.prefill_chunk)
                chunks.append((utterance, count))
                at += count
                budget -= count
        return chunks

    def ready(self) -> list[Utterance]:
        """Utterances whose next frame can be started. One whose text is used up and not at its end waits
        in its slot."""
        # Every turn asks every row: what most rows answer alike comes without a call.
        return [
            one
            for one in self.running
            if one.prefilled == one.last
            and one.started < one.request.max_tokens
            and not (one.text_open and one.starved)
        ]

    def grow(self, batch: list[Utterance], frames: int) -> list[tuple[Utterance, list[int]]]:
        """Gives each pages for `frames` more positions: (utterance, its new pages). The youngest make way
        for them."""
        grown: list[tuple[Utterance, list[int]]] = []
        size = self.kv.page_size
        for utterance in batch:
            if utterance.last + utterance.started + frames <= len(utterance.pages) * size:
                continue
            missing = self.kv.pages_for(utterance.last + utterance.started + frames) - len(utterance.pages)
            while utterance.slot >= 0:
                pages = self.prefixes.take(missing)
                if pages is not None:
                    utterance.pages.extend(pages)
                    grown.append((utterance, pages))
                    break
                self.preempt_youngest()
        return grown

    def preempt_youngest(self) -> Utterance:
        """Sends the whole utterance that came last, or else the stream, back to the head of its queue, to
        start again."""
        youngest = (self.whole or self.running)[-1]
        self._preempt(youngest)
        return youngest

    def _preempt(self, utterance: Utterance) -> None:
        self.remove(utterance)
        utterance.restart()
        if utterance.listening is None:
            self.waiting.appendleft(utterance)
            self.returned += 1
        else:
            self.waiting_streams.appendleft(utterance)

    def remove(self, utterance: Utterance) -> None:
        """Takes an utterance out of its slot; its frames under way are void."""
        self.running.remove(utterance)
        self._free_slots.append(utterance.slot)
        self.kv.give_back(utterance.pages[utterance.shared_pages :])
        if utterance.shared is not None:
            self.prefixes.release(utterance.shared)
        utterance.slot, utterance.pages, utterance.shared, utterance.shared_pages = -1, [], None, 0
        utterance.run += 1

    def scrub(self, utterance: Utterance) -> None:
        """Zeroes the pages of a running utterance that can hold NaN; those of a prefix once nobody reads
        it."""
        self.kv.scrub(utterance.pages[utterance.shared_pages :])
        if utterance.shared is not None:
            self.prefixes.doubt(utterance.shared)

    def forget(self, utterance: Utterance) -> None:
        """Takes an utterance that waits out of the queue."""
        if utterance.listening is not None:
            self.waiting_streams.remove(utterance)
            return
        self.waiting.remove(utterance)
        self.returned -= utterance.run > 0

    def all(self) -> list[Utterance]:
        """Everybody, running or waiting."""
        return [*self.running, *self.waiting_streams, *self.waiting]

    def find(self, which: object) -> list[Utterance]:
        """The utterances of this request, or of all requests with this origin or id."""
        return [
            one for one in self.all() if which in (one.request, one.request.origin, one.request.request_id)
        ]
