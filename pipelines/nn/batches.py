"""Which utterances a codec decodes together."""

from __future__ import annotations

from collections.abc import Sequence


def batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indices of utterances in batches of at most `most` padded frames, the longest first, so that neighbours are alike."""
    found: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= most:
            found[-1].append(index)
        else:
            found.append([index])
    return found
