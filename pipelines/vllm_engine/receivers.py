"""Who waits for sequences, and what they hear at the end of one."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.vllm_engine.options import Tokens

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who waits for one sequence. Called on the host's loop, so it must be quick."""

    #: Whether `tokens` is wanted while the sequence grows.
    streamed: bool

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        """New ids in order, with their codes [steps, codes] for models with more than one a step."""
        ...

    def finished(self, tokens: Tokens) -> None:
        """The whole sequence."""
        ...

    def failed(self, error: NightjarError) -> None: ...


def closed() -> SynthesisError:
    """What the sequences of a closed host hear."""
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed.")


def died() -> SynthesisError:
    """What the sequences of a dead engine core hear."""
    return SynthesisError(ErrorCode.SYNTH_ENGINE, "vLLM's engine core died.", "The request may be tried again.")


def failure(error: BaseException) -> NightjarError:
    """Any error of a sequence in our words."""
    if isinstance(error, NightjarError):
        return error
    if isinstance(error, ValueError):
        return SynthesisError(ErrorCode.SYNTH_ENGINE, f"vLLM refused the request: {error}.", "Shorten it, or open the model with more.")
    log.error("a sequence failed", exc_info=error)
    return SynthesisError(ErrorCode.SYNTH_ENGINE, f"vLLM failed: {type(error).__name__}: {error}.", "See the log.")


def tell(receiver: Receiver, outcome: Tokens | NightjarError) -> None:
    """A receiver that raises must not end the loop's work."""
    try:
        if isinstance(outcome, Tokens):
            receiver.finished(outcome)
        else:
            receiver.failed(outcome)
    except Exception:
        log.exception("a receiver of the engine failed")
