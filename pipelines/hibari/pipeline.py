"""The embedded voice: hibari-tts, English, one voice, 24 kHz, on the CPU, with its weights in its wheel."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pipelines.audio import NO_SAMPLES, PEAK_LIMIT, normalize_loudness, peak
from pipelines.errors import (
    ErrorCode,
    NightjarError,
    SynthesisError,
    engine_closed,
    engine_error,
    input_too_long,
)
from pipelines.hibari import CAPABILITIES, SAMPLE_RATE
from pipelines.hibari.text import EnglishReader, check_pronounceable
from pipelines.hibari.times import TimedVoice
from pipelines.pronunciation import WholeWords
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
from pipelines.words import words_of

log = logging.getLogger(__name__)

#: Default size of the waiting room for each thread.
_WAITING_PER_THREAD = 16
SAMPLES_PER_FRAME = 300
#: Audio whose peak is lower is silent. Before normalization, speech has peaks of 0.1 and above, and the audio
#: of a text with nothing to say has peaks of 0.02.
_SILENT_PEAK = 0.03
#: Gain of streams. The model makes sentences of -26.3 LUFS, with a standard deviation of 0.4.
STREAM_GAIN = np.float32(10 ** (3.3 / 20))
#: Whole utterances precede a stream whose listener has more audio than this still to hear.
DUE_SECONDS = 2.0


@dataclass(eq=False, slots=True)
class Utterance:
    """A request and its progress. One thread at a time calls `advance`, `finish` and `send`.

    A whole utterance is normalized to the loudness of all speech of Nightjar. A stream's pieces are sent as
    soon as they are made, with the gain `STREAM_GAIN`, or a smaller one that keeps their peaks below the
    limit. They begin and end in silence, so there is no click between them.
    """

    request: SynthesisRequest
    text: str
    listener: Listener
    stream: bool = False
    #: Phoneme ids, one list for each piece of speech. A stream's text is read when the next list is requested.
    pieces: Iterator[list[int]] = iter(())  # noqa: RUF009  # empty, so it can be shared
    #: The word of each phoneme, as `EnglishReader.pieces` gives them; None: the times are not wanted.
    owners: deque[int] | None = None
    #: Its number in the order of arrival.
    arrival: int = 0
    begun: bool = False
    #: Number of samples that were made.
    samples: int = 0
    #: Time at which the listener of a stream, who begins with the first chunk, will have heard all
    #: chunks; 0 before the first chunk.
    deadline: float = 0.0
    _generator: np.random.Generator = field(init=False)
    #: Audio that was made and not yet sent.
    _parts: list[AudioChunk] = field(default_factory=list[AudioChunk])
    _audible: bool = False

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.request.seed)

    def advance(self, voice: TimedVoice) -> bool:
        """Makes the speech of the next piece; False if there is none.

        Raises `InputError` for text that the voice cannot read, and for speech longer than `max_seconds`.
        """
        self.begun = True
        piece = next(self.pieces, None)
        if piece is None:
            return False
        begin = self.samples / SAMPLE_RATE
        samples, frames = voice.timed(piece, self._generator)
        self.samples += len(samples)
        limit = self.request.generation.max_seconds
        if limit is not None and self.samples > limit * SAMPLE_RATE:
            raise input_too_long(
                f"The speech is longer than max_seconds ({limit:g}).",
                "Shorten the text or raise the limit.",
            )
        if len(samples):
            part = AudioChunk(samples, SAMPLE_RATE)
            if self.owners is not None:
                words, phonemes = voice.words(piece, samples, frames, begin, self.owners, words_of(self.text))
                part = replace(part, words=words, phonemes=phonemes)
            self._parts.append(part)
            self._audible = self._audible or peak(samples) >= _SILENT_PEAK
        # Nothing is sent before audible speech, so that a text without speech fails without a sound.
        while self.stream and self._audible and self._parts:
            part = self._parts.pop(0)
            gain = min(STREAM_GAIN, np.float32(PEAK_LIMIT / max(peak(part.samples), 1e-6)))
            self.send(replace(part, samples=part.samples * gain))
            self.deadline = max(self.deadline, time.monotonic()) + len(part.samples) / SAMPLE_RATE
        return True

    def finish(self) -> Speech:
        """The result of the request, after the last piece. Raises `SynthesisError` (`synth.silent`) if no
        speech is audible."""
        samples = NO_SAMPLES
        lufs = 0.0
        more = dict[str, float]()
        if self._audible and not self.stream:
            samples = np.concatenate([part.samples for part in self._parts])
            samples, lufs = normalize_loudness(samples, SAMPLE_RATE)
            more = {"loudness_lufs": round(lufs, 2)}
        if not self._audible or lufs == -math.inf:
            raise SynthesisError(
                ErrorCode.SYNTH_SILENT, "The voice made no audible speech from this text.", "Check the text."
            )
        meta = {"frames": self.samples // SAMPLES_PER_FRAME, "finish_reason": "stop", **more}
        return Speech(
            samples,
            SAMPLE_RATE,
            self.text,
            meta=meta,
            words=tuple(word for part in self._parts for word in part.words),
            phonemes=tuple(phoneme for part in self._parts for phoneme in part.phonemes),
        )

    def priority(self, now: float) -> tuple[int, float, int]:
        """The priority of its next piece; the smallest value is first.

        The order is: streams without a chunk so far, by arrival; streams whose listener has at most
        `DUE_SECONDS` of audio left, the least audio first; whole utterances, by arrival; other streams.
        """
        rank = 1 if not self.stream else 0 if self.deadline <= now + DUE_SECONDS else 2
        return rank, self.deadline, self.arrival

    def send(self, event: Event) -> None:
        """Sends an event to the listener. If the listener fails, the request is cancelled."""
        try:
            self.listener(event)
        except Exception:
            # The thread must continue for other requests.
            log.exception("the listener of a request failed, and the request is ended")
            self.listener.cancel()


class HibariPipeline:
    """Threads that share one loaded model: inference and signal processing run without the GIL.

    Two threads on two cores make 1.9 times as much speech as one thread, like two processes, but with half
    their memory (240 MB). Each request is synthesized alone with its own seed, so its speech does not depend
    on other requests. A thread makes one piece, usually a sentence, and then chooses the next piece by
    `Utterance.priority`. `start` reads the text of a whole utterance, so that it can refuse text that the
    voice cannot read; that takes about a second for the slowest text of 5,000 characters. The threads read a
    stream's text, sentence by sentence.
    """

    name = "hibari"
    sample_rate = SAMPLE_RATE
    capabilities = CAPABILITIES
    starts_at_once = False

    def __init__(self, *, threads: int | None = None, waiting_room: int | None = None) -> None:
        count = threads or len(os.sched_getaffinity(0))
        self._reader = EnglishReader()
        # Makes speech once, so that the first request does not wait for imports and allocations.
        normalize_loudness(
            self._reader.voice.timed(self._reader.voice.ids("həlˈO"), np.random.default_rng(0))[0],
            SAMPLE_RATE,
        )
        self._room = waiting_room or count * _WAITING_PER_THREAD
        self.info = EngineInfo(slots=count, waiting_room=self._room, device="cpu", dtype="float32")
        self._arrivals = itertools.count(1)
        #: Utterances whose next piece waits for a thread, and number of pieces that threads are making.
        self._queue = list[Utterance]()
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
        """Queues a request; see `Pipeline.start`. A cancelled request ends after the current sentence.

        For a stream, `InputError` is raised only for characters that the voice cannot read. Its text is read
        while it is spoken, and other errors are sent as `Failed`.
        """
        check_start(self, request, stream)
        assert isinstance(request, SynthesisRequest), "the voice has no frontend"
        text = speech_task(request.messages, request.generation, CAPABILITIES, request.seed).text
        listener = Listener(on_event, lambda done: None if done else self._ended(utterance))
        owners = deque[int]() if request.timestamps else None
        utterance = Utterance(request, text, listener, stream, owners=owners)
        words = WholeWords(request.pronunciations) if request.pronunciations else None
        if stream:
            check_pronounceable(text)
            utterance.pieces = self._reader.pieces(text, lambda: self._is_over(utterance), owners, words)
        else:
            utterance.pieces = iter(list(self._reader.pieces(text, lambda: self._closed, owners, words)))
        with self._changed:
            if not stream:
                self._changed.wait_for(
                    lambda: (
                        self._closed
                        or sum(not (other.stream or other.begun) for other in self._queue) < self._room
                    )
                )
            if self._closed:
                raise engine_closed()
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
        """Ends the threads; waiting and running requests fail with `synth.aborted`. May be called more than
        once."""
        with self._changed:
            self._closed = True
            ended = self._queue
            self._queue = []
            self._changed.notify_all()
        for utterance in ended:
            utterance.send(Failed(engine_closed()))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _is_over(self, utterance: Utterance) -> bool:
        """Whether the utterance is no longer needed."""
        return self._closed or not utterance.listener.is_open

    def _ended(self, utterance: Utterance) -> None:
        """Removes an utterance that was cancelled or has failed from the queue."""
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
                utterance = min(self._queue, key=lambda queued: queued.priority(now))
                self._queue.remove(utterance)
                self._speaking += 1
                self._changed.notify_all()
            has_more = self._advance(utterance)
            with self._changed:
                self._speaking -= 1
                ended = has_more and self._is_over(utterance)
                if has_more and not ended:
                    self._queue.append(utterance)
            if ended:
                utterance.send(Failed(engine_closed()))

    def _advance(self, utterance: Utterance) -> bool:
        """Makes the speech of the next piece; False if the utterance has ended, with or without success."""
        try:
            if utterance.advance(self._reader.voice):
                return True
            if self._is_over(utterance):
                raise engine_closed()
            speech = utterance.finish()
        except Exception as error:  # noqa: BLE001  # any error of the runtime ends this request, not the thread
            utterance.send(Failed(_failure(error)))
            return False
        with self._changed:
            self._requests_done += 1
            self._samples_made += utterance.samples
        utterance.send(Done(speech))
        return False


def _failure(error: Exception) -> NightjarError:
    """Converts any error to a `NightjarError`."""
    if isinstance(error, NightjarError):
        return error
    if isinstance(error, MemoryError):
        failure = SynthesisError(
            ErrorCode.SYNTH_OOM, "There was not enough memory for this speech.", "Use fewer threads."
        )
    else:
        failure = engine_error(f"hibari failed: {type(error).__name__}: {error}.", "Try again.")
    failure.__cause__ = error
    return failure
