"""vLLM's schedulers, real and without a model: what an engine core would be told, step after step. Import
it where vLLM is installed."""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import random
from typing import Any

import torch

from pipelines.options import TokenModelOptions
from pipelines.spark_tts.config import SparkConfig
from pipelines.spark_tts.pipeline import model_spec
from pipelines.vllm_engine.library import load_vllm
from tests.support.vllm_kit import wide_checkpoint

load_vllm()

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from pipelines.vllm_engine.host import engine_arguments  # noqa: E402

BLOCK = 16
#: A token that is drawn now and then, and one that never is.
END, NEVER = 7, 99


def scheduler(
    kind: type[Any],
    sequences: int,
    blocks: int,
    step_tokens: int,
    caching: bool = False,
    groups: int = 1,
    window: int | None = None,
    **own: Any,
) -> Any:
    """A scheduler of this kind with so much of everything; blocks of KV hold `BLOCK` tokens. `own`: its other
    attributes, such as `gather_seconds`."""
    spec = model_spec(SparkConfig.from_folder(wide_checkpoint()))
    arguments = {
        **engine_arguments(spec, TokenModelOptions(slots=sequences, max_context=512)),
        "enable_prefix_caching": caching,
    }
    chunked = {"max_num_batched_tokens": step_tokens, "enable_chunked_prefill": True}
    config = AsyncEngineArgs(**{**arguments, **chunked}).create_engine_config()
    config.scheduler_config.async_scheduling = issubclass(kind, AsyncScheduler)
    config.cache_config.num_gpu_blocks = blocks
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    attention = (
        FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
    )
    kv_groups = [KVCacheGroupSpec([f"layer{group}"], attention) for group in range(groups)]
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=kv_groups)
    made = kind(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )
    vars(made).update(own)
    return made


def newcomer(name: str, prompt: int, most: int = 400, stop: int = NEVER, **extra: Any) -> Any:
    parameters = SamplingParams(
        temperature=0.8,
        seed=1,
        max_tokens=most,
        stop_token_ids=[stop],
        detokenize=False,
        extra_args=extra or None,
    )
    return Request(
        request_id=name,
        prompt_token_ids=list(range(10, 10 + prompt)),
        sampling_params=parameters,
        pooling_params=None,
    )


def hashed(name: str, prompt: list[int], most: int, stop: int = NEVER, **extra: Any) -> Any:
    """A request as an engine core with a prefix cache makes it."""
    init_none_hash(sha256)
    settings = newcomer(name, 1, most, stop, **extra).sampling_params
    return Request(name, prompt, settings, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


class Run:
    """A scheduler, and a model whose draws depend on the sequence and the position alone.

    `late`: what a step made is told after the next one was scheduled, as with vLLM's asynchronous scheduler.
    """

    def __init__(self, scheduler: Any, late: bool) -> None:
        self.scheduler = scheduler
        self._late = late
        self._last: tuple[Any, Any] | None = None

    def step(self) -> tuple[Any, ...]:
        """One step; what was decided in it."""
        planned = self.scheduler.schedule()
        made = planned, self._model(planned)
        before, self._last = (self._last, made) if self._late else (made, None)
        if before is not None:
            self.scheduler.update_from_output(*before)
        cached = planned.scheduled_cached_reqs
        blocks = [(name, new) for name, new in zip(cached.req_ids, cached.new_block_ids)]
        new = [(one.req_id, one.block_ids) for one in planned.scheduled_new_reqs]
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return dict(planned.num_scheduled_tokens), blocks, new, sorted(planned.finished_req_ids), free

    def _model(self, planned: Any) -> Any:
        names = list(planned.num_scheduled_tokens)
        ids: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            # A chunk that is not a prompt's last draws nothing.
            whole = request.num_computed_tokens >= request.num_prompt_tokens
            ids.append(
                [random.Random(f"{name} {request.num_computed_tokens}").randrange(60)] if whole else []
            )
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: n for n, name in enumerate(names)}, sampled_token_ids=ids
        )
