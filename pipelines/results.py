"""From what an engine made to what a caller gets: a future of speech, or a stream of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.codec.stage import CodecStage
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import AudioChunk, EngineInfo, EngineStats, PreparedRequest, Speech, SynthesisRequest
from pipelines.streams import End, Heard, Listener, pulled

S = TypeVar("S")
Meta = dict[str, str | int | float | bool]
#: Told once how many seconds of audio a request was given, when it is over.
OnDone = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What is known of a request before its codes come. A family adds what its own receivers need."""

    text: str
    sample_rate: int
    meta: Meta
    #: Whether speech that reached its limit without an end is handed over instead of failing with `synth.no_eos`.
    keep_unfinished: bool

    def check_end(self, finish: str, count: int, unit: str = "frames") -> None:
        """Raises `SynthesisError` (`synth.no_eos`) for speech that did not end by itself and is not wanted without an end."""
        if finish == "length" and not self.keep_unfinished:
            advice = "Try another seed, a shorter text or a larger max_seconds."
            raise SynthesisError(ErrorCode.SYNTH_NO_EOS, f"The speech did not end within {count} {unit}.", advice)


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


class UtteranceFuture(Generic[S]):
    """Resolves the future of one whole utterance. Whatever comes first settles it."""

    #: Whether its caller left: what the engine makes of it is wanted by nobody.
    given_up = False

    def __init__(self, info: RequestInfo, stage: CodecStage[S], settled: OnDone) -> None:
        self.future: Future[Speech] = Future()
        self.future.set_running_or_notify_cancel()
        self._info = info
        self._stage = stage
        self._settled = settled
        self._lock = threading.Lock()
        self._open = True

    def decode(self, made: FinishedCodes[S]) -> None:
        """Has an utterance decoded; its audio resolves the future."""
        self._stage.decode(made.codes, lambda heard: self._decoded(heard, made), made.start)

    def failed(self, error: NightjarError) -> None:
        if self._settle(0.0):
            self.future.set_exception(error)

    def _decoded(self, heard: NDArray[np.float32] | NightjarError, made: FinishedCodes[S]) -> None:
        info = self._info
        if isinstance(heard, NightjarError):
            self.failed(heard)
        elif self._settle(len(heard) / info.sample_rate):
            meta = {**info.meta, "frames": len(made.codes), "finish": made.finish}
            self.future.set_result(Speech(heard, info.sample_rate, info.text, made.text_out, meta))

    def _settle(self, seconds: float) -> bool:
        with self._lock:
            first, self._open = self._open, False
        if first:
            self._settled(seconds)
        return first


class Streamer(Generic[S]):
    """Has one utterance decoded chunk by chunk while it grows; `heard` gets the audio.

    The last chunk is empty and says `final`: the end of speech is known only after the audio before it is on its way.
    """

    #: Frames of a stream's first chunks; the last one repeats. Small at first for a quick start, then for fewer calls. None: frames are
    #: decoded as they come.
    chunk_frames: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 12)
    #: As in `UtteranceFuture`.
    given_up = False

    def __init__(self, info: RequestInfo, stage: CodecStage[S], heard: Heard, state: S | None = None) -> None:
        self._info = info
        self._stage = stage
        self._heard = heard
        #: Where the codec is; frames are kept while it is not known.
        self._state = state
        self._buffer: list[NDArray[np.int64]] = []
        self._chunks = 0
        self._lock = threading.Lock()
        self._decoding = 0
        self._end: list[NightjarError | None] = []

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

    def close(self, error: NightjarError | None) -> None:
        """Ends the stream once all its audio is decoded."""
        with self._lock:
            self._end.append(error)
            over = not self._decoding
        if over:
            self._tell_end()

    def failed(self, error: NightjarError) -> None:
        self._heard(error)

    def hang_up(self) -> None:
        """Nobody listens any longer. A family that asks its engine for more than one thing ends that here."""

    def end_state(self) -> None:
        """The stream is over: what the codec keeps for it goes back at once, and not when the garbage collector finds it."""
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
            self._heard(outcome)
        elif len(outcome):
            self._heard(AudioChunk(outcome, self._info.sample_rate))
        with self._lock:
            self._decoding -= 1
            over = bool(self._end) and not self._decoding
        if over:
            self._tell_end()

    def _tell_end(self) -> None:
        self._heard(self._end[0] or AudioChunk(np.zeros(0, np.float32), self._info.sample_rate, final=True))


class EngineRequest(Protocol):
    @property
    def request_id(self) -> str: ...


