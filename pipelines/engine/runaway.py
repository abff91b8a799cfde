"""Finds speech that repeats itself, by the codes of codebook 0. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelines.request import Codes, IntArray

#: Maximum seconds of a part that is repeated, and seconds of repetition after which an utterance runs away. They are
#: longer than a pause inside of speech, whose codes may be equal.
PART_SECONDS = 0.8
REPEATED_SECONDS = 2.1
#: Number of repeated frames that a frame which repeats nothing takes back. More than four of five frames must be
#: repeated, so that a held sound, or a code that is frequent, never counts as a repetition.
_TAKEN_BACK = 4


class RunawayGuard:
    """Watches the codes of codebook 0 of all slots. An utterance runs away if it repeats a part again and again, or if
    it has more frames than its text can need."""

    def __init__(self, slots: int, frame_seconds: float) -> None:
        parts = max(round(PART_SECONDS / frame_seconds), 1)
        self._repeated = round(REPEATED_SECONDS / frame_seconds)
        #: [slots, parts]: the last codes, the newest first; for each length of a part: number of repeated frames.
        self._codes = np.full((slots, parts), -1, np.int32)
        self._counts = np.zeros((slots, parts), np.int32)
        #: [slots]: number of frames that are left.
        self._left = np.zeros(slots, np.int64)

    def begin(self, slot: int, longest: int | None) -> None:
        """Watches a new utterance; `longest`: maximum frames that its text can need, if known."""
        self._codes[slot], self._counts[slot] = -1, 0
        self._left[slot] = np.iinfo(np.int64).max if longest is None else longest

    def record(self, slots: Sequence[int] | IntArray, codes: IntArray) -> list[int]:
        """Adds the frames of a turn, codes [frames, slots], and returns the indices of slots that run away."""
        rows = np.asarray(slots, np.int64)
        past = self._codes[rows]
        counts = self._counts[rows]
        for frame in codes.astype(np.int32):
            counts += np.where(past == frame[:, None], np.int32(1), np.int32(-_TAKEN_BACK))
            np.maximum(counts, 0, out=counts)
            past[:, 1:] = past[:, :-1]
            past[:, 0] = frame
        self._codes[rows], self._counts[rows] = past, counts
        self._left[rows] -= len(codes)
        return np.flatnonzero((self._left[rows] < 0) | (counts >= self._repeated).any(axis=1)).tolist()


def repeated_seconds(codes: Codes, frame_seconds: float) -> float:
    """The longest repetition of a part in an utterance, as `RunawayGuard` counts it, in seconds. codes: [frames]."""
    parts = max(round(PART_SECONDS / frame_seconds), 1)
    past = np.lib.stride_tricks.sliding_window_view(np.concatenate((np.full(parts, -1), codes)), parts + 1)
    counts = np.where(past[:, :-1] == past[:, -1:], 1, -_TAKEN_BACK).cumsum(axis=0)
    counts -= np.minimum(np.minimum.accumulate(counts), 0)
    return float(counts.max() * frame_seconds)
