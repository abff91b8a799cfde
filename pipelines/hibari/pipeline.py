"""The embedded voice: hibari-tts, English, one voice, 24 kHz, on the CPU, with its weights in its wheel."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from hibari import Hibari
from numpy.typing import NDArray

from pipelines.audio import PEAK_LIMIT, normalize_loudness, peak
from pipelines.errors import ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.hibari import CAPABILITIES, SAMPLE_RATE
from pipelines.hibari.text import EnglishReader, check_pronounceable
from pipelines.options import Count, read_options
from pipelines.request import (
    AnyRequest,
    AudioChunk,
    Done,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Handle,
    Listener,
    OnEvent,
    Speech,
    SynthesisRequest,
    check_start,
)
from pipelines.validation import speech_task

log = logging.getLogger(__name__)

_WAITING_PER_THREAD = 16
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
    """A request and how far it is spoken. One thread at a time calls `advance`, `finish` and `tell`.

    Whole speech has the loudness of everything that Nightjar writes. A stream's pieces come as soon as
    they are made, multiplied by `STREAM_GAIN`, and the louder ones by what keeps their peak; they begin
    and end in silence, so they follow each other without a click.
    """

    def __init__(
        self,
        request: SynthesisRequest,
        text: str,
        listener: Listener,
        stream: bool = False,
    ) -> None:
        self.request = request
        self.text = text
        self.listener = listener
        self.stream = stream
        #: Phoneme ids, one list a piece of speech; may read the text as it goes.
        self.pieces: Iterator[list[int]] = iter(())
        #: Its place in the order of arrival.
        self.arrival = 0
        self.begun = False
        #: Samples that were made.
        self.samples = 0
        #: When the listener of a stream that began with the first chunk will have heard all chunks; 0 before
        #: the first one.
        self.deadline = 0.0
        self._generator = np.random.default_rng(request.seed)
        #: What was made and not handed on.
        self._parts: list[NDArray[np.float32]] = []
        self._audible = False

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
        if len(samples):
            self._parts.append(samples)
            self._audible = self._audible or peak(samples) >= _SILENT_PEAK
        # Text that makes no speech fails without a sound, as it does in a whole utterance.
        while self.stream and self._audible and self._parts:
            part = self._parts.pop(0)
            gain = min(STREAM_GAIN, np.float32(PEAK_LIMIT / max(peak(part), 1e-6)))
            self.tell(AudioChunk(part * gain, SAMPLE_RATE))
            self.deadline = max(self.deadline, time.monotonic()) + len(part) / SAMPLE_RATE
        return True

    def finish(self) -> Speech:
        """What ends the request, after the last piece. Raises `SynthesisError` (`synth.silent`) for speech
        without a voice."""
        samples, lufs, more = np.zeros(0, np.float32), 0.0, dict[str, float]()
        if self._audible and not self.stream:
            samples, lufs = normalize_loudness(np.concatenate(self._parts), SAMPLE_RATE)
            more = {"loudness_lufs": round(lufs, 2)}
        if not self._audible or lufs == -math.inf:
            message = "The voice made no audible speech of this text."
            raise SynthesisError(ErrorCode.SYNTH_SILENT, message, "Check the text.")
        meta = {"frames": self.samples // SAMPLES_PER_FRAME, "finish_reason": "stop", **more}
        return Speech(samples, SAMPLE_RATE, self.text, meta=meta)

    def turn(self, now: float) -> tuple[int, float, int]:
        """When its next piece is spoken: smaller ones go first.

        First come streams that nobody has heard anything of, in the order of their arrival, then those
        whose listener has at most `DUE_SECONDS` left, the one that runs dry first at the head; then whole
        utterances, the oldest one first, and behind them the other streams.
        """
        rank = 1 if not self.stream else 0 if self.deadline <= now + DUE_SECONDS else 2
        return rank, self.deadline, self.arrival

    def tell(self, event: Event) -> None:
        try:
            self.listener(event)
        except Exception:
            # Whoever listens is gone; the thread serves others too.
            log.exception("the listener of a request failed, and the request is ended")
            self.listener.cancel()


class HibariPipeline:
    """Threads that share one loaded model: inference and signal processing run outside the interpreter lock.

    Two threads on two cores make 1.9 times the speech of one, as two processes do, in half their memory
    (240 MB). Each request is synthesized alone with its own seed, so its speech does not depend on what
    else runs. A thread speaks one piece, mostly a sentence, and then looks again whose turn it is
    (`Utterance.turn`). A whole utterance's text is read in `start`, so that what the voice cannot read is
    refused there; that takes about a second for the worst text of 5,000 characters. A stream's text is
    read by the threads, sentence by sentence.
    """

    name = "hibari"
    sample_rate = SAMPLE_RATE
    capabilities = CAPABILITIES
    starts_at_once = False

    def __init__(self, *, threads: int | None = None, waiting_room: int | None = None) -> None:
        count = threads or len(os.sched_getaffinity(0))
        self._reader = EnglishReader()
        # What is imported and allocated by the first speech belongs to opening.
        normalize_loudness(
            self._reader.voice.from_ids(self._reader.voice.ids("həlˈO"), 1.0, np.random.default_rng(0)),
            SAMPLE_RATE,
        )
        self._room = waiting_room or count * _WAITING_PER_THREAD
        self.info = EngineInfo(slots=count, waiting_room=self._room, device="cpu", dtype="float32")
        self._arrivals = itertools.count(1)
        #: Those that wait for a thread to speak their next piece, and how many are being spoken.
        self._queue: list[Utterance] = []
        self._speaking = 0
        self._changed = threading.Condition()
        self._closed = False
        self._requests_done = 0
        self._samples_made = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"hibari-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, request: AnyRequest, on_event: OnEvent, stream: bool = False) -> Handle:
        """Queues a request; see `Pipeline.start`. One that is cancelled ends with the sentence that is
        spoken.

        Of a stream, `InputError` is raised as far as the text's characters tell; the rest of it is read
        while it is spoken.
        """
        check_start(self, request, stream)
        assert isinstance(request, SynthesisRequest), "the voice has no frontend"
        text = speech_task(request.messages, request.generation, CAPABILITIES, request.seed).text
        listener = Listener(on_event, lambda done: None if done else self._ended(utterance))
        utterance = Utterance(request, text, listener, stream)
        if stream:
            check_pronounceable(text)
            utterance.pieces = self._reader.pieces(text, lambda: self._is_over(utterance))
        else:
            utterance.pieces = iter(list(self._reader.pieces(text, lambda: self._closed)))
        with self._changed:
            if not stream:
                self._changed.wait_for(
                    lambda: (
                        self._closed or sum(not (one.stream or one.begun) for one in self._queue) < self._room
                    )
                )
            if self._closed:
                raise _aborted()
            utterance.arrival = next(self._arrivals)
            self._queue.append(utterance)
            self._changed.notify_all()
        return listener

    def stats(self) -> EngineStats:
        with self._changed:
            begun = sum(utterance.begun for utterance in self._queue)
            return EngineStats(
                running=self._speaking + begun,
                waiting=len(self._queue) - begun,
                requests_done=self._requests_done,
                frames=self._samples_made // SAMPLES_PER_FRAME,
                audio_seconds=self._samples_made / SAMPLE_RATE,
            )

    def close(self) -> None:
        """Ends the threads; what waits or runs fails with `synth.aborted`. May be called more than once."""
        with self._changed:
            self._closed = True
            ended, self._queue = self._queue, []
            self._changed.notify_all()
        for utterance in ended:
            utterance.tell(Failed(_aborted()))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _is_over(self, utterance: Utterance) -> bool:
        """Whether nobody waits for it any more."""
        return self._closed or not utterance.listener.is_open

    def _ended(self, utterance: Utterance) -> None:
        """It was cancelled, or has failed."""
        with self._changed:
            if utterance in self._queue:
                self._queue.remove(utterance)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    return
                now = time.monotonic()
                utterance = min(self._queue, key=lambda one: one.turn(now))
                self._queue.remove(utterance)
                self._speaking += 1
                self._changed.notify_all()
            goes_on = self._advance(utterance)
            with self._changed:
                self._speaking -= 1
                ended = goes_on and self._is_over(utterance)
                if goes_on and not ended:
                    self._queue.append(utterance)
            if ended:
                utterance.tell(Failed(_aborted()))

    def _advance(self, utterance: Utterance) -> bool:
        """Speaks the next piece; False when the utterance is over, however it ended."""
        try:
            if utterance.advance(self._reader.voice):
                return True
            if self._is_over(utterance):
                raise _aborted()
            speech = utterance.finish()
        except Exception as error:  # noqa: BLE001  # whatever the runtime raises ends this request, not the thread
            utterance.tell(Failed(_failure(error)))
            return False
        with self._changed:
            self._requests_done += 1
            self._samples_made += utterance.samples
        utterance.tell(Done(speech))
        return False


@dataclass(frozen=True, slots=True)
class HibariOptions:
    """How the voice is opened: `threads` synthesize at once (None: one a core); `waiting_room` requests
    wait before `submit` blocks."""

    threads: Count | None = None
    waiting_room: Count | None = None


def load(**options: Any) -> HibariPipeline:
    """Loads the voice. Raises `ConfigError` (`config.invalid`) for an option that is none of
    `HibariOptions`, or a wrong value."""
    return HibariPipeline(**asdict(read_options(HibariOptions, options)))


def _aborted() -> SynthesisError:
    """The error of a request that was ended."""
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.", "Submit it again.")


def _failure(error: Exception) -> NightjarError:
    """Any error of a piece in our words."""
    if isinstance(error, NightjarError):
        return error
    if isinstance(error, MemoryError):
        failure = SynthesisError(
            ErrorCode.SYNTH_OOM, "There was not enough memory for this speech.", "Use fewer threads."
        )
    else:
        failure = SynthesisError(
            ErrorCode.SYNTH_ENGINE, f"hibari failed: {type(error).__name__}: {error}.", "Try again."
        )
    failure.__cause__ = error
    return failure
