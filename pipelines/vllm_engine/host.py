"""vLLM's asynchronous engine for callers on any thread: its arguments, an event loop in a thread, and a waiting
room. Written for vLLM 0.32.

Must be imported after `pipelines.vllm_engine.library.load_vllm`.
"""

# vLLM is an extra, so its imports are checked only if it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from pipelines.errors import (
    EngineCrashError,
    ErrorCode,
    NightjarError,
    SynthesisError,
    engine_closed,
    engine_error,
    invalid,
)
from pipelines.options import TokenModelOptions
from pipelines.request import EngineInfo, EngineStats, IntArray
from pipelines.results import Receiver
from pipelines.tasks import cancel
from pipelines.tokens import TokenRequest, Tokens
from pipelines.vllm_engine.library import AT_ONCE, CODE_SPAN, ModelSpec, architecture, on_cpu
from pipelines.vllm_engine.plugin import CONFIG_FORMAT, register

log = logging.getLogger(__name__)

#: Default slots.
_CPU_SEQUENCES = 32
_GPU_SEQUENCES = 512
#: Default tokens of a step. vLLM's own default on a GPU is a quarter of this, with which a burst of requests
#: needs four times as many steps.
_CPU_STEP_TOKENS = 2048
_GPU_STEP_TOKENS = 8192
#: vLLM's default limit of sequences in a CUDA graph; larger steps would be launched from Python.
_GRAPHED_SEQUENCES = 512
#: The largest batch size of a CUDA graph is a multiple of this.
_GRAPH_STEP = 16
#: Maximum time in which the host's thread must end.
_STOP_SECONDS = 30.0
#: Interval of checks of the engine core.
_LOOK_SECONDS = 0.25
#: Default maximum of waiting requests on a CPU; on a GPU it is the number of slots.
_CPU_WAITING_ROOM = 64


