"""The engine's thread with its bounded waiting room, and a host that runs token sequences on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kernels.registry import on_device
from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineCore, EngineOptions, engine_failure
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.scheduler import Finish, FrameReceiver, GenerationRequest, PromptPrefix
from pipelines.engine.state import SamplingParams
from pipelines.errors import engine_closed
from pipelines.nn.checkpoint import device_name, type_name
from pipelines.request import EngineInfo, EngineStats, FloatArray, IntArray
from pipelines.results import Receiver
from pipelines.tokens import TokenPrompt, TokenRequest, Tokens

log = logging.getLogger(__name__)

#: Seconds between two checks while the engine's thread waits: a tenth of the time of a large batch's frame.
_REST_SECONDS = 0.001
#: Seconds that the engine is idle before the executor prepares for later batches. A request waits for at most
#: one such step.
IDLE_SECONDS = 1.0


class _NoStage:
    """Stands for the stage of an engine without a codec."""

    is_backlogged = is_current = False


class Engine:
    """Runs requests from any thread on its own thread.

    While the codec's `stage` is backlogged, whole utterances pause and only streams run: the device decodes
    without competition, and later frames run in fuller batches, which cost no more.
    """

    def __init__(
        self,
        executor: FrameExecutor,
        options: EngineOptions,
        waiting_room: int = 64,
        stage: CodecStage | None = None,
        codec: str = "",
    ) -> None:
        """`codec`: how the codec differs from the default, for `info`."""
        self.core = EngineCore(executor, options)
        self._device = device_name(executor.kv.k.device)
        self._dtype = type_name(executor.kv.k.dtype)
        #: New requests, the number of whole utterances among them, and calls for earlier requests, such as
        #: more text or a cancellation.
        self._arrived = list[tuple[GenerationRequest, FrameReceiver]]()
        self._arrived_whole = 0
        self._calls = list[Callable[[], None]]()
        self._wake = threading.Condition(lock := threading.RLock())
        #: The callers that wait for a place in the waiting room, of which only as many wake as there are places.
        self._places = threading.Condition(lock)
        self._room = waiting_room
        self._stage = stage or _NoStage()
        self._codec = codec
        self._waiting = 0
        self.closing = False
        self._preparing = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, receiver: FrameReceiver) -> None:
        """Queues a request; blocks while the waiting room is full, except on the threads of the engine and of
        its stage, which empty it.

        A stream takes no place in the waiting room and never blocks; callers limit their streams.

        Raises `SynthesisError`: `synth.oom` for a request that can never fit, `synth.aborted` once the
        engine is closed.
        """
        self.core.check(request)
        with self._wake:
            self._places.wait_for(
                lambda: (
                    request.stream
                    or self.closing
                    or self._waiting + self._arrived_whole < self._room
                    or threading.current_thread() is self._thread
                    or self._stage.is_current
                )
            )
            if self.closing:
                raise engine_closed()
            self._arrived.append((request, receiver))
            self._arrived_whole += not request.stream
            self._wake.notify_all()

    def append(self, request: GenerationRequest, ids: Sequence[int], final: bool) -> None:
        """Adds text to a request with open text; see `EngineCore.append`. Never blocks."""
        self._call(partial(self.core.append, request, ids, final))

    def cancel(self, request: object) -> None:
        """Ends this request, or the one with this origin; it fails with `synth.aborted`. Does nothing after
        its end."""
        self._call(partial(self.core.abort, request))

    @property
    def info(self) -> EngineInfo:
        """The engine's sizes and executor, which can change while it runs."""
        executor = self.core.executor
        options = self.core.options
        packed = ", packed prefill" if executor.packed else ""
        return EngineInfo(
            slots=options.slots,
            waiting_room=self._room,
            device=self._device,
            dtype=self._dtype,
            executor=executor.name,
            kernels=executor.kernels + packed + (f", {self._codec}" if self._codec else ""),
            kv_pages=executor.kv.pages,
            page_size=executor.kv.page_size,
            max_context=min(executor.kv.pages * executor.kv.page_size, options.max_context),
            reproducible=executor.reproducible,
            engine="native",
        )

    def stats(self, audio_seconds: float = 0.0) -> EngineStats:
        scheduler = self.core.scheduler
        slots = self.core.options.slots
        running = len(scheduler.running)
        with self._wake:
            waiting = self._waiting + len(scheduler.waiting_streams) + len(self._arrived)
        return EngineStats(
            # Preempted requests count as running, since they take no place in the waiting room; requests in
            # spare slots wait for a row.
            running=min(running, slots) + scheduler.preempted,
            waiting=waiting + max(running - slots, 0),
            requests_done=self.core.requests_done,
            frames=self.core.frames_made,
            audio_seconds=audio_seconds,
            kv_use=1 - scheduler.prefixes.free / scheduler.kv.pages,
        )

    def close(self) -> None:
        """Ends the thread; requests in flight fail with `synth.aborted`. May be called more than once."""
        with self._wake:
            self.closing = True
            self._wake.notify_all()
            self._places.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, call: Callable[[], None]) -> None:
        with self._wake:
            self._calls.append(call)
            self._wake.notify_all()

    def _run(self) -> None:
        executor = self.core.executor
        with on_device(executor.kv.k.device), torch.cuda.stream(executor.stream):
            while self._run_once():
                continue
        self.core.fail_all(engine_closed())
        with self._wake:
            left = self._arrived
            self._arrived = []
        for _, receiver in left:
            receiver.failed(engine_closed())

    def _run_once(self) -> bool:
        """Runs one turn, or prepares for later ones while idle. Returns False when the engine is closing."""
        with self._wake:
            idle = not self._wake.wait_for(
                lambda: self._arrived or self._calls or self.closing or not self.core.idle,
                IDLE_SECONDS if self._preparing else None,
            )
            # Whole utterances alone wait for the stage.
            while self._stage.is_backlogged and not (
                self.closing
                or self._calls
                or self.core.has_streams
                or len(self._arrived) > self._arrived_whole
            ):
                self._wake.wait(_REST_SECONDS)
            if self.closing:
                return False
            arrived = self._arrived
            calls = self._calls
            self._arrived = []
            self._calls = []
            self._waiting += self._arrived_whole
            self._arrived_whole = 0
        if idle and not (arrived or calls):
            self._prepare()
            return True
        for one in arrived:
            self.core.add(*one)
        for call in calls:
            call()
        worked = True
        try:
            worked = self.core.step(not self._stage.is_backlogged)
        except Exception as error:
            log.exception("a turn of the engine failed")
            self.core.fail_all(engine_failure(error))
        with self._wake:
            self._waiting = len(self.core.scheduler.waiting) - self.core.scheduler.preempted
            self._places.notify(max(self._room - self._waiting - self._arrived_whole, 0))
            if not (worked or self._arrived or self._calls or self.closing):
                self._wake.wait(_REST_SECONDS)
        return True

    def _prepare(self) -> None:
        try:
            self._preparing = self.core.executor.prepare()
        except Exception:
            log.exception("the executor could not prepare for later batches")
            self._preparing = False


