"""What every pipeline with an engine and a codec's stage does alike: who waits for which request, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from pipelines.delivery.speech import Order, Settled, Streamer, Utterer
from pipelines.engine.codec_stage import CodecStage
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import AudioChunk, EngineStats, Speech, SynthesisRequest


class EngineRequest(Protocol):
    @property
    def request_id(self) -> str: ...


R = TypeVar("R", bound=EngineRequest)
R_contra = TypeVar("R_contra", bound=EngineRequest, contravariant=True)
O = TypeVar("O", bound=Order)  # noqa: E741


class SpeechEngine(Protocol[R_contra]):
    """What both engines offer, `pipelines.engine.engine.Engine` and `pipelines.vllm_engine.host.VllmHost`."""

    def submit(self, request: R_contra, receiver: Any) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def cancel(self, request: R_contra) -> None: ...
    def stats(self, audio_seconds: float) -> EngineStats: ...
    def close(self) -> None: ...


class SpeechPipeline(Generic[R, O]):
    """The part of `pipelines.request.Pipeline` that is the same in every family; a family has its own `_prepare`.

    `utterer` and `streamer` make the engine's receivers of one order, with the stage and the word that the request is over.
    """

    def __init__(
        self,
        engine: SpeechEngine[R],
        stage: CodecStage[Any],
        utterer: Callable[[O, CodecStage[Any], Settled], Utterer[Any]],
        streamer: Callable[[O, CodecStage[Any], Settled], Streamer[Any]],
    ) -> None:
        self._engine = engine
        self._stage = stage
        self._utterer = utterer
        self._streamer = streamer
        self._receivers: dict[str, list[Utterer[Any] | Streamer[Any]]] = {}
        self._lock = threading.Lock()
        self._audio_seconds = 0.0

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        """Queues a request; see `Pipeline.submit`."""
        wanted, order = self._prepare(request)
        utterer = self._utterer(order, self._stage, lambda seconds: self._forget(wanted, utterer, seconds))
        self._send(wanted, utterer)
        return utterer.future

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        """Audio as it is made; the first `next` queues the request, closing the iterator ends it. See `Pipeline.stream`."""
        return self._chunks(*self._prepare(request))

    def abort(self, request_id: str) -> None:
        """Ends a request; see `Pipeline.abort`."""
        with self._lock:
            receivers = self._receivers.pop(request_id, [])
        for receiver in receivers:
            receiver.failed(SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))
        self._engine.abort(request_id)

    def stats(self) -> EngineStats:
        return self._engine.stats(self._audio_seconds)

    def close(self) -> None:
        """Frees the engine; see `Pipeline.close`."""
        self._engine.close()
        self._stage.close()

    def _prepare(self, request: SynthesisRequest) -> tuple[R, O]:
        """The engine's request and what its receivers must know. Raises `InputError` for what this model cannot do."""
        raise NotImplementedError

    def _chunks(self, wanted: R, order: O) -> Iterator[AudioChunk]:
        streamer = self._streamer(order, self._stage, lambda seconds: self._forget(wanted, streamer, seconds))
        self._send(wanted, streamer)
        try:
            yield from streamer.chunks()
        finally:
            self._engine.cancel(wanted)

    def _send(self, wanted: R, receiver: Utterer[Any] | Streamer[Any]) -> None:
        with self._lock:
            self._receivers.setdefault(wanted.request_id, []).append(receiver)
        try:
            self._engine.submit(wanted, receiver)
        except BaseException:
            self._forget(wanted, receiver, 0.0)
            raise
        with self._lock:
            gone = receiver not in self._receivers.get(wanted.request_id, ())
        if gone:  # aborted while it waited for room
            self._engine.cancel(wanted)

    def _forget(self, wanted: R, receiver: Utterer[Any] | Streamer[Any], seconds: float) -> None:
        with self._lock:
            self._audio_seconds += seconds
            left = [one for one in self._receivers.pop(wanted.request_id, []) if one is not receiver]
            if left:
                self._receivers[wanted.request_id] = left
