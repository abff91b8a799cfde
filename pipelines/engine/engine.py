"""The engine's thread: a bounded waiting room in front of `EngineCore`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kernels.registry import on_device
from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineCore, EngineOptions, engine_failure
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.scheduler import FrameReceiver, GenerationRequest
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.nn.checkpoint import device_name, type_name
from pipelines.request import EngineInfo, EngineStats

log = logging.getLogger(__name__)

#: A tenth of what a frame of a large batch takes.
_REST_SECONDS = 0.001
#: How long nothing is to do before the executor prepares for later batches: a request waits for one such step
#: at most.
_IDLE_SECONDS = 1.0


#: In the order in which it came: requests, and what is to be done for earlier ones, such as text for them, or
#: their end.
Inbox = list[tuple[GenerationRequest, FrameReceiver] | Callable[[], None]]


class Engine:
    """Runs requests that come from any thread on one thread of its own.

    While the codec's stage, its `follower`, is behind, whole utterances rest: a frame of a full batch
    costs the device no more than one of a batch that empties because its requests are still being followed
    up, and meanwhile the device decodes alone. Streams go on.
    """

    def __init__(
        self,
        executor: FrameExecutor,
        options: EngineOptions,
        waiting_room: int = 64,
        follower: CodecStage[Any] | None = None,
    ) -> None:
        self.core = EngineCore(executor, options)
        self._inbox: Inbox = []
        self._wake = threading.Condition()
        self._room = waiting_room
        self._follower = follower
        self._waiting = 0
        self._closing = False
        self._preparing = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, receiver: FrameReceiver) -> None:
        """Queues a request; blocks while the waiting room is full (never on the engine's own thread or its
        follower's, which empty it).

        A stream takes no place there and never blocks: whoever asks for streams bounds them.

        Raises `SynthesisError`: `synth.oom` for a request that can never fit, `synth.aborted` once the
        engine is closed.
        """
        self.core.check(request)
        with self._wake:
            inside = threading.current_thread() is self._thread or (
                self._follower is not None and self._follower.is_current
            )
            while (
                not (request.stream or inside or self._closing)
                and self._waiting + _whole(self._inbox) >= self._room
            ):
                self._wake.wait()
            if self._closing:
                raise _closed()
            self._inbox.append((request, receiver))
            self._wake.notify_all()

    def append(self, request: GenerationRequest, ids: Sequence[int], final: bool) -> None:
        """Adds text to a request that was submitted with open text; see `EngineCore.append`. Never waits."""
        self._call(partial(self.core.append, request, ids, final))

    def cancel(self, request: object) -> None:
        """Ends this one request, or the one of this origin; its receiver hears `synth.aborted`. Does
        nothing when it is over."""
        self._call(partial(self.core.abort, request))

    @property
    def info(self) -> EngineInfo:
        """Sizes of the engine and how it runs a frame."""
        executor, options = self.core.executor, self.core.options
        return EngineInfo(
            slots=options.slots,
            waiting_room=self._room,
            device=device_name(executor.kv.k.device),
            dtype=type_name(executor.kv.k.dtype),
            executor=executor.name,
            kernels=executor.kernels + (", packed prefill" if executor.packed else ""),
            kv_pages=executor.kv.pages,
            page_size=executor.kv.page_size,
            max_context=options.max_context,
            reproducible=executor.reproducible,
            engine="native",
        )

    def stats(self, audio_seconds: float = 0.0) -> EngineStats:
        scheduler, slots = self.core.scheduler, self.core.options.slots
        running = len(scheduler.running)
        with self._wake:
            waiting = self._waiting + len(scheduler.waiting_streams) + len(_requests(self._inbox))
        return EngineStats(
            # Those that start again are under way: they take no place in the waiting room. Those in spare
            # slots wait for a row.
            running=min(running, slots) + scheduler.returned,
            waiting=waiting + max(running - slots, 0),
            requests_done=self.core.requests_done,
            frames=self.core.frames_made,
            audio_seconds=audio_seconds,
            kv_use=1 - scheduler.prefixes.free / scheduler.kv.pages,
        )

    def close(self) -> None:
        """Ends the thread; requests in flight fail with `synth.aborted`. May be called more than once."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, call: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(call)
            self._wake.notify_all()

    def _run(self) -> None:
        executor = self.core.executor
        with on_device(executor.kv.k.device), torch.cuda.stream(executor.stream):
            self._loop()

    def _loop(self) -> None:
        while True:
            with self._wake:
                idle = not self._has_work and not self._wake.wait_for(
                    lambda: self._has_work, _IDLE_SECONDS if self._preparing else None
                )
                while self._rests:
                    self._wake.wait(_REST_SECONDS)
                if self._closing:
                    break
                arrived, self._inbox = self._inbox, []
                self._waiting += _whole(arrived)
            if idle and not arrived:
                self._prepare()
            else:
                self._turn(arrived)
        self._stop()

    @property
    def _behind(self) -> bool:
        return self._follower is not None and self._follower.behind

    @property
    def _rests(self) -> bool:
        """Whether all that could be done is batch work, and that waits for the follower."""
        urgent = self._closing or self.core.has_streams or len(self._inbox) > _whole(self._inbox)
        return not urgent and self._behind

    @property
    def _has_work(self) -> bool:
        return bool(self._inbox or self._closing or not self.core.idle)

    def _prepare(self) -> None:
        try:
            self._preparing = self.core.executor.prepare()
        except Exception:
            log.exception("the executor could not prepare for later batches")
            self._preparing = False

    def _turn(self, arrived: Inbox) -> None:
        for one in arrived:
            if callable(one):
                one()
            else:
                self.core.add(*one)
        worked = True
        try:
            worked = self.core.step(not self._behind)
        except Exception as error:
            log.exception("a turn of the engine failed")
            self.core.fail_all(engine_failure(error))
        with self._wake:
            self._waiting = len(self.core.scheduler.waiting) - self.core.scheduler.returned
            self._wake.notify_all()
            if not (worked or self._inbox or self._closing):
                self._wake.wait(_REST_SECONDS)

    def _stop(self) -> None:
        self.core.fail_all(_closed())
        with self._wake:
            left, self._inbox = self._inbox, []
            self._wake.notify_all()
        for _, receiver in _requests(left):
            receiver.failed(_closed())


def _requests(inbox: Inbox) -> list[tuple[GenerationRequest, FrameReceiver]]:
    return [one for one in inbox if isinstance(one, tuple)]


def _whole(inbox: Inbox) -> int:
    """How many whole utterances came."""
    return sum(not request.stream for request, _ in _requests(inbox))


def _closed() -> SynthesisError:
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed.")
