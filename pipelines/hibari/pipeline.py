"""The embedded voice: hibari-tts, English, one voice, 24 kHz, on the CPU, with its weights in its wheel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

from pipelines.audio import normalize_loudness
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.hibari import CAPABILITIES, SAMPLE_RATE
from pipelines.hibari.schedule import Schedule
from pipelines.hibari.text import EnglishReader, check_pronounceable
from pipelines.hibari.utterance import SAMPLES_PER_FRAME, StreamedUtterance, Utterance, WholeUtterance, aborted
from pipelines.request import AudioChunk, EngineInfo, EngineStats, Speech, SynthesisRequest
from pipelines.streams import End, Heard, pulled
from pipelines.validation import speech_task

_WAITING_PER_THREAD = 16


class HibariPipeline:
    """Threads that share one loaded model: inference and signal processing run outside the interpreter lock.

    Two threads on two cores make 1.9 times the speech of one, as two processes do, in half their memory (240 MB). Each request
    is synthesized alone with its own seed, so its speech does not depend on what else runs. A thread speaks one piece, mostly a
    sentence, and then looks again whose turn it is (`Schedule`).
    A whole utterance's text is read in `submit`, so that what the voice cannot read is refused there; that takes about a second for
    the worst text of 5,000 characters. A stream's text is read by the threads, sentence by sentence.
    """

    name = "hibari"
    sample_rate = SAMPLE_RATE
    capabilities = CAPABILITIES

    def __init__(self, *, threads: int | None = None, waiting_room: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        count = threads or len(os.sched_getaffinity(0))
        self._reader = EnglishReader()
        # What is imported and allocated by the first speech belongs to opening.
        normalize_loudness(self._reader.voice.from_ids(self._reader.voice.ids("həlˈO"), 1.0, np.random.default_rng(0)), SAMPLE_RATE)
        self._room = waiting_room or count * _WAITING_PER_THREAD
        self.info = EngineInfo(slots=count, waiting_room=self._room, device="cpu", dtype="float32")
        self._clock = clock
        self._schedule = Schedule(clock)
        self._running: set[Utterance] = set()
        self._reading: set[Utterance] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._requests_done = 0
        self._samples_made = 0
        self._threads = [threading.Thread(target=self._work, name=f"hibari-{number}", daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        """Reads the text and queues the request; blocks while the waiting room is full.

        Raises `InputError` for what this voice cannot serve and `SynthesisError` (`synth.aborted`) once closed, or aborted meanwhile.
        """
        task = speech_task(request.messages, request.generation, CAPABILITIES)
        utterance = WholeUtterance(request, task.text)
        with self._changed:
            self._reading.add(utterance)
        try:
            utterance.pieces = iter(self._reader.read(task.text, lambda: utterance.aborted or self._closed))
            with self._changed:
                self._changed.wait_for(lambda: self._closed or utterance.aborted or self._schedule.waiting() < self._room)
                if self._closed or utterance.aborted:
                    raise aborted()
                self._schedule.add(utterance)
                self._changed.notify_all()
        finally:
            with self._changed:
                self._reading.discard(utterance)
        return utterance.future

    def start_stream(self, request: SynthesisRequest, heard: Heard) -> End:
        """Queues a stream and returns at once; a thread tells `heard` each piece of the speech, and at last a `final` chunk or an error.

        What is returned ends the stream, from any thread and any number of times; at most one more chunk is heard then, and no error.
        Raises `InputError` for what this voice cannot serve, as far as the text's characters tell, and `SynthesisError`
        (`synth.aborted`) once closed.
        """
        utterance = StreamedUtterance(request, self._checked(request), heard, self._clock)
        utterance.pieces = self._reader.pieces(utterance.text, lambda: utterance.aborted or self._closed)
        with self._changed:
            if self._closed:
                raise aborted()
            self._schedule.add(utterance)
            self._changed.notify_all()
        return lambda: self._end(utterance)

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        """The speech piece by piece; the first `next` queues the request, closing the iterator ends it. Raises as `start_stream`."""
        self._checked(request)
        return pulled(lambda heard: self.start_stream(request, heard))

    def abort(self, request_id: str) -> None:
        """Ends a request at the end of the sentence it is in, read or spoken; its future, stream or `submit` fails with `synth.aborted`.

        Unknown ids are ignored.
        """
        with self._changed:
            ended = [utterance for utterance in self._schedule if utterance.request.request_id == request_id]
            for utterance in ended:
                self._schedule.remove(utterance)
            for utterance in (*ended, *self._reading, *self._running):
                utterance.aborted = utterance.aborted or utterance.request.request_id == request_id
            self._changed.notify_all()
        _fail(ended)

    def stats(self) -> EngineStats:
        with self._changed:
            begun = sum(utterance.begun for utterance in self._schedule)
            return EngineStats(
                running=len(self._running) + begun,
                waiting=len(self._schedule) - begun,
                requests_done=self._requests_done,
                frames=self._samples_made // SAMPLES_PER_FRAME,
                audio_seconds=self._samples_made / SAMPLE_RATE,
            )

    def close(self) -> None:
        """Ends the threads; what waits or runs fails with `synth.aborted`. May be called more than once."""
        with self._changed:
            self._closed = True
            ended = list(self._schedule)
            for utterance in ended:
                self._schedule.remove(utterance)
            for utterance in self._running:
                utterance.aborted = True
            self._changed.notify_all()
        _fail(ended)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _checked(self, request: SynthesisRequest) -> str:
        text = speech_task(request.messages, request.generation, CAPABILITIES).text
        check_pronounceable(text)
        return text

    def _end(self, utterance: StreamedUtterance) -> None:
        with self._changed:
            utterance.aborted = utterance.is_mute = True
            self._schedule.remove(utterance)

    def _work(self) -> None:
        while (utterance := self._next()) is not None:
            goes_on = self._advance(utterance)
            with self._changed:
                self._running.discard(utterance)
                ended = goes_on and (utterance.aborted or self._closed)
                if goes_on and not ended:
                    self._schedule.add(utterance)
            if ended:
                utterance.fail(aborted())

    def _next(self) -> Utterance | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._schedule))
            utterance = None if self._closed else self._schedule.take()
            if utterance is not None:
                self._running.add(utterance)
                self._changed.notify_all()
            return utterance

    def _advance(self, utterance: Utterance) -> bool:
        """Speaks the next piece; False when the utterance is over, however it ended."""
        try:
            if not utterance.begun and not utterance.begin():
                return False
            if utterance.advance(self._reader.voice):
                return True
            if utterance.aborted or self._closed:
                raise aborted()
            utterance.complete()
        except NightjarError as error:
            utterance.fail(error)
        except MemoryError as error:
            failure = SynthesisError(ErrorCode.SYNTH_OOM, "There was not enough memory for this speech.", "Use fewer threads.")
            failure.__cause__ = error
            utterance.fail(failure)
        except Exception as error:  # noqa: BLE001  # whatever the runtime raises ends this request, not the thread
            failure = SynthesisError(ErrorCode.SYNTH_ENGINE, f"hibari failed: {type(error).__name__}: {error}.", "Try again.")
            failure.__cause__ = error
            utterance.fail(failure)
        else:
            with self._changed:
                self._requests_done += 1
                self._samples_made += utterance.samples
            utterance.deliver()
        return False


def _fail(utterances: list[Utterance]) -> None:
    for utterance in utterances:
        utterance.fail(aborted())
