"""From what an engine made to what a caller hears: speech as a whole, or a stream of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import (
    AudioChunk,
    Capabilities,
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    Handle,
    Listener,
    OnEvent,
    PreparedRequest,
    Speech,
    SynthesisRequest,
    check_start,
)

S = TypeVar("S")
Meta = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What is known of a request before its codes come. A family adds what its own receivers need."""

    text: str
    sample_rate: int
    meta: Meta
    #: Whether speech that reached its limit without an end is handed over instead of failing with
    #: `synth.no_eos`.
    keep_unfinished: bool

    def check_end(self, finish: str, count: int, unit: str = "frames") -> None:
        """Raises `SynthesisError` (`synth.no_eos`) for speech that did not end by itself and is not wanted
        without an end."""
        if finish == "length" and not self.keep_unfinished:
            advice = "Try another seed, a shorter text or a larger max_seconds."
            raise SynthesisError(
                ErrorCode.SYNTH_NO_EOS, f"The speech did not end within {count} {unit}.", advice
            )

    def speech(
        self, samples: NDArray[np.float32], frames: int, finish: str, text_out: str | None = None
    ) -> Speech:
        """The result, of so many frames, with how it ended in the engine's word."""
        return Speech(
            samples, self.sample_rate, self.text, text_out, {**self.meta, "frames": frames, "finish": finish}
        )


def no_audio(message: str) -> SynthesisError:
    """The error for a request that the model answered without speech."""
    return SynthesisError(ErrorCode.SYNTH_NO_AUDIO, message, "Try another seed.")


@dataclass(frozen=True, slots=True)
class FinishedCodes(Generic[S]):
    """A whole utterance as the codec takes it."""

    #: int64 [frames, codebooks].
    codes: NDArray[np.int64]
    #: How it ended, in the engine's word.
    finish: str
    #: Where the codec starts; None: at its own beginning.
    start: S | None = None
    #: Text that the model itself wrote.
    text_out: str | None = None


class Receiver(Generic[S]):
    """Hears of one request from the engine, and has its codes decoded for a listener."""

    #: Who was asked for this speech, and for what last.
    engine: SpeechEngine[Any]
    current: Any

    def __init__(self, info: RequestInfo, stage: CodecStage[S], listener: Listener) -> None:
        self._info = info
        self._stage = stage
        self._listener = listener

    def failed(self, error: NightjarError) -> None:
        """The engine could not do it."""
        self._listener(Failed(error))

    def go_on(self, request: Any) -> None:
        """Asks the engine for more of this speech, unless nobody listens any longer."""
        self.current = request
        if self._listener.is_open:
            self.engine.submit(request, self)
        if not self._listener.is_open:  # perhaps meanwhile, before the engine knew the request
            self.engine.cancel(request)

    def end_state(self) -> None:
        """The request is over: what the codec keeps for it goes back at once, and not when the garbage
        collector finds it."""


class Utterance(Receiver[S]):
    """Has one whole utterance decoded."""

    def done(self, speech: Speech) -> None:
        """Ends the request."""
        self._listener(Done(speech))

    def decode(self, made: FinishedCodes[S]) -> None:
        """Has an utterance decoded; its audio ends the request."""
        self._stage.decode(made.codes, lambda heard: self._decoded(heard, made), made.start)

    def _decoded(self, heard: NDArray[np.float32] | NightjarError, made: FinishedCodes[S]) -> None:
        if isinstance(heard, NightjarError):
            self.failed(heard)
        else:
            self.done(self._info.speech(heard, len(made.codes), made.finish, made.text_out))


