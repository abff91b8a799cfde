"""Delivers the results of engines to callers: whole speech, or a stream of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

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
class FinishedCodes(Generic[S]):
    """The codes of a whole utterance."""

    #: int64 [frames, codebooks].
    codes: NDArray[np.int64]
    #: The engine's finish reason.
    finish: str
    #: The codec state that it starts from; None: the initial state.
    start: S | None = None
    #: Text that the model wrote.
    text_out: str | None = None


@dataclass(frozen=True, slots=True)
class RequestInfo(Generic[S]):
    """The facts of a request that its results need; families read the engine's results with it."""

    text: str
    sample_rate: int
    meta: Meta
    #: Whether speech that reached its limit without an end is returned instead of failing with `synth.no_eos`.
    keep_unfinished: bool

    def read(self, *made: Any, **_: Any) -> FinishedCodes[S]:
        """Reads the utterance from the engine's result.

        Raises `SynthesisError`: `synth.no_eos` (`check_end`) if it did not end, `synth.no_audio` (`no_audio`)
        if it has no speech.
        """
        raise NotImplementedError

    def check_end(self, finish: str, count: int, unit: str = "frames") -> None:
        """Raises `SynthesisError` (`synth.no_eos`) for speech that reached its limit, unless
        `keep_unfinished`."""
        if finish == "length" and not self.keep_unfinished:
            advice = "Try another seed, a shorter text or a larger max_seconds."
            raise SynthesisError(
                ErrorCode.SYNTH_NO_EOS, f"The speech did not end within {count} {unit}.", advice
            )

    def speech(self, samples: NDArray[np.float32], made: FinishedCodes[S]) -> Speech:
        """The result, with its finish reason."""
        meta = {**self.meta, "frames": len(made.codes), "finish": made.finish}
        return Speech(samples, self.sample_rate, self.text, made.text_out, meta)


def no_audio(message: str) -> SynthesisError:
    """The error of a request for which the model made no speech."""
    return SynthesisError(ErrorCode.SYNTH_NO_AUDIO, message, "Try another seed.")


class Receiver(Generic[S]):
    """Receives the codes of one request from the engine, and sends them to the codec's stage."""

    #: Whether the engine delivers tokens while the request runs.
    streamed = False
    #: Sizes in frames of a stream's chunks; the last one repeats. Small at first for a quick start, then larger
    #: for fewer calls. Empty: frames are decoded as they arrive.
    chunk_frames: tuple[int, ...] = (1, 2, 4, 8, 12)
    #: The engine that has this request, and its last request to it.
    engine: SpeechEngine[Any]
    current: Any

    def __init__(self, info: RequestInfo[S], stage: CodecStage[S], listener: Listener) -> None:
        self._info = info
        self._stage = stage
        self._listener = listener

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        """Receives the next tokens, if they are `streamed`."""

    def finished(self, *made: Any, **_: Any) -> None:
        """Receives the engine's result, the arguments of `RequestInfo.read`."""
        raise NotImplementedError

    def failed(self, error: NightjarError) -> None:
        """Ends the request with an error."""
        self._listener(Failed(error))

    def submit_next(self, request: Any) -> None:
        """Submits the next part of this speech to the engine, unless the request was cancelled."""
        self.current = request
        if self._listener.is_open:
            self.engine.submit(request, self)
        if not self._listener.is_open:  # cancelled before the engine had the request
            self.engine.cancel(request)

    def release(self) -> None:
        """Releases the resources of an ended request."""


class Utterance(Receiver[S]):
    """Receives a whole utterance."""

    def finished(self, *made: Any, **_: Any) -> None:
        try:
            self.decode(self._info.read(*made))
        except SynthesisError as error:
            self.failed(error)

    def decode(self, made: FinishedCodes[S]) -> None:
        """Sends the codes to the codec's stage, whose audio ends the request."""

        def decoded(outcome: NDArray[np.float32] | NightjarError) -> None:
            if isinstance(outcome, NightjarError):
                self.failed(outcome)
            else:
                self.done(self._info.speech(outcome, made))

        self._stage.decode(made.codes, decoded, made.start)

    def done(self, speech: Speech) -> None:
        """Ends the request with its speech."""
        self._listener(Done(speech))


