"""Turns an engine's output into whole speech or a stream of chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipelines.audio import NO_SAMPLES, Samples
from pipelines.codec.stage import CodecStage, State
from pipelines.energy import board_joules
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.recording import ReadsRecordings
from pipelines.request import (
    AnyRequest,
    AudioChunk,
    Capabilities,
    Codes,
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    FloatArray,
    Handle,
    IntArray,
    Listener,
    Meta,
    OnEvent,
    Output,
    Speech,
    SynthesisRequest,
    check_start,
)

#: Frames of the window of `lowest_log_probability`: a second of Qwen3-TTS.
WINDOW_FRAMES = 12


class FinishedCodes(NamedTuple):
    """The codes of a whole utterance."""

    #: int64 [frames, codebooks].
    codes: IntArray
    #: The engine's finish reason.
    finish: str
    #: Initial state of the codec; None: the default one.
    start: State | None = None
    #: Text that the model wrote.
    text_out: str | None = None
    #: int64 [n, codebooks]: see `Speech.voice_codes`; `start` is made from it.
    voice_codes: IntArray | None = None
    #: [frames], of codebook 0: see `kernels.sampler.log_probability`; None: the engine does not measure them.
    log_probabilities: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Facts of a request that are known before its codes. A family adds `read`, which reads the engine's
    output."""

    text: str
    sample_rate: int
    meta: Meta
    #: Whether speech that reaches its limit without an end is returned instead of failing with `synth.no_eos`.
    keep_unfinished: bool

    def read(self, *made: Any, **_: Any) -> FinishedCodes:
        """Reads the utterance from the engine's final output.

        Raises `SynthesisError`: `synth.no_eos` (by `check_end`) if it did not end, `synth.no_audio` (by
        `no_audio`) if it holds no speech.
        """
        raise NotImplementedError

    def check_end(self, finish: str, count: int, unit: str = "frames") -> None:
        """Raises `SynthesisError` (`synth.no_eos`) for speech that did not end by itself, unless unfinished
        speech is kept."""
        if finish == "length" and not self.keep_unfinished:
            raise SynthesisError(
                ErrorCode.SYNTH_NO_EOS,
                f"The speech did not end within {count} {unit}.",
                "Try another seed, a shorter text or a larger max_seconds.",
            )

    def speech(self, samples: Samples, made: FinishedCodes) -> Speech:
        """The result, with the engine's finish reason, and the mean log probability and the lowest one of
        `WINDOW_FRAMES` frames in a row."""
        meta = {**self.meta, "frames": len(made.codes), "finish": made.finish}
        if (found := made.log_probabilities) is not None:
            window = min(WINDOW_FRAMES, len(found))
            means = np.convolve(found, np.full(window, 1 / window), "valid")
            meta["log_probability"] = round(float(found.mean()), 4)
            meta["lowest_log_probability"] = round(float(means.min()), 4)
        return Speech(samples, self.sample_rate, self.text, made.text_out, meta)


def no_audio(message: str) -> SynthesisError:
    """The error for a request that the model answered without speech."""
    return SynthesisError(ErrorCode.SYNTH_NO_AUDIO, message, "Try another seed.")


@dataclass(eq=False)
class Receiver:
    """Receives the output of one request from the engine and sends it to the codec."""

    _info: RequestInfo
    _stage: CodecStage
    _listener: Listener
    #: The engine that makes this speech, and the latest request to it.
    engine: SpeechEngine[Any] = field(init=False)
    current: Any = field(init=False)
    #: What the request wants, and the samples of a frame.
    output: Output = "audio"
    frame_samples: int = 0
    #: Whether the engine delivers tokens by calls of `tokens` while the request runs.
    streamed = False

    def tokens(self, ids: list[int], codes: IntArray | None) -> None:
        """Receives the next tokens, and their codes if the engine returns them; called only if `streamed`."""

    def finished(self, *made: Any, **_: Any) -> None:
        """Receives the engine's final output: the arguments of `RequestInfo.read`."""
        raise NotImplementedError

    def failed(self, error: NightjarError) -> None:
        """Ends the request with the engine's error."""
        self._listener(Failed(error))

    def request_more(self, request: Any) -> None:
        """Sends a further request of this speech to the engine, unless the speech was cancelled."""
        self.current = request
        if self._listener.is_open:
            self.engine.submit(request, self)
        if not self._listener.is_open:  # it may have been cancelled before the engine had the request
            self.engine.cancel(request)


