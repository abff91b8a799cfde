"""Who takes part in the engine's next turn: decisions on times alone. Imports no torch and reads no clock.

A turn makes one frame for each of its rows. A stream has a listener, who began to listen when the first
chunk was handed on. Its lead is the audio that was handed on and that the listener has not heard yet.
While a stream is alive a turn is one of these, in this order:

1. A stream waits for its first chunk, or its next chunk would come too late in turns with everybody: a turn
   of such streams, filled up with the earliest other ones where places cost nothing. Batch work is passed
   over `FAIR_TURNS` times in a row at most.
2. Every stream with a lead below `DUE_SECONDS`, or every stream where few slots are free, and batch work.
3. No batch work: every stream with a lead below `DUE_SECONDS`, and the earliest others up to a quarter of
   all streams, `AHEAD_ROWS` at least and `MOST_AHEAD_ROWS` at most. So a newcomer waits for a short turn
   only, and speech is still made faster than it is heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipelines.engine.buckets import bucket_of

#: Frames of a stream's chunks, one after the other, where the codec hears a frame at once; the last size
#: repeats. Small at first for a quick start, then for fewer calls.
CHUNK_FRAMES = (1, 2, 4, 8, 12)
#: What a first chunk of such a stream may have.
FIRST_FRAMES = (1, 2, 4)
#: What a chunk takes beside its frames: to be decoded and to reach its listener.
SPARE_SECONDS = 0.03
#: A stream with less lead than this is urgent when its next chunk needs all of it; with more lead it is never
#: urgent.
URGENT_SECONDS = 0.4
#: A stream with more lead is ahead.
DUE_SECONDS = 2.0
#: How many turns of urgent streams in a row batch work waits for.
FAIR_TURNS = 8
#: Rows of a turn of streams that are ahead of their listeners.
AHEAD_ROWS, MOST_AHEAD_ROWS = 16, 64
#: Up to so many rows a turn costs about the same.
LEAST_ROWS = 8
#: Turns whose time is remembered.
_REMEMBERED = 16


@dataclass(slots=True, eq=False)
class Listening:
    """A stream as its listener has it. Times are seconds of the engine's clock."""

    #: When the listener has heard all that was handed on. Before the first chunk: when the request came.
    deadline: float
    #: Whether the first chunk was not handed on yet.
    awaiting: bool = True
    #: Heard frames of the next chunk, and frames of it that are not made.
    size: int = 1
    missing: int = 1
    #: Frames of the first chunk that nobody hears: what the model writes before the speech, and what the
    #: codec holds back.
    unheard: int = 0

    @property
    def wanted(self) -> int:
        """Frames of the next chunk."""
        return self.size + self.unheard if self.awaiting else self.size

    def handed_on(self, frames: int, now: float, frame_seconds: float) -> None:
        """A chunk of so many frames is on its way to the listener."""
        if self.awaiting:
            self.deadline, frames = now, max(frames - self.unheard, 0)
        self.deadline += frames * frame_seconds
        self.awaiting = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The next turn: which of the given streams take part, by index, and whether batch work does."""

    streams: list[int]
    batch: bool
    #: Whether everybody who needs a frame takes part.
    together: bool


class TurnPlanner:
    """Plans turns, and remembers how long they took and how often batch work was passed over."""

    def __init__(
        self,
        batch_sizes: Sequence[int],
        frame_seconds: float,
        reproducible: bool = False,
        chunk_frames: Sequence[int] = CHUNK_FRAMES,
        first_frames: Sequence[int] = FIRST_FRAMES,
    ) -> None:
        """`batch_sizes`: what batches are filled up to, in order; `frame_seconds`: the speech in a frame.

        `chunk_frames`: sizes of a stream's chunks, each at most twice the one before, the last one
        repeats; `first_frames`: those of them that a first chunk may have. `reproducible`: chunks have the
        same sizes at any load, since the codec's rounding depends on them.
        """
        self._reproducible = reproducible
        self._chunk_frames = chunk_frames
        self._first_frames = first_frames
        self._batch_sizes = batch_sizes
        self._frame_seconds = frame_seconds
        self._passed_over = 0
        self._together: deque[float] = deque(maxlen=_REMEMBERED)
        self._all: deque[float] = deque(maxlen=_REMEMBERED)
        #: The usual time of a turn, and of one with everybody.
        self.turn_seconds = 0.0
        self.together_seconds = 0.0

    def took(self, seconds: float, together: bool) -> None:
        """A turn of one frame took so long; `together`: everybody who needed a frame took part."""
        self._all.append(seconds)
        self.turn_seconds = median(self._all)
        if together:
            self._together.append(seconds)
            self.together_seconds = median(self._together)

    def plan(self, streams: Sequence[Listening], now: float, batch: bool, crowded: bool = False) -> Plan:
        """The next turn of streams that can make a frame; `batch`: whether there is batch work that may run.

        `crowded`: few slots are free, so that all streams go on, however far ahead, and give back theirs
        sooner.
        """
        order = sorted(range(len(streams)), key=lambda index: streams[index].deadline)
        urgent = [index for index in order if self.is_urgent(streams[index], now)]
        due = [index for index in order if crowded or streams[index].deadline - now < DUE_SECONDS]
        if urgent and not (batch and self._passed_over >= FAIR_TURNS):
            self._passed_over += batch
            first, rows = set(urgent), max(self._filled(len(urgent)), LEAST_ROWS)
            return Plan([*urgent, *(index for index in order if index not in first)][:rows], False, False)
        self._passed_over = 0
        if batch:
            return Plan(due, True, True)
        rows = min(max(len(streams) // 4, AHEAD_ROWS), MOST_AHEAD_ROWS)
        return Plan(order[: self._filled(max(len(due), rows))], False, bool(due))

    def is_urgent(self, stream: Listening, now: float) -> bool:
        """Whether a stream waits for its first chunk, or the next one would come too late in turns with
        everybody."""
        needed = 1.5 * self.together_seconds * stream.missing + SPARE_SECONDS
        return stream.awaiting or stream.deadline - now < min(needed, URGENT_SECONDS)

    def next_size(self, stream: Listening, now: float) -> int:
        """Heard frames of the next chunk of a stream: more of them step by step, as far as they come
        before the last one is heard."""
        if self._reproducible:
            known = self._chunk_frames
            return (
                known[0]
                if stream.awaiting
                else next((size for size in known if size > stream.size), known[-1])
            )
        if stream.awaiting:
            return self._first_size()
        sizes = [size for size in self._chunk_frames if size <= 2 * stream.size]
        if self.turn_seconds >= self._frame_seconds:
            return sizes[-1]  # it cannot keep up, whatever its chunks
        lead = stream.deadline - now
        return next(
            (size for size in reversed(sizes) if size * self.turn_seconds + SPARE_SECONDS <= lead), sizes[0]
        )

    def _first_size(self) -> int:
        """The fewest frames of a first chunk that are heard longer than as many take; the fewest of all
        where none are."""
        for size in self._first_frames:
            if size * self.turn_seconds + SPARE_SECONDS <= size * self._frame_seconds:
                return size
        return self._first_frames[0]

    def whole_part(self, frames: int) -> int:
        """The largest size of a chunk that so many frames fill; all of them where they fill none."""
        return max((size for size in self._chunk_frames if size <= frames), default=frames)

    def _filled(self, rows: int) -> int:
        return bucket_of(rows, self._batch_sizes)