class Streamer(Receiver[S]):
    """Receives an utterance in chunks. Its end is delivered after the audio of the last chunk."""

    streamed = True
    #: Whether the codec looks ahead, so that empty codes must mark the end.
    looks_ahead = False

    def __init__(
        self, info: RequestInfo[S], stage: CodecStage[S], listener: Listener, state: S | None = None
    ) -> None:
        super().__init__(info, stage, listener)
        #: The codec's state; frames are buffered while it is None.
        self._state = state
        self._buffer: list[NDArray[np.int64]] = []
        self._chunks = 0
        self._lock = threading.Lock()
        #: Number of chunks being decoded, plus one until the engine's result.
        self._expected = 1
        self._end: Done | Failed | None = None

    def tokens(self, ids: list[int], codes: NDArray[np.int64] | None) -> None:
        """Receives tokens; decodes their frames in chunks of `chunk_frames`."""
        frames = self.frames_of(ids, codes)
        if self._state is None and (len(frames) or self._buffer):
            self._state = self.first_state()
        self._buffer.extend(frames)
        while self._state is not None and len(self._buffer) >= (size := self._next_size()):
            self._decode_buffered(size)

    def frames_of(self, ids: list[int], codes: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """The frames [frames, codebooks] that these tokens complete; by default one for each step."""
        assert codes is not None
        return codes

    def first_state(self) -> S | None:
        """The codec's initial state, owned by this stream; None while it is not known. Called once there is a
        frame."""
        return self._stage.new_state()

    def finished(self, *made: Any, **_: Any) -> None:
        try:
            whole = self._info.read(*made)
        except SynthesisError as error:
            self._end = Failed(error)
        else:
            if self._buffer:
                self._decode_buffered(len(self._buffer))
            if self.looks_ahead:
                self.decode(np.zeros((0, whole.codes.shape[1]), np.int64))
            speech = self._info.speech(np.zeros(0, np.float32), replace(whole, text_out=None))
            self._end = Done(speech)
        self._passed()

    def decode(self, codes: NDArray[np.int64], last: bool = False, deadline: float = 0.0) -> None:
        """Decodes the next frames [frames, codebooks] as one chunk; see `CodecStage.decode_chunk`."""
        assert self._state is not None, "a stream is decoded from a known state"
        with self._lock:
            self._expected += 1
        self._stage.decode_chunk(codes, self._decoded, self._state, last, deadline)

    def release(self) -> None:
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
        self._passed()

    def _passed(self) -> None:
        """Ends the request after the engine's result and the last chunk; further ends are ignored."""
        with self._lock:
            self._expected -= 1
            ended = not self._expected
        if ended and self._end is not None:
            self._listener(self._end)


R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
O = TypeVar("O", bound=RequestInfo[Any])  # noqa: E741


class SpeechEngine(Protocol[R_contra]):
    """The engine of a family: `pipelines.engine.engine.Engine`, or a `pipelines.tokens.TokenHost`."""

    def submit(self, request: R_contra, receiver: Any) -> None: ...
    def cancel(self, request: R_contra) -> None: ...
    @property
    def info(self) -> EngineInfo: ...
    def stats(self, audio_seconds: float) -> EngineStats: ...
    def close(self) -> None: ...


class SpeechPipeline(Generic[R, O]):
    """The part of `pipelines.request.Pipeline` that all families share; each implements `_prepare`.

    `streamer` and `utterance` make the receivers of streams and of whole utterances.
    """

    name: str
    sample_rate: int
    capabilities: Capabilities
    starts_at_once = False

    def __init__(
        self,
        engine: SpeechEngine[R],
        stage: CodecStage[Any],
        streamer: Callable[[O, CodecStage[Any], Listener], Receiver[Any]] = Streamer,
        utterance: Callable[[O, CodecStage[Any], Listener], Receiver[Any]] = Utterance,
        cuts_chunks: bool = False,
    ) -> None:
        """`cuts_chunks`: the engine delivers a stream in the chunks to decode."""
        self._engine = engine
        self._stage = stage
        self._streamer = streamer
        self._utterance = utterance
        self._cuts_chunks = cuts_chunks
        self._lock = threading.Lock()
        self._audio_seconds = 0.0

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        """Submits a request to the engine; see `Pipeline.start`. Calls `on_event` on the codec's threads."""
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
        """The engine's request, and the facts that its results need. Raises `InputError` for a request that
        this model cannot serve."""
        raise NotImplementedError

    def _begin(self, wanted: R, info: O, on_event: OnEvent, stream: bool) -> Listener:
        def over(done: bool) -> None:
            with self._lock:
                self._audio_seconds += listener.seconds
            if not done:
                self._engine.cancel(receiver.current)
            receiver.release()

        listener = Listener(on_event, over)
        receiver = (self._streamer if stream else self._utterance)(info, self._stage, listener)
        if self._cuts_chunks:
            receiver.chunk_frames = ()
        receiver.engine, receiver.current = self._engine, wanted
        self._engine.submit(wanted, receiver)
        return listener
