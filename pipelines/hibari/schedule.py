"""Which utterance is spoken next, a piece at a time: streams before whole utterances, and the hungriest listener first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from pipelines.hibari.utterance import StreamedUtterance, Utterance, WholeUtterance

#: A stream whose listener has more than this ahead lets whole utterances go first.
DUE_SECONDS = 2.0


class Schedule:
    """Utterances that wait for a thread to speak their next piece. Its caller holds a lock.

    First come streams that nobody has heard anything of, in the order of their arrival; then streams whose listener has at most
    `DUE_SECONDS` left, the one that runs dry first at the head; then whole utterances, the oldest first; then other streams.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals = itertools.count(1)
        self._streams: list[StreamedUtterance] = []
        self._whole: list[WholeUtterance] = []

    def __len__(self) -> int:
        return len(self._streams) + len(self._whole)

    def __iter__(self) -> Iterator[Utterance]:
        return iter((*self._streams, *self._whole))

    def add(self, utterance: Utterance) -> None:
        """Queues an utterance for its next piece."""
        utterance.arrival = utterance.arrival or next(self._arrivals)
        if isinstance(utterance, StreamedUtterance):
            self._streams.append(utterance)
        elif isinstance(utterance, WholeUtterance):
            self._whole.append(utterance)

    def take(self) -> Utterance | None:
        """The utterance whose next piece is spoken now, which leaves the schedule; None where there is none."""
        stream = min(self._streams, key=lambda one: (one.deadline, one.arrival), default=None)
        whole = min(self._whole, key=lambda one: one.arrival, default=None)
        if stream is not None and (whole is None or stream.deadline <= self._clock() + DUE_SECONDS):
            self._streams.remove(stream)
            return stream
        if whole is not None:
            self._whole.remove(whole)
        return whole

    def remove(self, utterance: Utterance) -> bool:
        """Takes an utterance out; False where it is not here, because a thread speaks it now or it is over."""
        if isinstance(utterance, StreamedUtterance) and utterance in self._streams:
            self._streams.remove(utterance)
        elif isinstance(utterance, WholeUtterance) and utterance in self._whole:
            self._whole.remove(utterance)
        else:
            return False
        return True

    def waiting(self) -> int:
        """Whole utterances that were not begun."""
        return sum(not utterance.begun for utterance in self._whole)