@dataclass(eq=False)
class NativeHost:
    """A `pipelines.tokens.TokenHost` over `Engine`.

    A code is a row of the model's head, and `ids` [codes] has the id of each. A sequence has the ids that vLLM
    returns for the same draws, without the id that ended it. If a frame has several codebooks, the codes of a
    step are its id, then those of all codebooks.
    """

    _engine: Engine
    _ids: IntArray
    #: Returns the prefixes that a prompt can share with others.
    _prefixes: Callable[[TokenPrompt], Sequence[PromptPrefix]] = lambda _: ()
    #: Number of codebooks of a frame.
    _codebooks: int = 1

    def __post_init__(self) -> None:
        #: The codes of ids, for the repetition penalty of ids in a prompt.
        self._codes = {int(token): code for code, token in enumerate(self._ids.tolist())}
        self.close = self._engine.close
        self.cancel = self._engine.cancel
        self.stats = self._engine.stats

    @property
    def info(self) -> EngineInfo:
        """The engine's sizes and executor."""
        return self._engine.info

    def submit(self, request: TokenRequest, receiver: Receiver) -> None:
        """Queues a sequence; see `pipelines.tokens.TokenHost`. A receiver may call it, and a stream never
        blocks.

        The sequence ends at the model's end codes and ignores stop ids and the shadow. Raises
        `SynthesisError` like `Engine.submit`.
        """
        sampling = request.sampling
        # The engine's last draw only decides whether the sequence has ended.
        draws = sampling.max_tokens + 1
        counted = set(request.prompt.ids) if sampling.repetition_penalty != 1 else set[int]()
        wanted = GenerationRequest(
            request_id=request.request_id,
            prompt=request.prompt,
            # All codebooks are drawn with the same settings.
            sampling=SamplingParams(
                sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty,
                sampling.temperature, sampling.top_k, sampling.top_p, min_new_tokens=draws if sampling.ignore_end else 0,
            ),
            seed=sampling.seed,
            max_tokens=draws,
            stream=receiver.streamed,
            inaudible=request.inaudible,
            drawn=[self._codes[token] for token in counted if token in self._codes],
            prefixes=self._prefixes(request.prompt),
            origin=request,
            longest=request.longest,
        )  # fmt: skip
        self._engine.submit(wanted, _Receiver(receiver, self, sampling.max_tokens))

    def tokens_of(self, codes: IntArray) -> tuple[list[int], IntArray | None]:
        """The ids of frames [frames, codebooks], and the codes of their steps."""
        frames = codes if len(codes) else codes.reshape(0, self._codebooks)
        ids = self._ids[frames[:, 0]]
        return ids.tolist(), None if self._codebooks == 1 else np.concatenate((ids[:, None], frames), axis=1)


class _Receiver:
    """Converts the frames of a request to tokens for a receiver."""

    def __init__(self, receiver: Receiver, host: NativeHost, max_tokens: int) -> None:
        self._receiver = receiver
        self._tokens_of = host.tokens_of
        self._max_tokens = max_tokens
        self._passed = 0
        self.failed = receiver.failed

    def frames(self, codes: IntArray) -> None:
        self._passed += len(codes)
        self._receiver.tokens(*self._tokens_of(codes))

    def finished(self, codes: IntArray, finish: Finish, log_probabilities: FloatArray) -> None:
        if self._receiver.streamed and len(codes) > self._passed:
            self.frames(codes[self._passed :])
        ids, columns = self._tokens_of(codes)
        end = "length" if len(ids) == self._max_tokens else "stop"
        self._receiver.finished(Tokens(ids, end, columns, log_probabilities))
