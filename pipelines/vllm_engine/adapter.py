"""The few places where vLLM's own interfaces are touched. Written for 0.32."""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from pipelines.engine_choice import FRAMES_ADVICE
from pipelines.errors import ConfigError, ErrorCode
from pipelines.options import TokenModelOptions
from pipelines.tokens import TokenRequest
from pipelines.vllm_engine.library import (
    AT_ONCE,
    CODE_SPAN,
    ModelSpec,
    architecture,
    on_cpu,
)
from pipelines.vllm_engine.plugin import CONFIG_FORMAT, register

_CPU_SEQUENCES, _GPU_SEQUENCES = 32, 512
#: The default of vLLM's asynchronous engine on a GPU is a quarter of this: a burst of requests would enter in
#: four times as many steps.
_CPU_STEP_TOKENS, _GPU_STEP_TOKENS = 2048, 8192
#: By itself vLLM captures CUDA graphs for steps of up to so many sequences; larger ones would be launched
#: from Python.
_GRAPHED_SEQUENCES = 512
#: The sizes that it captures end in multiples of this.
_GRAPH_STEP = 16


def engine_arguments(spec: ModelSpec, options: TokenModelOptions) -> dict[str, Any]:
    """The arguments of `AsyncEngineArgs`. Raises `ConfigError` (`config.invalid`) for what the model
    cannot run with."""
    cpu, frames = on_cpu(), bool(spec.model)
    sequences = options.slots or (_CPU_SEQUENCES if cpu else _GPU_SEQUENCES)
    memory_share, context = spec.chosen(options)
    arguments: dict[str, Any] = {
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
            # No step's budget may cut a prompt off: one with a seed ends the V1 runner, which then turns back
            # a generator as only CUDA can.
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
    """Tokens of a step. Raises `ConfigError` (`config.invalid`) for fewer than it needs: one a sequence, a
    prompt where none may be cut."""
    if spec.pairs:
        # The prompts of a pair enter whole and together, beside all that runs.
        return max(options.step_tokens or _GPU_STEP_TOKENS, 2 * context + sequences)
    # Chunks of a prompt are the same arithmetic in another order: on a CPU a step has room for a whole one
    # beside all that runs.
    tokens = options.step_tokens or (
        max(_CPU_STEP_TOKENS, context) + sequences if cpu else max(_GPU_STEP_TOKENS, sequences)
    )
    least = max(sequences, context) if cpu and not spec.model else sequences
    if tokens < least:
        message = f"{tokens} tokens a step are fewer than the {least} that this model needs."
        raise ConfigError(
            ErrorCode.CONFIG_INVALID, message, "Raise step_tokens, or lower slots or max_context."
        )
    return tokens


@dataclass(slots=True)
class EngineMoment(StatLoggerBase):
    """What the engine last said of itself; beside vLLM's own metrics, which stay as they are."""

    running: int = 0
    kv_use: float = 0.0
    tokens: int = 0
    #: Since the start: requests that lost their place to others, steps, and the sequences that ran in all of
    #: them together.
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
        """Nothing to say."""


def start_engine(spec: ModelSpec, arguments: dict[str, Any], moment: EngineMoment) -> AsyncLLM:
    """Starts an engine core in a process of its own; to be called in the event loop that will serve it.

    Raises `ConfigError` (`config.invalid`) where frames cannot be drawn, which an engine core could only
    say in its log.
    """
    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    if spec.model and not config.use_v2_model_runner:
        message = "This model needs vLLM's V2 model runner, which needs Triton and must not be switched off."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, FRAMES_ADVICE)
    return AsyncLLM.from_vllm_config(config, stat_loggers=[lambda *_: moment])


def device_name() -> str:
    """The name of the device that vLLM was built for, such as `NVIDIA H200`; takes none of its memory."""
    return current_platform.device_type if on_cpu() else current_platform.get_device_name()


def sampling_params(spec: ModelSpec, request: TokenRequest, streamed: bool) -> SamplingParams:
    """How vLLM draws a sequence, and what samplers and schedulers of ours read of it."""
    asked, extra = request.sampling, {**request.extra}
    if spec.prompt_extra is not None:
        extra |= spec.prompt_extra(request)
    if streamed:
        extra[AT_ONCE] = True
    with_codes = spec.codes_per_step > 1 and request.codes
    return SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        repetition_penalty=asked.repetition_penalty,
        seed=asked.seed,
        max_tokens=asked.max_tokens,
        stop_token_ids=list(asked.stop_ids),
        ignore_eos=asked.ignore_end,
        detokenize=False,
        # The channel by which a sampler hands on further codes of a step: the ids of "likely tokens".
        logprobs=spec.codes_per_step - 1 if with_codes else None,
        flat_logprobs=with_codes,
        extra_args=extra or None,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )


def codes_of(logprobs: Any, steps: int, codes_per_step: int) -> NDArray[np.int64] | None:
    """int64 [steps, codes_per_step] from the flat log probabilities of an output (see `CODE_SPAN`); None
    where none were asked for."""
    if codes_per_step == 1 or logprobs is None:
        return None
    rows: Sequence[Sequence[int]] = [
        logprobs.token_ids[start:end][:codes_per_step]
        for start, end in zip(logprobs.start_indices, logprobs.end_indices)
    ]
    return np.array(rows, dtype=np.int64).reshape(steps, codes_per_step) % CODE_SPAN
