"""vLLM's asynchronous engine behind threads: a loop of its own, a waiting room, and a new engine core when
the old one dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.options import TokenModelOptions
from pipelines.request import EngineInfo, EngineStats
from pipelines.tokens import TokenReceiver, TokenRequest, Tokens
from pipelines.vllm_engine.core_supervisor import CoreSupervisor
from pipelines.vllm_engine.library import EngineMoment, ModelSpec, load_vllm, on_cpu

log = logging.getLogger(__name__)

_STOP_SECONDS = 30.0
#: Sequences of a dead engine core are ended again after so long: where vLLM asks the core something, it is
#: never answered.
_AGAIN_SECONDS = 2.0
#: Requests that wait behind the running ones on a CPU; on a GPU as many as run.
_CPU_WAITING_ROOM = 64


class VllmHost:
    """Runs sequences that come from any thread on one engine core.

    When the engine core dies, its sequences fail with `synth.engine`, which is worth another try, and a
    new one is started as soon as the old one is gone; meanwhile `submit` waits.
    """

    def __init__(self, spec: ModelSpec, options: TokenModelOptions | None = None) -> None:
        """Starts the engine core.

        Raises `ModelError` (`model.missing_extra`), `SynthesisError` (`synth.engine`), `ConfigError` for
        options that the model cannot run with.
        """
        options = options or TokenModelOptions()
        load_vllm(options.cpu_kv_gib)
        from pipelines.vllm_engine import adapter

        self._adapter = adapter
        self._arguments = adapter.engine_arguments(spec, options)
        self._codes = spec.codes_per_step
        self._extra = spec.extra
        self._moment = EngineMoment()
        slots = self._arguments["max_num_seqs"]
        self._room = slots + (options.waiting_room or (_CPU_WAITING_ROOM if on_cpu() else slots))
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        #: Under way.
        self._tasks: dict[TokenRequest, asyncio.Task[Tokens]] = {}
        self._taken = 0
        self._done = 0
        self._closing = self._stopped = False
        self._core = CoreSupervisor(
            partial(adapter.start_engine, self._arguments, self._moment), self._changed, self._end_users
        )
        #: Sequences on the engine core whose receivers have not heard of their end; and those of them whose
        #: core is dead.
        self._users: set[asyncio.Task[Tokens]] = set()
        self._lost: set[asyncio.Task[Tokens]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm-host", daemon=True)
        self._thread.start()
        try:
            self._start()
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
        slots = self._arguments["max_num_seqs"]
        kv_pages, page_size = self._adapter.kv_sizes(self._core.llm)
        return EngineInfo(
            slots=slots,
            waiting_room=self._room - slots,
            device=self._adapter.device_name(),
            dtype=self._arguments["dtype"],
            executor=f"vllm {'eager' if self._arguments['enforce_eager'] else 'graph'}",
            kv_pages=kv_pages,
            page_size=page_size,
            max_context=self.max_context,
            reproducible=False,
            engine="vllm",
        )

    def submit(self, request: TokenRequest, receiver: TokenReceiver) -> None:
        """Queues a sequence; blocks while the waiting room is full or a new engine core starts (never on
        the host's own loop).

        Raises `SynthesisError`: `synth.aborted` once the host is closed, `synth.engine` when it has given
        up on the engine.
        """
        with self._changed:
            self._changed.wait_for(self._may_enter)
            if self._closing:
                raise _closed()
            if self._core.failure is not None:
                raise self._core.failure
            self._taken += 1
            self._loop.call_soon_threadsafe(self._enter, request, receiver)

    def cancel(self, request: TokenRequest) -> None:
        """Ends this one sequence; its receiver hears `synth.aborted`. Does nothing when it is over."""

        def cancel() -> None:
            if (task := self._tasks.get(request)) is not None:
                task.cancel()

        with self._changed:
            if not self._stopped:
                self._loop.call_soon_threadsafe(cancel)

    def stats(self, audio_seconds: float = 0.0) -> EngineStats:
        with self._changed:
            under_way, done = self._taken, self._done
        running = min(self._moment.running, under_way)
        return EngineStats(
            running,
            under_way - running,
            done,
            self._moment.tokens,
            audio_seconds,
            self._moment.kv_use,
            self._core.state,
        )

    def close(self) -> None:
        """Ends the engine core and the loop; sequences under way fail with `synth.aborted`. May be called
        more than once."""
        with self._changed:
            first, self._closing = not self._closing, True
            self._core.close()
            self._changed.notify_all()
        if threading.current_thread() is self._thread:
            raise RuntimeError("the host cannot be closed on its own loop")
        if first:
            self._wait(self._stop())
            with self._changed:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)

    def _run_loop(self) -> None:
        # Ctrl-C goes to every process of a terminal's group; the engine core inherits this mask and lives
        # until we have drained.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _may_enter(self) -> bool:
        if self._closing or self._core.failure is not None:
            return True
        if threading.current_thread() is self._thread:
            return True
        return self._core.llm is not None and self._taken < self._room

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _start(self) -> None:
        try:
            self._wait(self._core.start())
        except NightjarError:
            raise
        except Exception as error:
            message = f"vLLM did not start: {type(error).__name__}: {error}."
            raise SynthesisError(
                ErrorCode.SYNTH_ENGINE, message, "See the log above; the model may need fewer max_sequences."
            ) from error

    def _enter(self, request: TokenRequest, receiver: TokenReceiver) -> None:
        self._tasks[request] = task = self._loop.create_task(self._sequence(request, receiver))
        # A task that is cancelled before its first step runs no line of its own: what must happen at the end
        # happens here.
        task.add_done_callback(lambda task: self._ended(task, request, receiver))

    def _ended(self, task: asyncio.Task[Tokens], request: TokenRequest, receiver: TokenReceiver) -> None:
        """Frees the room of a sequence and tells its receiver, however it ended."""
        outcome: Tokens | NightjarError
        if task in self._lost:
            outcome = _died()
        elif task.cancelled():
            outcome = (
                _closed()
                if self._closing
                else SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.")
            )
        elif (error := task.exception()) is not None:
            outcome = _failure(error)
        else:
            outcome = task.result()
        del self._tasks[request]
        self._users.discard(task)
        self._lost.discard(task)
        with self._changed:
            self._taken -= 1
            self._done += 1
            if isinstance(outcome, Tokens):
                self._core.proved()
            self._changed.notify_all()
        _tell(receiver, outcome)

    async def _sequence(self, request: TokenRequest, receiver: TokenReceiver) -> Tokens:
        llm = await self._core.living()
        task, number = asyncio.current_task(), next(self._numbers)
        assert task is not None
        self._users.add(task)
        try:
            main = self._collect(llm, f"{request.request_id}#{number}", request, receiver)
            if request.shadow is None:
                return await main
            return await self._paired(
                main, self._follow(llm, f"{request.shadow.request_id}#{number}s", request.shadow)
            )
        except Exception:
            if not llm.errored:
                raise
            self._core.mark_dead(llm)
            raise _died() from None

    async def _paired(self, main: Coroutine[Any, Any, Tokens], shadow: Coroutine[Any, Any, None]) -> Tokens:
        """The tokens of `main`; both sequences end when either fails or is cancelled, or when `main` is
        over."""
        first, second = self._loop.create_task(main), self._loop.create_task(shadow)
        try:
            await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
            if second.done():
                second.result()
            return await first
        finally:
            await _cancelled((first, second))

    async def _collect(self, llm: Any, name: str, request: TokenRequest, receiver: TokenReceiver) -> Tokens:
        ids: list[int] = []
        codes: list[NDArray[np.int64]] = []
        finish = None
        async for output in self._generate(llm, name, request, receiver.streamed):
            part = output.outputs[0]
            new = list(part.token_ids)
            finish = part.finish_reason
            if not new:
                continue
            ids += new
            new_codes = self._adapter.codes_of(part.logprobs, len(new), self._codes)
            if new_codes is not None:
                codes.append(new_codes)
            if receiver.streamed:
                receiver.tokens(new, new_codes)
        if finish not in ("stop", "length"):
            raise SynthesisError(
                ErrorCode.SYNTH_ENGINE,
                f"The engine ended the sequence with {finish!r}.",
                "The request may be tried again.",
            )
        return Tokens(ids, finish, np.concatenate(codes) if codes else None)

    async def _follow(self, llm: Any, name: str, shadow: TokenRequest) -> None:
        """A sequence whose tokens nobody waits for."""
        async for _ in self._generate(llm, name, shadow, streamed=False):
            continue

    def _generate(self, llm: Any, name: str, request: TokenRequest, streamed: bool) -> AsyncGenerator[Any]:
        extra = {**request.extra, **(self._extra(request) if self._extra is not None else {})}
        parameters = self._adapter.sampling_params(request, self._codes, streamed, extra)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        return llm.generate(prompt, parameters, name)

    async def _end_users(self) -> None:
        """Ends every sequence of a dead engine core. What is over already cannot be ended, and is no loss."""
        self._lost |= self._users
        while users := set(self._users):
            for task in users:
                task.cancel()
            await asyncio.wait(users, timeout=_AGAIN_SECONDS)

    async def _stop(self) -> None:
        await _cancelled(self._tasks.values())
        self._core.shut_down()
        await _cancelled(task for task in asyncio.all_tasks() if task is not asyncio.current_task())


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Ends tasks, and waits until they are over."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def _closed() -> SynthesisError:
    """What the sequences of a closed host hear."""
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed.")


def _died() -> SynthesisError:
    """What the sequences of a dead engine core hear."""
    return SynthesisError(
        ErrorCode.SYNTH_ENGINE, "vLLM's engine core died.", "The request may be tried again."
    )


def _failure(error: BaseException) -> NightjarError:
    """Any error of a sequence in our words."""
    if isinstance(error, NightjarError):
        return error
    if isinstance(error, ValueError):
        return SynthesisError(
            ErrorCode.SYNTH_ENGINE,
            f"vLLM refused the request: {error}.",
            "Shorten it, or open the model with more.",
        )
    log.error("a sequence failed", exc_info=error)
    return SynthesisError(
        ErrorCode.SYNTH_ENGINE, f"vLLM failed: {type(error).__name__}: {error}.", "See the log."
    )


def _tell(receiver: TokenReceiver, outcome: Tokens | NightjarError) -> None:
    """A receiver that raises must not end the loop's work."""
    try:
        if isinstance(outcome, Tokens):
            receiver.finished(outcome)
        else:
            receiver.failed(outcome)
    except Exception:
        log.exception("a receiver of the engine failed")