R = TypeVar("R", bound=EngineRequest)
R_contra = TypeVar("R_contra", bound=EngineRequest, contravariant=True)
O = TypeVar("O", bound=RequestInfo)  # noqa: E741


class SpeechEngine(Protocol[R_contra]):
    """What a family's engine offers: `pipelines.engine.engine.Engine`, or a `pipelines.tokens.TokenHost`."""

    def submit(self, request: R_contra, receiver: Any) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def cancel(self, request: R_contra) -> None: ...
    @property
    def info(self) -> EngineInfo: ...
    def stats(self, audio_seconds: float) -> EngineStats: ...
    def close(self) -> None: ...


class SpeechPipeline(Generic[R, O]):
    """The part of `pipelines.request.Pipeline` that is the same in every family; a family has its own `_prepare`.

    `future_class` and `streamer_class` make the engine's receivers of one request, with the codec stage and what is called at its end, or
    with what a stream gives.
    """

    def __init__(
        self,
        engine: SpeechEngine[R],
        stage: CodecStage[Any],
        future_class: Callable[[O, CodecStage[Any], OnDone], UtteranceFuture[Any]],
        streamer_class: Callable[[O, CodecStage[Any], Heard], Streamer[Any]],
    ) -> None:
        self._engine = engine
        self._stage = stage
        self._future_class = future_class
        self._streamer_class = streamer_class
        self._receivers: dict[str, list[UtteranceFuture[Any] | Streamer[Any]]] = {}
        self._lock = threading.Lock()
        self._audio_seconds = 0.0

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        """Queues a request; see `Pipeline.submit`."""
        return self._begin(*self._prepare(request))

    def submit_prepared(self, request: PreparedRequest) -> Future[Speech]:
        """As `submit`, for a request of the family's `Frontend`."""
        return self._begin(*self._prepare_rest(request))

    def _begin(self, wanted: R, info: O) -> Future[Speech]:
        receiver = self._future_class(info, self._stage, lambda seconds: self._forget(wanted, receiver, seconds))
        self._send(wanted, receiver)
        return receiver.future

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        """Audio as it is made; the first `next` queues the request, closing the iterator ends it. See `Pipeline.stream`."""
        wanted, info = self._prepare(request)
        return pulled(lambda heard: self._start(wanted, info, heard))

    def start_stream(self, request: SynthesisRequest, heard: Heard) -> End:
        """As `stream`, but `heard` gets the chunks, on the codec's thread; see `pipelines.streams.start_stream`."""
        return self._start(*self._prepare(request), heard)

    def start_stream_prepared(self, request: PreparedRequest, heard: Heard) -> End:
        """As `start_stream`, for a request of the family's `Frontend`."""
        return self._start(*self._prepare_rest(request), heard)

    def abort(self, request_id: str) -> None:
        """Ends a request; see `Pipeline.abort`."""
        with self._lock:
            receivers = self._receivers.pop(request_id, [])
        for receiver in receivers:
            receiver.given_up = True
            receiver.failed(SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))
        self._engine.abort(request_id)

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
        """The engine's request and what its receivers must know. Raises `InputError` for what this model cannot do."""
        raise NotImplementedError

    def _prepare_rest(self, request: PreparedRequest) -> tuple[R, O]:
        """As `_prepare`, in families with a `Frontend`."""
        raise NotImplementedError

    def _streamed(self, wanted: R) -> R:
        """The engine's request of a stream, in families whose engine treats streams in a way of their own."""
        return wanted

    def _start(self, wanted: R, info: O, heard: Heard) -> End:
        wanted = self._streamed(wanted)

        def over(finished: bool) -> None:
            self._forget(wanted, streamer, listener.seconds)
            if not finished:
                streamer.given_up = True
                streamer.hang_up()
                self._engine.cancel(wanted)
            streamer.end_state()

        listener = Listener(heard, over)
        streamer = self._streamer_class(info, self._stage, listener)
        self._send(wanted, streamer)
        return listener.close

    def _send(self, wanted: R, receiver: UtteranceFuture[Any] | Streamer[Any]) -> None:
        with self._lock:
            self._receivers.setdefault(wanted.request_id, []).append(receiver)
        try:
            self._engine.submit(wanted, receiver)
        except BaseException:
            self._forget(wanted, receiver, 0.0)
            raise
        if receiver.given_up:  # while it waited for room
            self._engine.cancel(wanted)

    def _forget(self, wanted: R, receiver: UtteranceFuture[Any] | Streamer[Any], seconds: float) -> None:
        with self._lock:
            self._audio_seconds += seconds
            left = [one for one in self._receivers.pop(wanted.request_id, []) if one is not receiver]
            if left:
                self._receivers[wanted.request_id] = left
