"""Recordings of voices to clone: what they must be, how they are read, and a cache of what a model made of
them.

Imports no model library: submit looks at every recording as the models do.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.request import MAX_REFERENCE_SECONDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

MIN_SECONDS = 0.5
#: Root mean square below which a recording holds no voice (-60 dBFS).
SILENCE = 1e-3
#: Recordings that one cache works on at a time; each takes memory of the device.
AT_ONCE = 4
_BEST_LENGTH = "Three to fifteen seconds of clear speech work best."


def check_encoded(recording: bytes) -> None:
    """Raises `InputError` for an encoded audio file that no model can clone a voice from, as
    `decode_recording` and `check_recording` do."""
    check_recording(*decode_recording(recording))


def decode_recording(
    recording: bytes,
    sample_rate: int | None = None,
    *,
    channel: int | None = None,
    quality: Literal["HQ", "VHQ"] = "HQ",
) -> tuple[NDArray[np.float32], int]:
    """As `pipelines.audio.decode`, with no more decoded than a recording may have: what is longer is
    `input.reference_length`."""
    from pipelines.audio import decode  # only where there is audio to read

    try:
        return decode(
            recording, sample_rate, max_seconds=MAX_REFERENCE_SECONDS, channel=channel, quality=quality
        )
    except InputError as error:
        if error.code is not ErrorCode.INPUT_TOO_LONG:
            raise
        raise InputError(
            ErrorCode.INPUT_REFERENCE_LENGTH,
            error.message.replace("audio", "reference audio", 1),
            _BEST_LENGTH,
        ) from error


def check_recording(samples: NDArray[np.float32], sample_rate: int) -> None:
    """Raises `InputError` for a recording [samples] that is too short, too long or silent."""
    import numpy as np  # only where there is audio to read

    seconds = len(samples) / sample_rate
    if not MIN_SECONDS <= seconds <= MAX_REFERENCE_SECONDS:
        raise InputError(
            ErrorCode.INPUT_REFERENCE_LENGTH,
            f"The reference audio is {seconds:.2f} s long; it must have {MIN_SECONDS:g} to {MAX_REFERENCE_SECONDS:g} s.",
            _BEST_LENGTH,
        )
    if float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) < SILENCE:
        raise InputError(
            ErrorCode.INPUT_REFERENCE_SILENT,
            "The reference audio is silent.",
            "Give a recording with a clear voice.",
        )


def read_recording(
    recording: bytes, sample_rate: int, *, channel: int | None = None, quality: Literal["HQ", "VHQ"] = "HQ"
) -> NDArray[np.float32]:
    """Samples [n] of an encoded audio file at `sample_rate`; `channel` and `quality` are those of
    `pipelines.audio.decode`.

    Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`.
    """
    samples, _ = decode_recording(recording, sample_rate, channel=channel, quality=quality)
    check_recording(samples, sample_rate)
    return samples


class RecordingCache(Generic[T]):
    """What was made of the last `capacity` recordings, by their content.

    A recording that is asked for again while it is worked on is waited for; others are worked on
    meanwhile, a few at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[tuple[str, Hashable], T] = OrderedDict()
        self._making: dict[tuple[str, Hashable], Future[T]] = {}
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(AT_ONCE)

    def get(self, recording: bytes, variant: Hashable, make: Callable[[], T]) -> T:
        """What `make` made of this recording when first asked for in this variant.

        Raises `SynthesisError` (`synth.oom`) when the device has no room for it, and what `make` raises;
        then nothing is kept.
        """
        key = hashlib.sha256(recording).hexdigest(), variant
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            making = self._making.get(key)
            mine = making is None
            if making is None:
                making = self._making[key] = Future()
        if not mine:
            return making.result()
        try:
            with self._places:
                made = _with_memory(make)
        except BaseException as error:
            with self._lock:
                del self._making[key]
            making.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._kept[key] = made
            while len(self._kept) > self.capacity:
                self._kept.popitem(last=False)
        making.set_result(made)
        return made


def _with_memory(make: Callable[[], T]) -> T:
    try:
        return make()
    except RuntimeError as error:
        from kernels.cuda_graphs import (
            lacks_memory,
        )  # whoever makes something of a recording has imported torch

        if not lacks_memory(error):
            raise
        message = f"The device ran out of memory over the reference audio: {error}."
        raise SynthesisError(
            ErrorCode.SYNTH_OOM, message, "Use a shorter reference or a smaller engine."
        ) from error