def engine_arguments(spec: ModelSpec, options: TokenModelOptions) -> dict[str, Any]:
    """The arguments of `AsyncEngineArgs`. Raises `ConfigError` (`config.invalid`) for options that the model does not
    support."""
    cpu = on_cpu()
    frames = bool(spec.model)
    sequences = options.slots or (_CPU_SEQUENCES if cpu else _GPU_SEQUENCES)
    memory_share, context = spec.chosen(options)
    arguments = {
        "model": str(spec.folder),
        "hf_overrides": {**spec.config},
        "skip_tokenizer_init": True,
        "dtype": options.dtype or ("float32" if cpu else "bfloat16"),
        "max_num_seqs": sequences,
        "max_model_len": context,
        "tensor_parallel_size": options.tensor_parallel,
        "enforce_eager": cpu if options.eager is None else options.eager,
        "enable_prefix_caching": not cpu if spec.share_prefixes is None else spec.share_prefixes,
        "enable_log_requests": False,
        "trust_remote_code": False,
        "async_scheduling": not cpu,
        "max_num_batched_tokens": _step_tokens(spec, options, cpu, sequences, context),
    }
    if cpu:
        arguments["disable_custom_all_reduce"] = True
        if not frames:
            # A prompt with a seed must not be split: the V1 runner would then rewind a generator, which only
            # CUDA supports.
            arguments["enable_chunked_prefill"] = False
    elif sequences > _GRAPHED_SEQUENCES:
        arguments["max_cudagraph_capture_size"] = -(-sequences // _GRAPH_STEP) * _GRAPH_STEP
    if memory_share is not None:
        arguments["gpu_memory_utilization"] = memory_share
    if spec.codes_per_step > 1:
        arguments["max_logprobs"] = spec.codes_per_step
    if frames:
        arguments |= {
            "config_format": CONFIG_FORMAT,
            "hf_overrides": {**spec.config, "architectures": [architecture(spec.model)]},
            "enable_batch_sharded_sampling": False,
        }
        if not cpu:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    arguments |= spec.engine
    kind = "AsyncGroupScheduler" if arguments["async_scheduling"] else "GroupScheduler"
    arguments.setdefault("scheduler_cls", f"pipelines.vllm_engine.scheduler.{kind}")
    register()
    return arguments


def _step_tokens(spec: ModelSpec, options: TokenModelOptions, cpu: bool, sequences: int, context: int) -> int:
    """Maximum tokens of a step. Raises `ConfigError` (`config.invalid`) for fewer than one per sequence, or
    fewer than a whole prompt if prompts must not be split."""
    if spec.pairs:
        # A step must have room for both whole prompts of a pair, beside all running sequences.
        return max(options.step_tokens or _GPU_STEP_TOKENS, 2 * context + sequences)
    # Split prompts round differently: on a CPU a step has room for a whole prompt beside all running sequences.
    tokens = options.step_tokens or (
        max(_CPU_STEP_TOKENS, context) + sequences if cpu else max(_GPU_STEP_TOKENS, sequences)
    )
    min_tokens = max(sequences, context) if cpu and not spec.model else sequences
    if tokens < min_tokens:
        raise invalid(
            f"{tokens} tokens per step are fewer than the {min_tokens} that this model needs.",
            "Raise step_tokens, or lower slots or max_context.",
        )
    return tokens


@dataclass(slots=True)
class EngineMoment(StatLoggerBase):
    """The latest statistics of the engine; vLLM's own metrics are kept too."""

    running: int = 0
    kv_use: float = 0.0
    tokens: int = 0
    #: Totals since the start: preempted requests, steps, and sequences summed over the steps.
    preemptions: int = 0
    steps: int = 0
    sequence_steps: int = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.steps += 1
            self.running = scheduler_stats.num_running_reqs
            self.sequence_steps += self.running
            self.kv_use = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Does nothing."""


def start_engine(spec: ModelSpec, arguments: dict[str, Any], moment: EngineMoment) -> AsyncLLM:
    """Starts an engine core in its own process. Must be called in the event loop that will serve it.

    Raises `ConfigError` (`config.invalid`) if frames cannot be drawn, which an engine core would only log.
    """
    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    if spec.model and not config.use_v2_model_runner:
        raise invalid(
            "This model needs vLLM's V2 model runner, which needs Triton and must not be switched off.",
            "Set SPEECH_ENGINE__KIND to native, or unset it.",
        )
    return AsyncLLM.from_vllm_config(config, stat_loggers=[lambda *_: moment])


def sampling_params(spec: ModelSpec, request: TokenRequest, streamed: bool) -> SamplingParams:
    """vLLM's sampling of a sequence, with the data for Nightjar's samplers and schedulers."""
    sampling = request.sampling
    extra = {**request.extra}
    if spec.prompt_extra is not None:
        extra |= spec.prompt_extra(request.prompt)
    if streamed:
        extra[AT_ONCE] = True
    with_codes = spec.codes_per_step > 1 and request.codes
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=sampling.ignore_end,
        detokenize=False,
        # The ids of "likely tokens" carry the further codes of a step.
        logprobs=spec.codes_per_step - 1 if with_codes else None,
        flat_logprobs=with_codes,
        extra_args=extra or None,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )


def codes_of(logprobs: Any, steps: int, codes_per_step: int) -> IntArray | None:
    """int64 [steps, codes_per_step] from the flat log probabilities of an output (see `CODE_SPAN`); None if
    they were not requested."""
    if codes_per_step == 1 or logprobs is None:
        return None
    rows = [
        logprobs.token_ids[start:end][:codes_per_step]
        for start, end in zip(logprobs.start_indices, logprobs.end_indices)
    ]
    return np.array(rows, dtype=np.int64).reshape(steps, codes_per_step) % CODE_SPAN


class VllmHost:
    """Runs sequences from any thread on one engine core.

    After the engine core dies, its sequences and all later ones fail with `worker.crash`, and the state in
    `stats` is `broken`; the owner of the model must reopen it.
    """

    def __init__(self, spec: ModelSpec, options: TokenModelOptions) -> None:
        """Starts the engine core.

        Raises `SynthesisError` (`synth.engine`), and `ConfigError` for options that the model does not
        support.
        """
        self._spec = spec
        self._arguments = engine_arguments(spec, options)
        self.moment = EngineMoment()
        slots = self._arguments["max_num_seqs"]
        self._room = slots + (options.waiting_room or (_CPU_WAITING_ROOM if on_cpu() else slots))
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        #: Running and waiting sequences.
        self._tasks = dict[TokenRequest, asyncio.Task[Tokens]]()
        #: Numbers of accepted sequences that have not ended, and of ended ones.
        self._taken = self._done = 0
        self._closing = False
        self._llm: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="vllm-host", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """Sizes of the engine and how it runs a step."""
        slots = self._arguments["max_num_seqs"]
        cache = self._llm.vllm_config.cache_config
        return EngineInfo(
            slots=slots,
            waiting_room=self._room - slots,
            device=current_platform.device_type if on_cpu() else current_platform.get_device_name(),
            dtype=self._arguments["dtype"],
            executor=f"vllm {'eager' if self._arguments['enforce_eager'] else 'graph'}",
            kv_pages=cache.num_gpu_blocks or 0,
            page_size=cache.block_size or 0,
            max_context=self._arguments["max_model_len"],
            reproducible=False,
            engine="vllm",
        )

    def submit(self, request: TokenRequest, receiver: Receiver) -> None:
        """Queues a sequence; blocks while the waiting room is full, except on the host's own thread.

        Raises `SynthesisError` (`synth.aborted`) after the host is closed, and `EngineCrashError` after its
        engine core has died.
        """
        inside = threading.current_thread() is self._thread
        with self._changed:
            self._changed.wait_for(
                lambda: inside or self._closing or self._llm.errored or self._taken < self._room
            )
            if self._closing:
                raise engine_closed()
            if self._llm.errored:
                raise _died()
            self._taken += 1
            self._loop.call_soon_threadsafe(self._enter, request, receiver)

    def cancel(self, request: TokenRequest) -> None:
        """Cancels a sequence; its receiver gets `synth.aborted`. Does nothing after its end."""

        def cancel() -> None:
            if (task := self._tasks.get(request)) is not None:
                task.cancel()

        with suppress(RuntimeError):  # a closed loop has no sequences
            self._loop.call_soon_threadsafe(cancel)

    def stats(self, audio_seconds: float = 0.0) -> EngineStats:
        moment = self.moment
        under_way = self._taken
        running = min(moment.running, under_way)
        return EngineStats(
            running=running,
            waiting=under_way - running,
            requests_done=self._done,
            frames=moment.tokens,
            audio_seconds=audio_seconds,
            kv_use=moment.kv_use,
            state="broken" if self._llm.errored else "ready",
        )

    def close(self) -> None:
        """Ends the engine core and the loop; open sequences fail with `synth.aborted`. May be called more than
        once."""
        with self._changed:
            first = not self._closing
            self._closing = True
            self._changed.notify_all()
        if first:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)

    def _run_loop(self) -> None:
        # The engine core inherits this mask, so that Ctrl-C does not end it before its requests are drained.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        try:
            self._llm = start_engine(self._spec, self._arguments, self.moment)
        except NightjarError:
            raise
        except Exception as error:
            raise engine_error(
                f"vLLM did not start: {type(error).__name__}: {error}.",
                "See the log above; the model may need fewer slots.",
            ) from error
        self._watch = self._loop.create_task(self._watch_over())

    async def _watch_over(self) -> None:
        """Cancels the sequences of a dead engine core repeatedly: vLLM's own calls to the core never return."""
        while not self._llm.errored:
            await asyncio.sleep(_LOOK_SECONDS)
        log.error("vLLM's engine core died")
        while True:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _stop(self) -> None:
        await cancel(*self._tasks.values())
        if self._llm is not None:
            self._llm.shutdown()
        await cancel(*(asyncio.all_tasks() - {asyncio.current_task()}))

    def _enter(self, request: TokenRequest, receiver: Receiver) -> None:
        self._tasks[request] = task = self._loop.create_task(self._sequence(request, receiver))
        # A callback, because a task that is cancelled before its first step runs none of its own code.
        task.add_done_callback(lambda task: self._ended(task, request, receiver))

    def _ended(self, task: asyncio.Task[Tokens], request: TokenRequest, receiver: Receiver) -> None:
        """Frees the place of an ended sequence and delivers its result to the receiver."""
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
        except Exception:  # must not stop the loop
            log.exception("a receiver of the engine failed")

    def _failure(self, task: asyncio.Task[Tokens]) -> NightjarError | None:
        """The error of a failed sequence as a `NightjarError`; None if it succeeded."""
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return None
        if self._llm.errored:
            return _died()
        if error is None:
            aborted = SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.")
            return engine_closed() if self._closing else aborted
        if isinstance(error, NightjarError):
            return error
        log.error("a sequence failed", exc_info=error)
        return engine_error(f"vLLM failed: {type(error).__name__}: {error}.", "See the log.")

    async def _sequence(self, request: TokenRequest, receiver: Receiver) -> Tokens:
        name = f"{request.request_id}#{next(self._numbers)}"
        if request.shadow is None:
            return await self._collect(name, request, receiver)
        shadow = f"{name}s"
        prompt, parameters = self._generate_arguments(request.shadow, streamed=False)
        try:
            # The output of the null branch is not read.
            await self._llm.add_request(shadow, prompt, parameters)
            return await self._collect(name, request, receiver)
        finally:
            await self._llm.abort(shadow)

    async def _collect(self, name: str, request: TokenRequest, receiver: Receiver) -> Tokens:
        ids = list[int]()
        codes = list[IntArray]()
        finish = None
        async for output in self._llm.generate(*self._generate_arguments(request, receiver.streamed), name):
            part = output.outputs[0]
            finish = part.finish_reason
            if not (new := list(part.token_ids)):
                continue
            ids += new
            new_codes = codes_of(part.logprobs, len(new), self._spec.codes_per_step)
            if new_codes is not None:
                codes.append(new_codes)
            if receiver.streamed:
                receiver.tokens(new, new_codes)
        if finish not in ("stop", "length"):
            raise engine_error(
                f"The engine ended the sequence with {finish!r}.",
                "The request may be tried again.",
            )
        return Tokens(ids, finish, np.concatenate(codes) if codes else None)

    def _generate_arguments(self, request: TokenRequest, streamed: bool) -> tuple[dict[str, Any], Any]:
        """The arguments of vLLM's `generate` for a sequence: prompt and sampling."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt.ids)}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        return prompt, sampling_params(self._spec, request, streamed)


def _died() -> EngineCrashError:
    return EngineCrashError(ErrorCode.WORKER_CRASH, "vLLM's engine core died.", "See the log.")
