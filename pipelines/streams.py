"""Streams as calls: a pipeline tells a listener what comes of a request, so that no thread has to wait for it."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from pipelines.errors import ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.request import AudioChunk, Pipeline, PreparedRequest, SynthesisRequest

log = logging.getLogger(__name__)

#: Is called with each chunk of a stream, the last of which says `final`, or with the one error that ended it, and with nothing after that.
#: It may be called on any thread, on one at a time, and must be quick.
Heard = Callable[[AudioChunk | NightjarError], None]
#: Ends a stream. May be called from any thread and more than once; a maximum of one more chunk is heard after it.
End = Callable[[], None]


def start_stream(pipeline: Pipeline, request: SynthesisRequest | PreparedRequest, heard: Heard) -> End:
    """Starts a stream and returns at once with what ends it. A pipeline without `start_stream` gets a thread for each of its streams.

    Raises `NightjarError` for a request that the pipeline refuses; one with a thread refuses by `heard`.
    """
    native: Any = pipeline
    if isinstance(request, PreparedRequest):
        return native.start_stream_prepared(request, heard)
    if hasattr(pipeline, "start_stream"):
        return native.start_stream(request, heard)
    return _start_thread(pipeline, request, heard)


class TextIds(Protocol):
    """A text that comes in pieces, as the ids of its tokens; what a `Frontend` with `open_text` gives."""

    def add(self, text: str, final: bool = False) -> list[int]:
        """The ids that are certain with this text and were not given before; `final`: all of the rest. Raises `InputError`."""
        ...


class IdStream(Protocol):
    """A stream of a pipeline whose text comes as token ids. Its methods may be called from any thread, and wait for nothing."""

    def append(self, ids: Sequence[int], final: bool) -> None:
        """More of the text; `final` ends it. Nothing follows that, and what comes after the stream's end is ignored."""
        ...

    def end(self) -> None:
        """Ends the stream, as `End`."""
        ...


class TextStream:
    """A stream that runs while its text is still being written: it makes frames as far as the text reaches, and then waits for more.

    The speech is that of the joined text, however it was cut and whenever it came. Used on one thread at a time.
    """

    def __init__(self, ids: TextIds, stream: IdStream) -> None:
        self._ids = ids
        self._stream = stream
        self._complete = False

    def append(self, text: str, final: bool = False) -> None:
        """More text; `final` ends it, and nothing may follow. Raises `InputError` for what the model does not take; the stream goes on."""
        if self._complete:
            raise ValueError("The text of this stream has ended.")
        fresh = self._ids.add(text, final)
        self._complete = final
        if fresh or final:
            self._stream.append(fresh, final)

    def finish(self) -> None:
        """Ends the text, if it has not ended."""
        if not self._complete:
            self.append("", final=True)

    def end(self) -> None:
        """Ends the stream, as `End`."""
        self._stream.end()


def start_text_stream(pipeline: Pipeline, request: SynthesisRequest, heard: Heard) -> TextStream:
    """Starts a stream with the beginning of its text, for a pipeline with `capabilities.text_in`. Else as `start_stream`."""
    native: Any = pipeline
    if not pipeline.capabilities.text_in:
        raise InputError(ErrorCode.INPUT_UNSUPPORTED, f"The model {pipeline.name} takes no text in pieces.", "Give it whole sentences.")
    return native.start_text_stream(request, heard)


def pulled(start: Callable[[Heard], End]) -> Iterator[AudioChunk]:
    """The chunks of a stream that the first `next` starts; closing the iterator ends it. Raises the error that ended it."""
    outcomes: queue.SimpleQueue[AudioChunk | NightjarError] = queue.SimpleQueue()
    end = start(outcomes.put)
    try:
        while True:
            outcome = outcomes.get()
            if isinstance(outcome, NightjarError):
                raise outcome
            yield outcome
            if outcome.final:
                return
    finally:
        end()


class Playback:
    """A player that starts at the first chunk of a stream and waits for each that comes too late."""

    def __init__(self) -> None:
        self._lasts_until = math.inf

    def add(self, now: float, seconds: float) -> float:
        """A chunk of so many seconds comes; for how long the player had nothing to play, 0 where it came in time."""
        late = max(now - self._lasts_until, 0.0)
        self._lasts_until = seconds + (now if late or self._lasts_until == math.inf else self._lasts_until)
        return late


class Listener:
    """Hands on what comes of one stream until its end, in order, whichever threads it comes from."""

    def __init__(self, heard: Heard, over: Callable[[bool], None]) -> None:
        """`over` is called once, after the end, with whether the final chunk was handed on: not so after an error or `close`."""
        self._heard = heard
        self._over = over
        self._order = threading.RLock()
        self._lock = threading.Lock()
        self._open = True
        #: Of the audio that was handed on.
        self.seconds = 0.0

    def __call__(self, outcome: AudioChunk | NightjarError) -> None:
        last = isinstance(outcome, NightjarError) or outcome.final
        with self._order:
            if not (self._end() if last else self._open):
                return
            if isinstance(outcome, AudioChunk):
                self.seconds += len(outcome.samples) / outcome.sample_rate
            try:
                self._heard(outcome)
            finally:
                if last:
                    self._over(isinstance(outcome, AudioChunk))

    def close(self) -> None:
        """Nothing is handed on any more. Does not wait for a chunk that is being handed on."""
        if self._end():
            self._over(False)

    @property
    def is_open(self) -> bool:
        """Whether the stream goes on."""
        return self._open

    def _end(self) -> bool:
        with self._lock:
            first, self._open = self._open, False
        return first


def _start_thread(pipeline: Pipeline, request: SynthesisRequest, heard: Heard) -> End:
    def over(finished: bool) -> None:
        if not finished:
            pipeline.abort(request.request_id)

    listener = Listener(heard, over)
    threading.Thread(target=_pull, name="stream", args=(pipeline, request, listener), daemon=True).start()
    return listener.close


def _pull(pipeline: Pipeline, request: SynthesisRequest, listener: Listener) -> None:
    """Hands a stream to its listener, on a thread of its own."""
    chunks: Iterator[AudioChunk] | None = None
    try:
        chunks = pipeline.stream(request)
        for chunk in chunks:
            listener(chunk)
            if not listener.is_open:
                return
        listener(AudioChunk(np.zeros(0, np.float32), pipeline.sample_rate, final=True))
    except NightjarError as error:
        listener(error)
    except Exception as error:
        log.exception("a stream failed")
        listener(SynthesisError(ErrorCode.SYNTH_ENGINE, f"The engine failed: {error!r}."))
    finally:
        if (close := getattr(chunks, "close", None)) is not None:
            close()
