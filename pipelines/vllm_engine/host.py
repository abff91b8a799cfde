"""vLLM's asynchronous engine behind threads: an event loop of its own, and a waiting room."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import EngineCrashError, ErrorCode, NightjarError, SynthesisError
from pipelines.options import TokenModelOptions
from pipelines.request import EngineInfo, EngineStats
from pipelines.tokens import TokenReceiver, TokenRequest, Tokens
from pipelines.vllm_engine.library import ModelSpec, load_vllm, on_cpu

log = logging.getLogger(__name__)

_STOP_SECONDS = 30.0
#: Between looks at the engine core.
_LOOK_SECONDS = 0.25
#: Requests that wait behind the running ones on a CPU; on a GPU as many as run.
_CPU_WAITING_ROOM = 64


class VllmHost:
    """Runs sequences that come from any thread on one engine core.

    When the engine core dies, its sequences and all later ones fail with `worker.crash`, and `stats` says
    `broken`: who opened the model opens it again.
    """

    def __init__(self, spec: ModelSpec, options: TokenModelOptions | None = None) -> None:
        """Starts the engine core.

        Raises `ModelError` (`model.missing_extra`), `SynthesisError` (`synth.engine`), `ConfigError` for
        options that the model cannot run with.
        """
        options = options or TokenModelOptions()
        load_vllm(options.cpu_kv_gib)
        from pipelines.vllm_engine import adapter

        self._adapter, self._spec = adapter, spec
        self._arguments = adapter.engine_arguments(spec, options)
        self._moment = adapter.EngineMoment()
        slots = self._arguments["max_num_seqs"]
        self._room = slots + (options.waiting_room or (_CPU_WAITING_ROOM if on_cpu() else slots))
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        #: Under way.
        self._tasks: dict[TokenRequest, asyncio.Task[Tokens]] = {}
        self._taken = self._done = 0
        self._closing = False
        self._llm: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm-host", daemon=True)
        self._thread.start()
        try:
            self._wait(self._start())
        except BaseException:
            self.close()
            raise

    @property
    def max_context(self) -> int:
        """Positions of a sequence: prompt and new tokens."""
        return self._arguments["max_model_len"]

    @property
    def info(self) -> EngineInfo:
        """Sizes of the engine and how it runs a step."""
        slots, cache = self._arguments["max_num_seqs"], self._llm.vllm_config.cache_config
        return EngineInfo(
            slots=slots,
            waiting_room=self._room - slots,
            device=self._adapter.device_name(),
            dtype=self._arguments["dtype"],
            executor=f"vllm {'eager' if self._arguments['enforce_eager'] else 'graph'}",
            kv_pages=cache.num_gpu_blocks or 0,
            page_size=cache.block_size or 0,
            max_context=self.max_context,
            reproducible=False,
            engine="vllm",
        )

    def submit(self, request: TokenRequest, receiver: TokenReceiver) -> None:
        """Queues a sequence; blocks while the waiting room is full (never on the host's own loop).

        Raises `SynthesisError` (`synth.aborted`) once the host is closed, `EngineCrashError` once its
        engine core is dead.
        """
        inside = threading.current_thread() is self._thread
        with self._changed:
            self._changed.wait_for(
                lambda: inside or self._closing or self._llm.errored or self._taken < self._room
            )
            if self._closing:
                raise _closed()
            if self._llm.errored:
                raise _died()
            self._taken += 1
            self._loop.call_soon_threadsafe(self._enter, request, receiver)

    def cancel(self, request: TokenRequest) -> None:
        """Ends this one sequence; its receiver hears `synth.aborted`. Does nothing when it is over."""

        def cancel() -> None:
            if (task := self._tasks.get(request)) is not None:
                task.cancel()

        with suppress(RuntimeError):  # a closed loop has no sequences
            self._loop.call_soon_threadsafe(cancel)

    def stats(self, audio_seconds: float = 0.0) -> EngineStats:
        moment, under_way = self._moment, self._taken
        running = min(moment.running, under_way)
        return EngineStats(
            running,
            under_way - running,
            self._done,
            moment.tokens,
            audio_seconds,
            moment.kv_use,
            "broken" if self._llm.errored else "ready",
        )

    def close(self) -> None:
        """Ends the engine core and the loop; sequences under way fail with `synth.aborted`. May be called
        more than once."""
        with self._changed:
            first, self._closing = not self._closing, True
            self._changed.notify_all()
        if first:
            self._wait(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)

    def _run_loop(self) -> None:
        # Ctrl-C goes to every process of a terminal's group; the engine core inherits this mask and lives
        # until we have drained.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> None:
        try:
            self._llm = self._adapter.start_engine(self._spec, self._arguments, self._moment)
        except NightjarError:
            raise
        except Exception as error:
            message = f"vLLM did not start: {type(error).__name__}: {error}."
            raise SynthesisError(
                ErrorCode.SYNTH_ENGINE, message, "See the log above; the model may need fewer slots."
            ) from error
        self._watch = self._loop.create_task(self._watch_over())

    async def _watch_over(self) -> None:
        """Ends the sequences of a dead engine core again and again: where vLLM asks the core something, it
        is never answered."""
        while not self._llm.errored:
            await asyncio.sleep(_LOOK_SECONDS)
        log.error("vLLM's engine core died")
        while True:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _stop(self) -> None:
        await _cancelled(self._tasks.values())
        if self._llm is not None:
            self._llm.shutdown()
        await _cancelled(task for task in asyncio.all_tasks() if task is not asyncio.current_task())

    def _enter(self, request: TokenRequest, receiver: TokenReceiver) -> None:
        self._tasks[request] = task = self._loop.create_task(self._sequence(request, receiver))
        # A task that is cancelled before its first step runs no line of its own: what must happen at the end
        # happens here.
        task.add_done_callback(lambda task: self._ended(task, request, receiver))

    def _ended(self, task: asyncio.Task[Tokens], request: TokenRequest, receiver: TokenReceiver) -> None:
        """Frees the room of a sequence and tells its receiver, however it ended."""
        error = self._failure(task)
        del self._tasks[request]
        with self._changed:
            self._taken -= 1
            self._done += 1
            self._changed.notify_all()
        try:
            if error is None:
                receiver.finished(task.result())
            else:
                receiver.failed(error)
        except Exception:  # it must not end the loop's work
            log.exception("a receiver of the engine failed")

    def _failure(self, task: asyncio.Task[Tokens]) -> NightjarError | None:
        """Why a sequence has no tokens, in our words."""
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return None
        if self._llm.errored:
            return _died()
        if error is None:
            return (
                _closed()
                if self._closing
                else SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.")
            )
        if isinstance(error, NightjarError):
            return error
        if isinstance(error, ValueError):
            message = f"vLLM refused the request: {error}."
            return SynthesisError(ErrorCode.SYNTH_ENGINE, message, "Shorten it, or open the model with more.")
        log.error("a sequence failed", exc_info=error)
        message = f"vLLM failed: {type(error).__name__}: {error}."
        return SynthesisError(ErrorCode.SYNTH_ENGINE, message, "See the log.")

    async def _sequence(self, request: TokenRequest, receiver: TokenReceiver) -> Tokens:
        name = f"{request.request_id}#{next(self._numbers)}"
        if request.shadow is None:
            return await self._collect(name, request, receiver)
        shadow = f"{name}s"
        prompt, parameters = self._asked(request.shadow, streamed=False)
        try:
            # Nobody takes what it makes.
            await self._llm.add_request(shadow, prompt, parameters)
            return await self._collect(name, request, receiver)
        finally:
            await self._llm.abort(shadow)

    async def _collect(self, name: str, request: TokenRequest, receiver: TokenReceiver) -> Tokens:
        ids: list[int] = []
        codes: list[NDArray[np.int64]] = []
        finish = None
        async for output in self._llm.generate(*self._asked(request, receiver.streamed), name):
            part = output.outputs[0]
            finish = part.finish_reason
            if not (new := list(part.token_ids)):
                continue
            ids += new
            new_codes = self._adapter.codes_of(part.logprobs, len(new), self._spec.codes_per_step)
            if new_codes is not None:
                codes.append(new_codes)
            if receiver.streamed:
                receiver.tokens(new, new_codes)
        if finish not in ("stop", "length"):
            message = f"The engine ended the sequence with {finish!r}."
            raise SynthesisError(ErrorCode.SYNTH_ENGINE, message, "The request may be tried again.")
        return Tokens(ids, finish, np.concatenate(codes) if codes else None)

    def _asked(self, request: TokenRequest, streamed: bool) -> tuple[dict[str, Any], Any]:
        """A sequence as vLLM takes it: its prompt, and how it is drawn."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        return prompt, self._adapter.sampling_params(self._spec, request, streamed)


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Ends tasks, and waits until they are over."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def _closed() -> SynthesisError:
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed.")


def _died() -> EngineCrashError:
    return EngineCrashError(ErrorCode.WORKER_CRASH, "vLLM's engine core died.", "See the log.")
