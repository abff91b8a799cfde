"""Samples of a batch on their way from a device to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Samples = NDArray[np.float32]
#: Samples by which a sender's memory on the device grows, since batches differ by an utterance.
_STAGED_STEP = 1 << 22


class SamplesOnTheWay:
    """The samples of each utterance or chunk of a batch, as parts that follow each other; they are there
    once `event` is over.

    Parts on a device's way lie in pinned memory, which goes back with `release`; others belong to who asks
    for them.
    """

    def __init__(
        self,
        parts: list[list[Samples]],
        event: torch.cuda.Event | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._parts = parts
        self.event = event
        self._release = release

    def wait(self) -> None:
        """Returns when the samples are there. Raises what the device says of a fault."""
        if self.event is not None:
            self.event.synchronize()

    def of(self, at: int, place: Samples | None = None) -> Samples:
        """The samples of one of the batch, once they are there, in memory of the caller's own: `place`,
        where there is one.

        Raises ValueError where that has another length.
        """
        parts = self._parts[at] or [np.zeros(0, np.float32)]
        own = self.event is None and self._release is None
        return parts[0] if own and place is None and len(parts) == 1 else np.concatenate(parts, out=place)

    def release(self) -> None:
        """Gives the pinned memory back, so that it can be written again."""
        if self._release is not None:
            self._release()


def sent(waves: Sequence[Tensor]) -> SamplesOnTheWay:
    """Sends samples [n] each to the host, which does not wait for them."""
    if not any(wave.is_cuda for wave in waves):
        return SamplesOnTheWay([[wave.float().numpy()] for wave in waves])
    parts = [[part] for part in pinned(waves)]
    return SamplesOnTheWay(parts, recorded())


def pinned(waves: Sequence[Tensor]) -> list[Samples]:
    """Where samples will be on the host; one pinned buffer for all.

    The sizes of batches come again, those of utterances hardly, and pinning anew makes the device wait.
    """
    lengths = [len(wave) for wave in waves]
    places = torch.empty(sum(lengths), dtype=torch.float32, pin_memory=True).split(lengths)
    for place, wave in zip(places, waves):
        place.copy_(wave, non_blocking=True)
    return [place.numpy() for place in places]


class Sender:
    """Sends the samples of one batch after the other to the host, on a CUDA stream of its own, so that the
    next batch need not wait for the copy. One thread at a time may use it, on one stream.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        #: Where samples lie on the device until they are on the host, and when the last ones are.
        self._staged = torch.empty(0)
        self._over: torch.cuda.Event | None = None

    @torch.inference_mode()
    def __call__(self, waves: Sequence[Tensor]) -> SamplesOnTheWay:
        """As `sent`."""
        if not any(wave.is_cuda and len(wave) for wave in waves):
            return sent(waves)
        device, lengths = waves[0].device, [len(wave) for wave in waves]
        current, total = torch.cuda.current_stream(device), sum(lengths)
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
        return SamplesOnTheWay([[part.numpy()] for part in place.split(lengths)], self._over)


def recorded() -> torch.cuda.Event:
    """The end of what the current CUDA stream has to do now. Who waits for it sleeps meanwhile."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
