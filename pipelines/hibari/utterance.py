"""A request while it is spoken: a piece at a time, into one whole speech or into a stream; and whose next
piece is spoken first."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
from hibari import Hibari
from numpy.typing import NDArray

from pipelines.audio import PEAK_LIMIT, normalize_loudness
from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.hibari.config import SAMPLE_RATE
from pipelines.request import AudioChunk, Event, Listener, Speech, SynthesisRequest

log = logging.getLogger(__name__)

SAMPLES_PER_FRAME = 300
#: Speech peaks at 0.1 and above before it is normalized; what the model makes of nothing to say peaks at
#: 0.02.
_SILENT_PEAK = 0.03
#: What a stream is multiplied by: sentences have -26.3 LUFS as the model makes them, and hardly more or less
#: (standard deviation 0.4).
STREAM_GAIN = np.float32(10 ** (3.3 / 20))
#: A stream whose listener has more than this ahead lets whole utterances go first.
DUE_SECONDS = 2.0


class Utterance:
    """A request and how far it is spoken. One thread at a time calls `advance`, `finish` and `tell`."""

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

        Raises `InputError` for a text that turns out unreadable or longer than it may be.
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

    def finish(self) -> Speech:
        """What ends the request, after the last piece. Raises `SynthesisError` (`synth.silent`) for speech
        without a voice."""
        raise NotImplementedError

    def turn(self, now: float) -> tuple[int, float, int]:
        """When its next piece is spoken: smaller ones go first."""
        raise NotImplementedError

    def tell(self, event: Event) -> None:
        try:
            self.listener(event)
        except Exception:
            # Whoever listens is gone; the thread serves others too.
            log.exception("the listener of a request failed, and the request is ended")
            self.listener.cancel()

    def _add(self, samples: NDArray[np.float32]) -> None:
        raise NotImplementedError

    def _speech(self, samples: NDArray[np.float32], **more: float) -> Speech:
        meta = {"frames": self.samples // SAMPLES_PER_FRAME, "finish_reason": "stop", **more}
        return Speech(samples, SAMPLE_RATE, self.text, meta=meta)


class WholeUtterance(Utterance):
    """All of the speech at once, at the loudness of everything that Nightjar writes; the oldest one first."""

    def __init__(self, request: SynthesisRequest, text: str, listener: Listener) -> None:
        super().__init__(request, text, listener)
        self._parts: list[NDArray[np.float32]] = []

    def finish(self) -> Speech:
        raw = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        samples, lufs = normalize_loudness(raw, SAMPLE_RATE)
        if lufs == -math.inf or _peak(raw) < _SILENT_PEAK:
            raise _silent()
        return self._speech(samples, loudness_lufs=round(lufs, 2))

    def turn(self, now: float) -> tuple[int, float, int]:
        return 1, 0.0, self.arrival

    def _add(self, samples: NDArray[np.float32]) -> None:
        self._parts.append(samples)


class StreamedUtterance(Utterance):
    """Each piece of the speech as soon as it is made, multiplied by `STREAM_GAIN`, and the louder ones by
    what keeps their peak.

    Pieces begin and end in silence, so they follow each other without a click. First come streams that
    nobody has heard anything of, in the order of their arrival, then those whose listener has at most
    `DUE_SECONDS` left, the one that runs dry first at the head; the others come behind whole utterances.
    """

    def __init__(
        self, request: SynthesisRequest, text: str, listener: Listener, clock: Callable[[], float]
    ) -> None:
        super().__init__(request, text, listener)
        #: When a listener that began with the first chunk will have heard all chunks; 0 before the first one.
        self.deadline = 0.0
        self._clock = clock
        self._held: list[NDArray[np.float32]] = []
        self._audible = False

    def finish(self) -> Speech:
        if not self._audible:
            raise _silent()
        return self._speech(np.zeros(0, np.float32))

    def turn(self, now: float) -> tuple[int, float, int]:
        return 0 if self.deadline <= now + DUE_SECONDS else 2, self.deadline, self.arrival

    def _add(self, samples: NDArray[np.float32]) -> None:
        self._audible = self._audible or (len(samples) > 0 and _peak(samples) >= _SILENT_PEAK)
        self._held.append(samples)
        # Text that makes no speech fails without a sound, as it does in a whole utterance.
        while self._audible and self._held:
            piece = self._held.pop(0)
            if len(piece):
                gain = min(STREAM_GAIN, np.float32(PEAK_LIMIT / max(_peak(piece), 1e-6)))
                self.tell(AudioChunk(piece * gain, SAMPLE_RATE))
                self.deadline = max(self.deadline, self._clock()) + len(piece) / SAMPLE_RATE


class Schedule:
    """Utterances that wait for a thread to speak their next piece. Its caller holds a lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals = itertools.count(1)
        self.utterances: list[Utterance] = []

    def add(self, utterance: Utterance) -> None:
        """Queues an utterance for its next piece."""
        utterance.arrival = utterance.arrival or next(self._arrivals)
        self.utterances.append(utterance)

    def take(self) -> Utterance | None:
        """The utterance whose next piece is spoken now, which leaves the schedule; None where there is
        none."""
        now = self._clock()
        first = min(self.utterances, key=lambda one: one.turn(now), default=None)
        if first is not None:
            self.utterances.remove(first)
        return first


def _peak(samples: NDArray[np.float32]) -> float:
    return max(float(samples.max()), -float(samples.min()))


def _silent() -> SynthesisError:
    return SynthesisError(
        ErrorCode.SYNTH_SILENT, "The voice made no audible speech of this text.", "Check the text."
    )