class Utterance(Receiver):
    """Decodes one whole utterance."""

    def finished(self, *made: Any, **_: Any) -> None:
        try:
            self.decode(self._info.read(*made))
        except SynthesisError as error:
            self.failed(error)

    def decode(self, made: FinishedCodes) -> None:
        """Decodes an utterance, unless only codes are wanted; its speech, with the codes if they are wanted, ends the
        request."""

        def decoded(outcome: Samples | NightjarError) -> None:
            if isinstance(outcome, NightjarError):
                self.failed(outcome)
                return
            speech = self._info.speech(outcome, made)
            if self.output != "audio":
                codes = made.codes.astype(np.int16)
                before = None if made.voice_codes is None else made.voice_codes.astype(np.int16)
                speech = replace(speech, codes=codes, voice_codes=before, frame_samples=self.frame_samples)
            self.done(speech)

        if self.output == "codes":
            decoded(NO_SAMPLES)
        else:
            self._stage.decode(made.codes, decoded, made.start)

    def done(self, speech: Speech) -> None:
        """Ends the request."""
        self._listener(Done(speech))


class Streamer(Receiver):
    """Decodes one utterance chunk by chunk while it grows. The end is delivered after the last chunk."""

    streamed = True
    #: Frames of the first chunks; the last size repeats. Small sizes first for a quick start, large ones later
    #: for fewer calls. Empty: frames are decoded as they arrive.
    chunk_frames: tuple[int, ...] = (1, 2, 4, 8, 12)
    #: Whether the codec looks ahead. If so, empty codes mark the end of the stream.
    looks_ahead = False

    def __init__(
        self, info: RequestInfo, stage: CodecStage, listener: Listener, state: State | None = None
    ) -> None:
        super().__init__(info, stage, listener)
        #: State of the codec; None while it is unknown, so that frames are buffered.
        self._state = state
        self._buffer = list[IntArray]()
        self._chunks = 0
        self._lock = threading.Lock()
        #: Number of pending parts: the chunks that are being decoded, and the engine's end.
        self._expected = 1
        self._end: Done | Failed | None = None

    def tokens(self, ids: list[int], codes: IntArray | None) -> None:
        """Receives the next tokens, and decodes their frames in chunks with the sizes of `chunk_frames`."""
        frames = self.frames_of(ids, codes)
        if self._state is None and (len(frames) or self._buffer):
            self._state = self.first_state()
        self._buffer.extend(frames)
        while self._state is not None:
            sizes = self.chunk_frames or (max(len(self._buffer), 1),)
            size = sizes[min(self._chunks, len(sizes) - 1)]
            if len(self._buffer) < size:
                return
            self._decode_buffered(size)

    def frames_of(self, ids: list[int], codes: IntArray | None) -> IntArray:
        """The frames [frames, codebooks] that these tokens complete; by default the codes of every step."""
        assert codes is not None
        return codes

    def first_state(self) -> State | None:
        """A new state of the codec for this stream; None while the tokens do not determine it. Called once
        there is a frame."""
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
                self.decode(np.zeros((0, whole.codes.shape[1]), np.int64), deadline=self._chunks)
            self._end = Done(self._info.speech(NO_SAMPLES, whole._replace(text_out=None)))
        self._part_ended()

    def decode(self, codes: IntArray, last: bool = False, deadline: float = 0.0) -> None:
        """Decodes the next frames [frames, codebooks] as one chunk; see `CodecStage.decode_chunk`."""
        assert self._state is not None, "a stream is decoded from a known state"
        with self._lock:
            self._expected += 1
        self._stage.decode_chunk(codes, self._decoded, self._state, last, deadline)

    def release(self) -> None:
        """Releases the state of the codec; called once when the request ends or is cancelled."""
        if self._state is not None:
            self._stage.end(self._state)

    def _decode_buffered(self, size: int) -> None:
        codes = np.stack(self._buffer[:size])
        self._buffer = self._buffer[size:]
        # Streams with fewer chunks come first; the first chunk of one is due at once.
        self.decode(codes, deadline=self._chunks)
        self._chunks += 1

    def _decoded(self, outcome: Samples | NightjarError) -> None:
        if isinstance(outcome, NightjarError):
            self.failed(outcome)
        elif len(outcome):
            self._listener(AudioChunk(outcome, self._info.sample_rate))
        self._part_ended()

    def _part_ended(self) -> None:
        """Ends the request once the engine has ended and all chunks are decoded. A second end is ignored."""
        with self._lock:
            self._expected -= 1
            ended = not self._expected
        if ended and self._end is not None:
            self._listener(self._end)


