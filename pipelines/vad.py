"""Where a recording holds speech: an energy detector that costs microseconds, and the cut of silence off
both ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FRAME_SECONDS = 0.02
#: A frame is silent that is 40 dB below the loudest one, or below -60 dBFS.
_RELATIVE_POWER, _MIN_POWER = 1e-4, 1e-6


def frame_powers(samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
    """Mean square of each whole frame of 20 ms, [frames]; of all samples [samples] where there is not even
    one."""
    length = max(1, int(FRAME_SECONDS * sample_rate))
    count = len(samples) // length
    framed = samples[: count * length].reshape(count, length) if count else samples.reshape(1, -1)
    return np.vecdot(framed, framed) / np.float32(framed.shape[1])


def activity(powers: NDArray[np.float32]) -> tuple[int, int, float]:
    """(frames with sound, most frames in a row without between two with, mean power of those with) of
    `frame_powers`: [frames].

    A loop over the few frames of an utterance is quicker than the calls of numpy.
    """
    levels: list[float] = powers.tolist()
    floor = max(max(levels) * _RELATIVE_POWER, _MIN_POWER)
    sounding, longest, total, last = 0, 0, 0.0, -1
    for place, level in enumerate(levels):
        if level > floor:
            if sounding and place - last > longest:
                longest = place - last
            last = place
            sounding += 1
            total += level
    return sounding, max(0, longest - 1), total / sounding if sounding else 0.0


def trim_silence(samples: NDArray[np.float32], sample_rate: int, keep_ms: int) -> NDArray[np.float32]:
    """The samples [samples] without silence at both ends beyond `keep_ms`; as they are where there is
    nothing but silence."""
    if len(samples) == 0:
        return samples
    powers = frame_powers(samples, sample_rate)
    active = np.flatnonzero(powers > max(float(powers.max()) * _RELATIVE_POWER, _MIN_POWER))
    if len(active) == 0:
        return samples
    length, keep = max(1, int(FRAME_SECONDS * sample_rate)), keep_ms * sample_rate // 1000
    return samples[max(0, int(active[0]) * length - keep) : (int(active[-1]) + 1) * length + keep]
