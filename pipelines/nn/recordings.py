"""Recordings of voices to clone: read, checked, and what a model made of them kept by their content."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, SynthesisError
from pipelines.recording import check_recording, decode_recording

T = TypeVar("T")


def read_recording(
    recording: bytes, sample_rate: int, *, channel: int | None = None, quality: Literal["HQ", "VHQ"] = "HQ"
) -> NDArray[np.float32]:
    """Samples [n] of an encoded audio file at `sample_rate`; `channel` and `quality` are those of `pipelines.audio.decode`.

    Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`.
    """
    samples, _ = decode_recording(recording, sample_rate, channel=channel, quality=quality)
    check_recording(samples, sample_rate)
    return samples


class RecordingCache(Generic[T]):
    """What was made of the last `capacity` recordings, by their content. One recording is worked on at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[tuple[str, Hashable], T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, recording: bytes, variant: Hashable, make: Callable[[], T]) -> T:
        """What `make` made of this recording when first asked for in this variant.

        Raises `SynthesisError` (`synth.oom`) when the device has no room for it, and what `make` raises.
        """
        key = hashlib.sha256(recording).hexdigest(), variant
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            try:
                made = make()
            except torch.OutOfMemoryError as error:
                message = f"The device ran out of memory over the reference audio: {error}."
                raise SynthesisError(ErrorCode.SYNTH_OOM, message, "Use a shorter reference or a smaller engine.") from error
            self._kept[key] = made
            if len(self._kept) > self.capacity:
                self._kept.popitem(last=False)
            return made
