"""A request while it is spoken: a piece at a time, into one whole speech or into a stream."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
from hibari import Hibari
from numpy.typing import NDArray

from pipelines.audio import PEAK_LIMIT, normalize_loudness
from pipelines.errors import ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.hibari import SAMPLE_RATE
from pipelines.request import AudioChunk, Speech, SynthesisRequest
from pipelines.streams import Heard

log = logging.getLogger(__name__)

SAMPLES_PER_FRAME = 300
#: Speech peaks at 0.1 and above before it is normalized; what the model makes of nothing to say peaks at 0.02.
_SILENT_PEAK = 0.03
#: What a stream is multiplied by: sentences have -26.3 LUFS as the model makes them, and hardly more or less (standard deviation 0.4).
STREAM_GAIN = np.float32(10 ** (3.3 / 20))


class Utterance:
    """A request and how far it is spoken. One thread at a time calls `begin`, `advance`, `deliver` and `fail`."""

    def __init__(self, request: SynthesisRequest, text: str) -> None:
        self.request = request
        self.text = text
        #: Phoneme ids, one list a piece of speech; may read the text as it goes.
        self.pieces: Iterator[list[int]] = iter(())
        #: Its place in the order of arrival, which the schedule gives.
        self.arrival = 0
        self.begun = False
        self.aborted = False
        #: Samples that were made.
        self.samples = 0
        self._generator = np.random.default_rng(request.seed)

    def begin(self) -> bool:
        """Called before the first piece; False where nobody wants it any more."""
        self.begun = True
        return True

    def advance(self, voice: Hibari) -> bool:
        """Speaks the next piece; False when there is none.

        Raises `InputError` for a text that turns out unreadable or longer than it may be, `SynthesisError` (`synth.silent`).
        """
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
        raise NotImplementedError

    def _add(self, samples: NDArray[np.float32]) -> None:
        raise NotImplementedError


class WholeUtterance(Utterance):
    """All of the speech at once, at the loudness of everything that Nightjar writes."""

    def __init__(self, request: SynthesisRequest, text: str) -> None:
        super().__init__(request, text)
        self.future: Future[Speech] = Future()
        self._parts: list[NDArray[np.float32]] = []
        self._speech: Speech | None = None

    def begin(self) -> bool:
        super().begin()
        return self.future.set_running_or_notify_cancel()

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
        self.future.set_result(self._speech)

    def fail(self, error: NightjarError) -> None:
        if self.begun or self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def _add(self, samples: NDArray[np.float32]) -> None:
        self._parts.append(samples)


class StreamedUtterance(Utterance):
    """Each piece of the speech as soon as it is made, multiplied by `STREAM_GAIN`, and the louder ones by what keeps their peak.

    The last chunk is empty: that no piece follows is known only after the text is read. Pieces begin and end in silence, so
    they follow each other without a click.
    """

    def __init__(self, request: SynthesisRequest, text: str, heard: Heard, clock: Callable[[], float]) -> None:
        super().__init__(request, text)
        #: When a listener that began with the first chunk will have heard all chunks; 0 before the first one.
        self.deadline = 0.0
        #: Whether nothing is handed on any more.
        self.is_mute = False
        self._heard = heard
        self._clock = clock
        self._held: list[NDArray[np.float32]] = []
        self._audible = False

    def complete(self) -> None:
        if not self._audible:
            raise silent()

    def deliver(self) -> None:
        self._hand_on(AudioChunk(np.zeros(0, np.float32), SAMPLE_RATE, final=True))

    def fail(self, error: NightjarError) -> None:
        self._hand_on(error)
        self.is_mute = True

    def _add(self, samples: NDArray[np.float32]) -> None:
        self._audible = self._audible or (len(samples) > 0 and _peak(samples) >= _SILENT_PEAK)
        self._held.append(samples)
        # Text that makes no speech fails without a sound, as it does in a whole utterance.
        while self._audible and self._held:
            piece = self._held.pop(0)
            if len(piece):
                gain = min(STREAM_GAIN, np.float32(PEAK_LIMIT / max(_peak(piece), 1e-6)))
                self._hand_on(AudioChunk(piece * gain, SAMPLE_RATE))
                self.deadline = max(self.deadline, self._clock()) + len(piece) / SAMPLE_RATE

    def _hand_on(self, heard: AudioChunk | NightjarError) -> None:
        if self.is_mute:
            return
        try:
            self._heard(heard)
        except Exception:
            # Whoever listens is gone; the thread serves others too.
            log.exception("the listener of a stream failed, and the stream is ended")
            self.is_mute = self.aborted = True


def _peak(samples: NDArray[np.float32]) -> float:
    return max(float(samples.max()), -float(samples.min()))


def silent() -> SynthesisError:
    """The error for speech without a voice in it."""
    return SynthesisError(ErrorCode.SYNTH_SILENT, "The voice made no audible speech of this text.", "Check the text.")


def aborted() -> SynthesisError:
    """The error of a request that was ended."""
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.", "Submit it again.")
