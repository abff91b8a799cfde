"""From the engine's codes to what the caller waits for: a future of speech, or a stream of chunks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.engine.codec_stage import CodecStage
from pipelines.engine.core import Finish
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.qwen3_tts.codec import CodecState
from pipelines.request import AudioChunk, Speech

#: Frames of a stream's first chunks; the last one repeats. Small at first for a quick start, then for fewer calls.
CHUNK_FRAMES = (1, 2, 4, 8, 12)


@dataclass(frozen=True, slots=True)
class Order:
    """What is known of a request before its codes come."""

    text: str
    sample_rate: int
    #: Where the codec starts: after the reference's codes when cloning in context, else None.
    start: CodecState | None
    meta: dict[str, str | int | float | bool]
    #: Whether speech that reached its limit without an end is handed over instead of failing with `synth.no_eos`.
    keep_unfinished: bool


def no_end(frames: int) -> SynthesisError:
    """The error for speech that did not end by itself."""
    advice = "Try another seed, a shorter text or a larger max_seconds."
    return SynthesisError(ErrorCode.SYNTH_NO_EOS, f"The speech did not end within {frames} frames.", advice)


def no_audio() -> SynthesisError:
    """The error for speech without a frame."""
    return SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model ended the speech before its first frame.", "Try another seed.")


class Utterer:
    """Receives one whole utterance and resolves its future. Whatever comes first settles it."""

    def __init__(self, order: Order, stage: CodecStage[CodecState], settled: Callable[[float], None]) -> None:
        self.future: Future[Speech] = Future()
        self.future.set_running_or_notify_cancel()
        self._order = order
        self._stage = stage
        self._settled = settled
        self._lock = threading.Lock()
        self._open = True

    def frames(self, codes: NDArray[np.int64]) -> None:
        """Whole utterances wait for their end."""

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        if finish == "length" and not self._order.keep_unfinished:
            self.failed(no_end(len(codes)))
        elif not len(codes):
            self.failed(no_audio())
        else:
            meta = {**self._order.meta, "frames": len(codes), "finish": finish}
            self._stage.decode(codes, lambda heard: self._decoded(heard, meta), self._order.start)

    def failed(self, error: NightjarError) -> None:
        if self._settle(0.0):
            self.future.set_exception(error)

    def _decoded(self, heard: NDArray[np.float32] | NightjarError, meta: dict[str, str | int | float | bool]) -> None:
        if isinstance(heard, NightjarError):
            self.failed(heard)
        elif self._settle(len(heard) / self._order.sample_rate):
            self.future.set_result(Speech(heard, self._order.sample_rate, self._order.text, meta=meta))

    def _settle(self, seconds: float) -> bool:
        with self._lock:
            first, self._open = self._open, False
        if first:
            self._settled(seconds)
        return first


class Streamer:
    """Receives one utterance frame by frame and decodes it chunk by chunk; iterating gives the audio.

    The last chunk is empty and says `final`: the end of speech is known only after the audio before it is on its way.
    """

    def __init__(self, order: Order, stage: CodecStage[CodecState], state: CodecState, settled: Callable[[float], None]) -> None:
        self._order = order
        self._stage = stage
        self._state = state
        self._settled = settled
        self._heard: queue.SimpleQueue[NDArray[np.float32] | NightjarError | None] = queue.SimpleQueue()
        self._buffer: list[NDArray[np.int64]] = []
        self._chunks = 0
        self._lock = threading.Lock()
        self._decoding = 0
        self._end: list[NightjarError | None] = []

    def frames(self, codes: NDArray[np.int64]) -> None:
        self._buffer.extend(codes)
        while len(self._buffer) >= (size := CHUNK_FRAMES[min(self._chunks, len(CHUNK_FRAMES) - 1)]):
            self._decode(size)

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        if self._buffer:
            self._decode(len(self._buffer))
        if finish == "length" and not self._order.keep_unfinished:
            self._close(no_end(len(codes)))
        else:
            self._close(None if len(codes) else no_audio())

    def failed(self, error: NightjarError) -> None:
        self._heard.put(error)

    def chunks(self) -> Iterator[AudioChunk]:
        """Audio as it comes; raises the error that ended the stream early."""
        seconds = 0.0
        try:
            while (heard := self._heard.get()) is not None:
                if isinstance(heard, NightjarError):
                    raise heard
                seconds += len(heard) / self._order.sample_rate
                yield AudioChunk(heard, self._order.sample_rate)
            yield AudioChunk(np.zeros(0, np.float32), self._order.sample_rate, final=True)
        finally:
            self._settled(seconds)

    def _decode(self, size: int) -> None:
        codes, self._buffer = np.stack(self._buffer[:size]), self._buffer[size:]
        self._chunks += 1
        with self._lock:
            self._decoding += 1
        self._stage.decode_chunk(codes, self._decoded, self._state)

    def _decoded(self, heard: NDArray[np.float32] | NightjarError) -> None:
        with self._lock:
            self._decoding -= 1
            self._heard.put(heard)
            if self._end and not self._decoding:
                self._heard.put(self._end[0])

    def _close(self, error: NightjarError | None) -> None:
        """Ends the stream once all its audio is decoded."""
        with self._lock:
            self._end.append(error)
            if not self._decoding:
                self._heard.put(error)
