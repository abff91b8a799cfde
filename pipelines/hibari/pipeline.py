"""The embedded voice: hibari-tts, English, one voice, 24 kHz, on the CPU, with its weights in its wheel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np

from pipelines.audio import normalize_loudness
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.hibari.config import CAPABILITIES, SAMPLE_RATE
from pipelines.hibari.text import EnglishReader, check_pronounceable
from pipelines.hibari.utterance import (
    SAMPLES_PER_FRAME,
    Schedule,
    StreamedUtterance,
    Utterance,
    WholeUtterance,
)
from pipelines.request import (
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    Handle,
    Listener,
    OnEvent,
    PreparedRequest,
    SynthesisRequest,
    check_start,
)
from pipelines.validation import speech_task

_WAITING_PER_THREAD = 16


class HibariPipeline:
    """Threads that share one loaded model: inference and signal processing run outside the interpreter lock.

    Two threads on two cores make 1.9 times the speech of one, as two processes do, in half their memory
    (240 MB). Each request is synthesized alone with its own seed, so its speech does not depend on what
    else runs. A thread speaks one piece, mostly a sentence, and then looks again whose turn it is
    (`Schedule`). A whole utterance's text is read in `start`, so that what the voice cannot read is
    refused there; that takes about a second for the worst text of 5,000 characters. A stream's text is
    read by the threads, sentence by sentence.
    """

    name = "hibari"
    sample_rate = SAMPLE_RATE
    capabilities = CAPABILITIES
    starts_at_once = False

    def __init__(
        self,
        *,
        threads: int | None = None,
        waiting_room: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        count = threads or len(os.sched_getaffinity(0))
        self._reader = EnglishReader()
        # What is imported and allocated by the first speech belongs to opening.
        normalize_loudness(
            self._reader.voice.from_ids(self._reader.voice.ids("həlˈO"), 1.0, np.random.default_rng(0)),
            SAMPLE_RATE,
        )
        self._room = waiting_room or count * _WAITING_PER_THREAD
        self.info = EngineInfo(slots=count, waiting_room=self._room, device="cpu", dtype="float32")
        self._clock = clock
        self._schedule = Schedule(clock)
        self._running: set[Utterance] = set()
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

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        """Queues a request; see `Pipeline.start`. One that is cancelled ends with the sentence that is
        spoken.

        Of a stream, `InputError` is raised as far as the text's characters tell; the rest of it is read
        while it is spoken.
        """
        check_start(self, request, stream)
        assert isinstance(request, SynthesisRequest), "the voice has no frontend"
        text = speech_task(request.messages, request.generation, CAPABILITIES).text
        listener = Listener(on_event, lambda done: None if done else self._ended(utterance))
        utterance: Utterance
        if stream:
            check_pronounceable(text)
            utterance = StreamedUtterance(request, text, listener, self._clock)
            utterance.pieces = self._reader.pieces(text, lambda: self._is_over(utterance))
        else:
            utterance = WholeUtterance(request, text, listener)
            utterance.pieces = iter(self._reader.read(text, lambda: self._closed))
        with self._changed:
            if not stream:
                self._changed.wait_for(lambda: self._closed or self._waiting() < self._room)
            if self._closed:
                raise _aborted()
            self._schedule.add(utterance)
            self._changed.notify_all()
        return listener

    def stats(self) -> EngineStats:
        with self._changed:
            begun = sum(utterance.begun for utterance in self._schedule.utterances)
            return EngineStats(
                running=len(self._running) + begun,
                waiting=len(self._schedule.utterances) - begun,
                requests_done=self._requests_done,
                frames=self._samples_made // SAMPLES_PER_FRAME,
                audio_seconds=self._samples_made / SAMPLE_RATE,
            )

    def close(self) -> None:
        """Ends the threads; what waits or runs fails with `synth.aborted`. May be called more than once."""
        with self._changed:
            self._closed = True
            ended, self._schedule.utterances = self._schedule.utterances, []
            self._changed.notify_all()
        for utterance in ended:
            utterance.tell(Failed(_aborted()))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _waiting(self) -> int:
        """Whole utterances that were not begun."""
        return sum(isinstance(one, WholeUtterance) and not one.begun for one in self._schedule.utterances)

    def _is_over(self, utterance: Utterance) -> bool:
        """Whether nobody waits for it any more."""
        return self._closed or not utterance.listener.is_open

    def _ended(self, utterance: Utterance) -> None:
        """It was cancelled, or has failed."""
        with self._changed:
            if utterance in self._schedule.utterances:
                self._schedule.utterances.remove(utterance)
            self._changed.notify_all()

    def _work(self) -> None:
        while (utterance := self._next()) is not None:
            goes_on = self._advance(utterance)
            with self._changed:
                self._running.discard(utterance)
                ended = goes_on and self._is_over(utterance)
                if goes_on and not ended:
                    self._schedule.add(utterance)
            if ended:
                utterance.tell(Failed(_aborted()))

    def _next(self) -> Utterance | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._schedule.utterances)
            utterance = None if self._closed else self._schedule.take()
            if utterance is not None:
                self._running.add(utterance)
                self._changed.notify_all()
            return utterance

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
