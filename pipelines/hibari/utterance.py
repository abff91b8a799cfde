"""A request while it is spoken: a piece at a time, into one whole speech or into a stream."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
from hibari import Hibari
from numpy.typing import NDArray

from pipelines.audio import PEAK_LIMIT, normalize_loudness
from pipelines.errors import ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.hibari import SAMPLE_RATE
from pipelines.request import AudioChunk, Done, Event, Failed, Listener, Speech, SynthesisRequest

log = logging.getLogger(__name__)

SAMPLES_PER_FRAME = 300
#: Speech peaks at 0.1 and above before it is normalized; what the model makes of nothing to say peaks at 0.02.
_SILENT_PEAK = 0.03
#: What a stream is multiplied by: sentences have -26.3 LUFS as the model makes them, and hardly more or less (standard deviation 0.4).
STREAM_GAIN = np.float32(10 ** (3.3 / 20))


class Utterance:
    """A request and how far it is spoken. One thread at a time calls `advance`, `complete`, `deliver` and `fail`."""

    def __init__(self, request: SynthesisRequest, text: str, listener: Listener) -> None:
        self.request = request
        self.text = text
        self.listener = listener
        #: Phoneme ids, one list a piece of speech; may read the text as it goes.
        self.pieces: Iterator[list[int]] = iter(())
        #: Its place in the order of arrival, which the schedule gives.
        self.arrival = 0
        self.begun = False
        #: Samples that were made.
        self.samples = 0
        self._generator = np.random.default_rng(request.seed)

    def advance(self, voice: Hibari) -> bool:
        """Speaks the next piece; False when there is none.

        Raises `InputError` for a text that turns out unreadable or longer than it may be, `SynthesisError` (`synth.silent`).
        """
        self.begun = True
        piece = next(self.pieces, None)
        if piece is None:
            return False
        samples = voice.from_ids(piece, 1.0, self._generator)
        self.samples += len(samples)
        limit = self.request.generation.max_seconds
        if limit is not None and self.samples > limit * SAMPLE_RATE:
            message = f"The speech is longer than max_seconds ({limit:g})."
            raise InputError(ErrorCode.INPUT_TOO_LONG, message, "Shorten the text or raise the limit.")
        self._add(samples)
        return True

    def complete(self) -> None:
        """Called after the last piece, before `deliver`. Raises `SynthesisError` (`synth.silent`) for speech without a voice."""
        raise NotImplementedError

    def deliver(self) -> None:
        """Hands over what `complete` made."""
        raise NotImplementedError

    def fail(self, error: NightjarError) -> None:
        """Ends it with an error."""
        self._tell(Failed(error))

    def _add(self, samples: NDArray[np.float32]) -> None:
        raise NotImplementedError

    def _tell(self, event: Event) -> None:
        try:
            self.listener(event)
        except Exception:
            # Whoever listens is gone; the thread serves others too.
            log.exception("the listener of a request failed, and the request is ended")
            self.listener.cancel()


class WholeUtterance(Utterance):
    """All of the speech at once, at the loudness of everything that Nightjar writes."""

    def __init__(self, request: SynthesisRequest, text: str, listener: Listener) -> None:
        super().__init__(request, text, listener)
        self._parts: list[NDArray[np.float32]] = []
        self._speech: Speech | None = None

    def complete(self) -> None:
        raw = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        samples, lufs = normalize_loudness(raw, SAMPLE_RATE)
        if lufs == -math.inf or _peak(raw) < _SILENT_PEAK:
            raise silent()
        meta: dict[str, str | int | float | bool] = {
            "frames": len(samples) // SAMPLES_PER_FRAME,
            "finish_reason": "stop",
            "loudness_lufs": round(lufs, 2),
        }
        self._speech = Speech(samples, SAMPLE_RATE, self.text, meta=meta)

    def deliver(self) -> None:
        assert self._speech is not None, "it is complete"
        self._tell(Done(self._speech))

    def _add(self, samples: NDArray[np.float32]) -> None:
        self._parts.append(samples)


class StreamedUtterance(Utterance):
    """Each piece of the speech as soon as it is made, multiplied by `STREAM_GAIN`, and the louder ones by what keeps their peak.

    Pieces begin and end in silence, so
    they follow each other without a click.
    """

    def __init__(self, request: SynthesisRequest, text: str, listener: Listener, clock: Callable[[], float]) -> None:
        super().__init__(request, text, listener)
        #: When a listener that began with the first chunk will have heard all chunks; 0 before the first one.
        self.deadline = 0.0
        self._clock = clock
        self._held: list[NDArray[np.float32]] = []
        self._audible = False

    def complete(self) -> None:
        if not self._audible:
            raise silent()

    def deliver(self) -> None:
        frames = self.samples // SAMPLES_PER_FRAME
        self._tell(Done(Speech(np.zeros(0, np.float32), SAMPLE_RATE, self.text, meta={"frames": frames, "finish_reason": "stop"})))

    def _add(self, samples: NDArray[np.float32]) -> None:
        self._audible = self._audible or (len(samples) > 0 and _peak(samples) >= _SILENT_PEAK)
        self._held.append(samples)
        # Text that makes no speech fails without a sound, as it does in a whole utterance.
        while self._audible and self._held:
            piece = self._held.pop(0)
            if len(piece):
                gain = min(STREAM_GAIN, np.float32(PEAK_LIMIT / max(_peak(piece), 1e-6)))
                self._tell(AudioChunk(piece * gain, SAMPLE_RATE))
                self.deadline = max(self.deadline, self._clock()) + len(piece) / SAMPLE_RATE


def _peak(samples: NDArray[np.float32]) -> float:
    return max(float(samples.max()), -float(samples.min()))


def silent() -> SynthesisError:
    """The error for speech without a voice in it."""
    return SynthesisError(ErrorCode.SYNTH_SILENT, "The voice made no audible speech of this text.", "Check the text.")


def aborted() -> SynthesisError:
    """The error of a request that was ended."""
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.", "Submit it again.")
