"""What both lanes of the codec stage share: the decoder's side, and what a receiver of audio is told."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from kernels.cuda_graphs import lacks_memory
from pipelines.codec.transfer import Samples, SamplesOnTheWay
from pipelines.errors import ErrorCode, NightjarError, SynthesisError

log = logging.getLogger(__name__)

S = TypeVar("S")
Done = Callable[[Samples | NightjarError], None]

#: Utterances wait for company only where more than this many came within the last second: a few would wait for nobody.
FEW_UTTERANCES = 8


class Arrivals:
    """When the last utterances came, in seconds of one clock."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=FEW_UTTERANCES + 1)

    def note(self, now: float) -> None:
        """One came."""
        self._at.append(now)

    def few(self, now: float) -> bool:
        """Whether at most `FEW_UTTERANCES` came within the last second."""
        return len(self._at) <= FEW_UTTERANCES or self._at[0] < now - 1


class Decoder(Protocol[S]):
    """A codec decoder that can go on from a state."""

    def new_state(self) -> S: ...

    def decode(self, codes: Sequence[Tensor], states: Sequence[S] | None = None) -> list[Tensor]:
        """Whole utterances [frames, codebooks] -> samples [n] each; `states` are where they start, and are not changed."""
        ...

    def decode_chunk(self, states: Sequence[S], codes: Sequence[Tensor]) -> list[Tensor]:
        """The next frames of streams; moves their states on."""
        ...


def tell(done: Done, outcome: Samples | NightjarError) -> None:
    """A receiver that raises must not stop a lane."""
    try:
        done(outcome)
    except Exception:
        log.exception("a receiver of audio failed")


def outcome_of(samples: SamplesOnTheWay, at: int) -> Samples | NightjarError:
    """What one of a batch is told."""
    try:
        found = samples.of(at)
        finite = bool(np.isfinite(found).all())
    except Exception as error:
        log.exception("the codec's samples could not be read")
        return failure(error)
    return found if finite else _no_numbers()


def received(samples: SamplesOnTheWay, at: int, place: Samples) -> NightjarError | None:
    """Has the samples of one of a step written to `place`; what its receiver is told where that cannot be."""
    try:
        samples.write(at, place)
        finite = bool(np.isfinite(place).all())
    except Exception as error:
        log.exception("the codec's samples could not be read")
        return failure(error)
    return None if finite else _no_numbers()


def fault_of(samples: SamplesOnTheWay) -> NightjarError | None:
    """Waits for samples; the device's fault, if there was one."""
    try:
        samples.wait()
    except Exception as error:
        log.exception("the codec failed")
        return failure(error)
    return None


def _no_numbers() -> SynthesisError:
    return SynthesisError(ErrorCode.SYNTH_NAN, "The codec made values that are not numbers.")


def failure(error: Exception) -> NightjarError:
    """What a receiver is told of a fault."""
    if isinstance(error, NightjarError):
        return error
    if lacks_memory(error):
        return SynthesisError(ErrorCode.SYNTH_OOM, f"The codec ran out of device memory: {error}.", "Use a smaller engine.")
    return SynthesisError(ErrorCode.SYNTH_ENGINE, f"The codec failed: {error}.", "See the log.")


def too_late() -> SynthesisError:
    """What a receiver is told whose codes come after the end."""
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed before the audio was decoded.")