R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
O = TypeVar("O", bound=RequestInfo)  # noqa: E741


class SpeechEngine(Protocol[R_contra]):
    """The engine of a family: `pipelines.engine.engine.Engine` or a `pipelines.tokens.TokenHost`."""

    def submit(self, request: R_contra, receiver: Any) -> None: ...
    def cancel(self, request: R_contra) -> None: ...
    @property
    def info(self) -> EngineInfo: ...
    def stats(self, audio_seconds: float) -> EngineStats: ...
    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class StageDecoder:
    """The codec of a family without its model: decodes the codes of whole utterances."""

    _stage: CodecStage
    sample_rate: int
    #: Makes the codec's initial state from voice codes, int64 [n, codebooks].
    _start: Callable[[Tensor], State] | None = None

    def decode(
        self,
        codes: Codes,
        voice_codes: Codes | None,
        done: Callable[[Samples | NightjarError], None],
    ) -> None:
        """Calls `done` with the samples that the pipeline would make of these codes, see `Speech`, or an error."""
        start = None
        if voice_codes is not None and self._start is not None:
            start = self._start(torch.from_numpy(voice_codes.astype(np.int64)))
        self._stage.decode(codes.astype(np.int64), done, start)

    def close(self) -> None:
        """Frees the stage."""
        self._stage.close()


class SpeechPipeline(ReadsRecordings, Generic[R, O]):
    """The part of `pipelines.request.Pipeline` that families share; a family implements `_prepare`.

    `streamer` makes the receiver of a stream, `utterance` that of a whole utterance.
    """

    name: str
    sample_rate: int
    #: Samples of a frame of codes.
    frame_samples: int = 0
    capabilities: Capabilities
    starts_at_once = False

    def __init__(
        self,
        host: SpeechEngine[R],
        stage: CodecStage,
        streamer: Callable[[O, CodecStage, Listener], Receiver] = Streamer,
        utterance: Callable[[O, CodecStage, Listener], Receiver] = Utterance,
    ) -> None:
        if not stage.decodes:
            self.capabilities = replace(self.capabilities, audio=False, streaming=False)
        self.host = host
        self._stage = stage
        self._streamer = streamer
        self._utterance = utterance
        self._lock = threading.Lock()
        self._audio_seconds = 0.0

    def start(self, request: AnyRequest, on_event: OnEvent, stream: bool = False) -> Handle:
        """Sends a request to the engine; see `Pipeline.start`. `on_event` is called on the codec's threads."""
        check_start(self, request, stream)
        assert isinstance(request, SynthesisRequest), "a family with a frontend has its own `start`"
        return self._begin(*self._prepare(request), on_event, stream, request.output)

    @property
    def info(self) -> EngineInfo:
        """How the engine was opened."""
        return self.host.info

    def stats(self) -> EngineStats:
        return replace(self.host.stats(self._audio_seconds), joules=board_joules())

    def close(self) -> None:
        """Frees the engine; see `Pipeline.close`."""
        self.host.close()
        self._stage.close()

    def _prepare(self, request: SynthesisRequest) -> tuple[R, O]:
        """The engine's request, and the facts for its receiver. Raises `InputError` if the model cannot serve
        it."""
        raise NotImplementedError

    def _begin(
        self, wanted: R, info: O, on_event: OnEvent, stream: bool, output: Output = "audio"
    ) -> Listener:
        def on_end(done: bool) -> None:
            with self._lock:
                self._audio_seconds += listener.seconds
            if not done:
                self.host.cancel(receiver.current)
            if isinstance(receiver, Streamer):
                receiver.release()

        listener = Listener(on_event, on_end)
        receiver = (self._streamer if stream else self._utterance)(info, self._stage, listener)
        if isinstance(receiver, Streamer) and self.info.engine == "native":
            # The native engine delivers chunks of the right size for the codec.
            receiver.chunk_frames = ()
        receiver.engine = self.host
        receiver.current = wanted
        receiver.output = output
        receiver.frame_samples = self.frame_samples
        self.host.submit(wanted, receiver)
        return listener
