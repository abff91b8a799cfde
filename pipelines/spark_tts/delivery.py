"""From the LM's tokens to what the caller waits for: a future of speech, or a stream of chunks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.engine.codec_stage import CodecStage
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import AudioChunk, Speech
from pipelines.spark_tts.stage import Voice
from pipelines.spark_tts.vocabulary import SparkCodes, Vocabulary
from pipelines.vllm_engine.options import Tokens

#: Tokens of a stream's chunks (50 a second); the last one repeats. Small at first for a quick start, then for fewer calls.
CHUNK_TOKENS = (20, 25, 50, 100)


@dataclass(frozen=True, slots=True)
class Order:
    """What is known of a request before its tokens come."""

    text: str
    sample_rate: int
    vocabulary: Vocabulary
    #: The global tokens of a cloned voice; None where the LM makes them itself.
    voice: tuple[int, ...] | None
    #: How many global tokens a voice has.
    voice_tokens: int
    meta: dict[str, str | int | float | bool]
    #: Whether speech that reached its limit without an end is handed over instead of failing with `synth.no_eos`.
    keep_unfinished: bool

    def codes(self, tokens: Tokens) -> SparkCodes:
        """The tokens of BiCodec in a finished sequence.

        Raises `SynthesisError`: `synth.no_eos` when it did not end, `synth.no_audio` when it holds no speech or no whole voice.
        """
        if tokens.finish == "length" and not self.keep_unfinished:
            advice = "Try another seed, a shorter text or a larger max_seconds."
            raise SynthesisError(ErrorCode.SYNTH_NO_EOS, f"The speech did not end within {len(tokens.ids)} tokens.", advice)
        found = self.vocabulary.parse(tokens.ids)
        voice = found.voice if self.voice is None else self.voice
        if not found.semantic:
            raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model wrote no speech tokens.", "Try another seed.")
        if len(voice) != self.voice_tokens:
            message = f"The model wrote {len(voice)} tokens of a voice instead of {self.voice_tokens}."
            raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, message, "Try another seed.")
        return SparkCodes(found.semantic, voice)


class Utterer:
    """Receives one whole utterance and resolves its future. Whatever comes first settles it."""

    streamed = False

    def __init__(self, order: Order, stage: CodecStage[Voice], settled: Callable[[float], None]) -> None:
        self.future: Future[Speech] = Future()
        self.future.set_running_or_notify_cancel()
        self._order = order
        self._stage = stage
        self._settled = settled
        self._lock = threading.Lock()
        self._open = True

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        """Whole utterances wait for their end."""

    def finished(self, tokens: Tokens) -> None:
        try:
            codes = self._order.codes(tokens)
        except SynthesisError as error:
            self.failed(error)
            return
        meta = {**self._order.meta, "frames": len(codes.semantic), "finish": tokens.finish}
        self._stage.decode(column(codes.semantic), lambda heard: self._decoded(heard, meta), Voice(torch.tensor(codes.voice)))

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
    """Receives one utterance token by token and decodes it chunk by chunk; iterating gives the audio.

    The last chunk is empty and says `final`.
    """

    streamed = True

    def __init__(self, order: Order, stage: CodecStage[Voice], settled: Callable[[float], None]) -> None:
        self._order = order
        self._stage = stage
        self._settled = settled
        self._heard: queue.SimpleQueue[NDArray[np.float32] | NightjarError | None] = queue.SimpleQueue()
        self._ids: list[int] = []
        self._voice: Voice | None = None
        self._semantic: list[int] = []
        self._chunks = 0
        self._lock = threading.Lock()
        self._decoding = 0
        self._end: list[NightjarError | None] = []

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        new = self._order.vocabulary.parse(ids)
        self._ids += ids
        self._semantic += new.semantic
        if self._voice is None and self._semantic:
            self._voice = self._find_voice()
        while self._voice is not None and len(self._semantic) >= (size := CHUNK_TOKENS[min(self._chunks, len(CHUNK_TOKENS) - 1)]):
            self._decode(self._voice, size)

    def finished(self, tokens: Tokens) -> None:
        try:
            self._order.codes(tokens)
        except SynthesisError as error:
            self._close(error)
            return
        assert self._voice is not None
        if self._semantic:
            self._decode(self._voice, len(self._semantic))
        self._decode(self._voice, 0)
        self._close(None)

    def failed(self, error: NightjarError) -> None:
        self._heard.put(error)

    def chunks(self) -> Iterator[AudioChunk]:
        """Audio as it comes; raises the error that ended the stream early."""
        seconds = 0.0
        try:
            while (heard := self._heard.get()) is not None:
                if isinstance(heard, NightjarError):
                    raise heard
                if len(heard):
                    seconds += len(heard) / self._order.sample_rate
                    yield AudioChunk(heard, self._order.sample_rate)
            yield AudioChunk(np.zeros(0, np.float32), self._order.sample_rate, final=True)
        finally:
            self._settled(seconds)

    def _find_voice(self) -> Voice | None:
        """The voice of a stream, whose tokens all stand before the first semantic one; None when it is not whole."""
        voice = self._order.vocabulary.parse(self._ids).voice if self._order.voice is None else self._order.voice
        return Voice(torch.tensor(voice)) if len(voice) == self._order.voice_tokens else None

    def _decode(self, voice: Voice, size: int) -> None:
        codes, self._semantic = column(self._semantic[:size]), self._semantic[size:]
        self._chunks += 1
        with self._lock:
            self._decoding += 1
        self._stage.decode_chunk(codes, self._decoded, voice)

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


def column(semantic: tuple[int, ...] | list[int]) -> NDArray[np.int64]:
    """Semantic tokens as codes of one codebook, int64 [steps, 1]."""
    return np.array(semantic, dtype=np.int64).reshape(-1, 1)
