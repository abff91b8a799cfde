"""Transfer of the samples of a batch from a device to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pipelines.audio import NO_SAMPLES, Samples
from pipelines.errors import ErrorCode, SynthesisError

#: A `Sender`'s memory on the device grows in steps of this many samples.
_STAGED_STEP = 1 << 22


@dataclass(eq=False, slots=True)
class PendingSamples:
    """The samples of each utterance or chunk of a batch, as consecutive parts; they are ready once `event` is
    complete.

    Parts from a device are in pinned memory, which `release` returns; the caller owns other parts.
    """

    _parts: list[list[Samples]]
    event: torch.cuda.Event | None = None
    _release: Callable[[], None] | None = None

    def wait(self) -> Self:
        """Waits until the samples are ready. Raises the device's error."""
        if self.event is not None:
            self.event.synchronize()
        return self

    def of(self, at: int, place: Samples | None = None) -> Samples:
        """The samples of one item of the batch, which must be ready. They are copied to `place`, or without it
        to new memory. But a single part that the caller owns is returned itself if there is no `place`.

        Raises ValueError if `place` has another length, and `SynthesisError` (`synth.nan`) unless all samples are
        finite.
        """
        parts = self._parts[at] or [NO_SAMPLES]
        own = self.event is None and self._release is None
        samples = parts[0] if own and place is None and len(parts) == 1 else np.concatenate(parts, out=place)
        if not np.isfinite(samples).all():
            raise SynthesisError(ErrorCode.SYNTH_NAN, "The codec made values that are not numbers.")
        return samples

    def release(self) -> None:
        """Returns the pinned memory, so that it can be reused."""
        if self._release is not None:
            self._release()


def sent(waves: Sequence[Tensor]) -> PendingSamples:
    """Starts the transfer of the samples [n] of each utterance or chunk to the host."""
    if not any(wave.is_cuda for wave in waves):
        return PendingSamples([[wave.float().numpy()] for wave in waves])
    return PendingSamples([[part] for part in pinned(waves)], recorded())


def pinned(waves: Sequence[Tensor]) -> list[Samples]:
    """Starts the transfer of samples to one pinned buffer; returns the part of it for each item of `waves`.

    One buffer for a batch is reused more often than one for each utterance, and pinning new memory makes the
    device wait.
    """
    lengths = [len(wave) for wave in waves]
    places = torch.empty(sum(lengths), dtype=torch.float32, pin_memory=True).split(lengths)
    for place, wave in zip(places, waves):
        place.copy_(wave, non_blocking=True)
    return [place.numpy() for place in places]


class Sender:
    """Sends the samples of consecutive batches to the host on its own CUDA stream, so that the next batch does
    not wait for the copy. One thread at a time may use it, always on the same CUDA stream.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        #: Device memory that samples are copied from, and the event of the last copy.
        self._staged = torch.empty(0)
        self._over: torch.cuda.Event | None = None

    @torch.inference_mode()
    def __call__(self, waves: Sequence[Tensor]) -> PendingSamples:
        """Like `sent`."""
        if not any(wave.is_cuda and len(wave) for wave in waves):
            return sent(waves)
        device = waves[0].device
        lengths = [len(wave) for wave in waves]
        current = torch.cuda.current_stream(device)
        total = sum(lengths)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        if self._over is not None:
            current.wait_event(self._over)
        if len(self._staged) < total:
            self._staged = torch.empty(
                -(-total // _STAGED_STEP) * _STAGED_STEP, dtype=torch.float32, device=device
            )
        staged = torch.cat(tuple(waves), out=self._staged[:total])
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            place = torch.empty(total, dtype=torch.float32, pin_memory=True)
            place.copy_(staged, non_blocking=True)
            self._over = recorded()
        return PendingSamples([[part.numpy()] for part in place.split(lengths)], self._over)


def recorded() -> torch.cuda.Event:
    """An event at the end of the current CUDA stream's work. A thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