class Streamer(Receiver[S]):
    """Has one utterance decoded chunk by chunk while it grows.

    The end is told behind the last chunk: that of speech is known only after the audio before it is on its
    way.
    """

    #: Frames of a stream's first chunks; the last one repeats. Small at first for a quick start, then for
    #: fewer calls. None: frames are decoded as they come.
    chunk_frames: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 12)

    def __init__(
        self, info: RequestInfo, stage: CodecStage[S], listener: Listener, state: S | None = None
    ) -> None:
        super().__init__(info, stage, listener)
        #: Where the codec is; frames are kept while it is not known.
        self._state = state
        self._buffer: list[NDArray[np.int64]] = []
        self._chunks = 0
        self._lock = threading.Lock()
        self._decoding = 0
        self._end: list[Done | Failed] = []

    def push(self, codes: NDArray[np.int64]) -> None:
        """The next frames [frames, codebooks]; they are decoded in chunks of `chunk_frames`."""
        self._buffer.extend(codes)
        while self._state is not None and len(self._buffer) >= (size := self._next_size()):
            self._decode_buffered(size)

    def flush(self) -> None:
        """Has all frames that are left decoded."""
        if self._buffer:
            self._decode_buffered(len(self._buffer))

    def decode(self, codes: NDArray[np.int64], last: bool = False, deadline: float = 0.0) -> None:
        """Has the next frames [frames, codebooks] decoded as one chunk; see `CodecStage.decode_chunk`."""
        assert self._state is not None, "a stream is decoded from a known state"
        with self._lock:
            self._decoding += 1
        self._stage.decode_chunk(codes, self._decoded, self._state, last, deadline)

    def mark_end(self, codebooks: int) -> None:
        """Tells a codec that looks ahead that no frame follows: it hands out what it held back."""
        self.decode(np.zeros((0, codebooks), np.int64))

    def close(self, end: Done | Failed) -> None:
        """Ends the stream once all its audio is decoded."""
        with self._lock:
            self._end.append(end)
            over = not self._decoding
        if over:
            self._listener(end)

    def complete(self, frames: int, finish: str) -> None:
        """Ends a stream of so many frames, in the engine's word for how, once all its audio is decoded."""
        self.close(Done(self._info.speech(np.zeros(0, np.float32), frames, finish)))

    def end_state(self) -> None:
        if self._state is not None:
            self._stage.end(self._state)

    def _next_size(self) -> int:
        if not self.chunk_frames:
            return max(len(self._buffer), 1)
        return self.chunk_frames[min(self._chunks, len(self.chunk_frames) - 1)]

    def _decode_buffered(self, size: int) -> None:
        codes, self._buffer = np.stack(self._buffer[:size]), self._buffer[size:]
        self._chunks += 1
        self.decode(codes)

    def _decoded(self, outcome: NDArray[np.float32] | NightjarError) -> None:
        if isinstance(outcome, NightjarError):
            self.failed(outcome)
        elif len(outcome):
            self._listener(AudioChunk(outcome, self._info.sample_rate))
        with self._lock:
            self._decoding -= 1
            over = bool(self._end) and not self._decoding
        if over:
            self._listener(self._end[0])


R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
O = TypeVar("O", bound=RequestInfo)  # noqa: E741


class SpeechEngine(Protocol[R_contra]):
    """What a family's engine offers: `pipelines.engine.engine.Engine`, or a `pipelines.tokens.TokenHost`."""

    def submit(self, request: R_contra, receiver: Any) -> None: ...
    def cancel(self, request: R_contra) -> None: ...
    @property
    def info(self) -> EngineInfo: ...
    def stats(self, audio_seconds: float) -> EngineStats: ...
    def close(self) -> None: ...


class SpeechPipeline(Generic[R, O]):
    """The part of `pipelines.request.Pipeline` that is the same in every family; a family has its own
    `_prepare`.

    `utterance` and `streamer` make the engine's receivers of one request, whole and streamed.
    """

    name: str
    sample_rate: int
    capabilities: Capabilities
    starts_at_once = False

    def __init__(
        self,
        engine: SpeechEngine[R],
        stage: CodecStage[Any],
        utterance: Callable[[O, CodecStage[Any], Listener], Receiver[Any]],
        streamer: Callable[[O, CodecStage[Any], Listener], Receiver[Any]],
    ) -> None:
        self._engine = engine
        self._stage = stage
        self._utterance = utterance
        self._streamer = streamer
        self._lock = threading.Lock()
        self._audio_seconds = 0.0

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        """Gives a request to the engine; see `Pipeline.start`. Chunks and speech are told on the codec's
        threads."""
        check_start(self, request, stream)
        assert isinstance(request, SynthesisRequest), "a family with a frontend has its own `start`"
        return self._begin(*self._prepare(request), on_event, stream)

    @property
    def info(self) -> EngineInfo:
        """How the engine was opened."""
        return self._engine.info

    def stats(self) -> EngineStats:
        return self._engine.stats(self._audio_seconds)

    def close(self) -> None:
        """Frees the engine; see `Pipeline.close`."""
        self._engine.close()
        self._stage.close()

    def _prepare(self, request: SynthesisRequest) -> tuple[R, O]:
        """The engine's request and what its receivers must know. Raises `InputError` for what this model
        cannot do."""
        raise NotImplementedError

    def _streamed(self, wanted: R) -> R:
        """The engine's request of a stream, in families whose engine treats streams in a way of their own."""
        return wanted

    def _begin(self, wanted: R, info: O, on_event: OnEvent, stream: bool) -> Listener:
        if stream:
            wanted = self._streamed(wanted)

        def over(done: bool) -> None:
            with self._lock:
                self._audio_seconds += listener.seconds
            if not done:
                self._engine.cancel(receiver.current)
            receiver.end_state()

        listener = Listener(on_event, over)
        receiver = (self._streamer if stream else self._utterance)(info, self._stage, listener)
        receiver.engine, receiver.current = self._engine, wanted
        self._engine.submit(wanted, receiver)
        return listener
