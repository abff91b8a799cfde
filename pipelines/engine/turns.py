"""Plans the engine's next turn: which streams run in it, and whether whole utterances (batch work) do.
Decides by times that it is given; imports no torch and reads no clock.

A turn makes one frame for each of its rows. A stream's playback begins when its first chunk is delivered; its
lead is the delivered audio that is not played yet. While a stream is alive, a turn is the first of these:

1. If a stream waits for its first chunk, or its next chunk would be late in turns of all rows: a turn of such
   streams, padded with the other streams whose deadlines are earliest if that costs nothing. Batch work is
   skipped up to `FAIR_TURNS` times in a row.
2. With batch work: every stream with a lead below `DUE_SECONDS` (every stream if few slots are free), and the
   batch work.
3. Without batch work: every stream with a lead below `DUE_SECONDS`, and others in the order of their deadlines,
   up to a quarter of all streams, between `AHEAD_ROWS` and `MAX_AHEAD_ROWS`. So a new stream waits only for a
   short turn, and speech is still made faster than it is played.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from pipelines.engine.buckets import bucket_of

#: Sizes in frames of a stream's chunks, in order, for a codec without lookahead; the last size repeats. Small at
#: first for a quick start, then larger for fewer calls.
CHUNK_FRAMES = (1, 2, 4, 8, 12)
#: Possible sizes of the first chunk.
FIRST_FRAMES = (1, 2, 4)
#: Seconds that are allowed for decoding a chunk and delivering it.
SPARE_SECONDS = 0.03
#: Lead in seconds above which a stream is never urgent. With less lead, it is urgent if its next chunk needs
#: all of the lead.
URGENT_SECONDS = 0.4
#: Lead in seconds above which a stream is ahead.
DUE_SECONDS = 2.0
#: Maximum consecutive turns of urgent streams that batch work waits for.
FAIR_TURNS = 8
#: Minimum and maximum rows of a turn of streams that are ahead.
AHEAD_ROWS = 16
MAX_AHEAD_ROWS = 64
#: Turns of up to this many rows cost about the same.
CHEAP_ROWS = 8
#: Number of turns whose times are kept.
_KEPT_TURNS = 16


@dataclass(slots=True, eq=False)
class Playback:
    """The playback of a stream at its listener. Times are seconds of the engine's clock."""

    #: When all delivered audio is played. Before the first chunk: when the request arrived.
    deadline: float
    #: Whether the first chunk is not delivered yet.
    awaiting: bool = True
    #: Number of audible frames of the next chunk, and of its frames that are not made yet.
    size: int = 1
    missing: int = 1
    #: Number of inaudible frames of the first chunk: frames before the speech, and frames that the codec
    #: holds back.
    inaudible: int = 0

    @property
    def wanted(self) -> int:
        """The number of frames of the next chunk."""
        return self.size + self.inaudible if self.awaiting else self.size

    def record_chunk(self, frames: int, now: float, frame_seconds: float) -> None:
        """Records the delivery of a chunk."""
        if self.awaiting:
            self.deadline = now
            frames = max(frames - self.inaudible, 0)
        self.deadline += frames * frame_seconds
        self.awaiting = False


class Plan(NamedTuple):
    """The next turn: the indices of its streams, and whether it has batch work."""

    streams: list[int]
    batch: bool
    #: Whether every utterance that needs a frame has a row in it.
    together: bool


@dataclass(eq=False)
class TurnPlanner:
    """Plans turns. Remembers the times of the last ones, and the number of turns without batch work."""

    #: The sizes that batches are padded to, ascending, and seconds of speech in a frame.
    _batch_sizes: Sequence[int]
    _frame_seconds: float
    #: Whether chunks have the same sizes at any load, since the codec's rounding depends on them.
    _reproducible: bool
    #: Sizes of a stream's chunks, each up to twice the one before; the last one repeats. Possible sizes of the first
    #: chunk.
    _chunk_frames: Sequence[int]
    _first_frames: Sequence[int]

    def __post_init__(self) -> None:
        #: Consecutive turns without batch work.
        self._skipped = 0
        self._together: deque[float] = deque(maxlen=_KEPT_TURNS)
        self._all: deque[float] = deque(maxlen=_KEPT_TURNS)
        #: The median time in seconds of a turn, and of a turn that is `together`.
        self.turn_seconds = 0.0
        self.together_seconds = 0.0

    def record(self, seconds: float, together: bool) -> None:
        """Records the time of a turn of one frame; `together`: every utterance that needed a frame had a row
        in it."""
        self._all.append(seconds)
        self.turn_seconds = median(self._all)
        if together:
            self._together.append(seconds)
            self.together_seconds = median(self._together)

    def plan(self, streams: Sequence[Playback], now: float, batch: bool, crowded: bool = False) -> Plan:
        """Plans the next turn of streams that can make a frame; `batch`: whether batch work can run.

        `crowded`: few slots are free, so all streams run, even those far ahead, to free their slots sooner.
        """
        order = sorted(range(len(streams)), key=lambda index: streams[index].deadline)
        urgent = [index for index in order if self.is_urgent(streams[index], now)]
        due = [index for index in order if crowded or streams[index].deadline - now < DUE_SECONDS]
        if urgent and not (batch and self._skipped >= FAIR_TURNS):
            self._skipped += batch
            first = set(urgent)
            rows = max(bucket_of(len(urgent), self._batch_sizes), CHEAP_ROWS)
            return Plan([*urgent, *(index for index in order if index not in first)][:rows], False, False)
        self._skipped = 0
        if batch:
            return Plan(due, True, True)
        rows = max(len(due), min(max(len(streams) // 4, AHEAD_ROWS), MAX_AHEAD_ROWS))
        return Plan(order[: bucket_of(rows, self._batch_sizes)], False, bool(due))

    def is_urgent(self, stream: Playback, now: float) -> bool:
        """Whether a stream waits for its first chunk, or its next one would be late in turns of all rows."""
        needed = 1.5 * self.together_seconds * stream.missing + SPARE_SECONDS
        return stream.awaiting or stream.deadline - now < min(needed, URGENT_SECONDS)

    def next_size(self, stream: Playback, now: float) -> int:
        """The number of audible frames of a stream's next chunk: it grows step by step while the chunk arrives
        before the delivered audio is played."""
        if self._reproducible:
            known = self._chunk_frames
            return (
                known[0]
                if stream.awaiting
                else next((size for size in known if size > stream.size), known[-1])
            )
        if stream.awaiting:
            # The smallest first chunk that plays longer than another one of its size takes to make.
            playing = (
                size
                for size in self._first_frames
                if size * self.turn_seconds + SPARE_SECONDS <= size * self._frame_seconds
            )
            return next(playing, self._first_frames[0])
        sizes = [size for size in self._chunk_frames if size <= 2 * stream.size]
        if self.turn_seconds >= self._frame_seconds:
            return sizes[-1]  # no size can keep up
        lead = stream.deadline - now
        return next(
            (size for size in reversed(sizes) if size * self.turn_seconds + SPARE_SECONDS <= lead), sizes[0]
        )

    def whole_part(self, frames: int) -> int:
        """The largest chunk size that `frames` frames fill; all of them if they fill none."""
        return max((size for size in self._chunk_frames if size <= frames), default=frames)
