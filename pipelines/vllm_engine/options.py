"""How a model is opened on vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pipelines.tokens import TokenRequest

#: More than any id and any code. On their way through vLLM the codes of a step are told apart by multiples of it, since vLLM keeps equal
#: ids of one step once when it merges the outputs of a slow reader.
CODE_SPAN = 1 << 20
#: Key of vLLM's `extra_args` of a sequence that is heard while it grows: it enters at once.
AT_ONCE = "at_once"
#: Keys of vLLM's `extra_args` for its prefix cache. What the KV of a prompt depends on beside its ids, as (the position from which it does,
#: bytes of one length); and whether the KV that the sequence generates depends on more than its ids, so that no other one may share it.
SALTS = "kv_salts"
PRIVATE = "private_kv"


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What a person may choose; None means the best for the device."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    #: Share of the device's memory that vLLM may take, weights and KV cache; the rest is for the other stages.
    memory_share: float | None = None
    #: KV cache of the CPU build in GiB; VLLM_CPU_KVCACHE_SPACE goes before it.
    cpu_kv_gib: int = 1
    #: Sequences that run at once, and requests that wait behind them before `submit` blocks.
    max_sequences: int | None = None
    waiting_room: int | None = None
    #: Positions of a sequence: prompt and new tokens.
    max_context: int | None = None
    #: Tokens of one engine step.
    step_tokens: int | None = None
    tensor_parallel: int = 1
    #: Without compilation and CUDA graphs.
    eager: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model family needs of vLLM."""

    folder: Path
    #: Changes to the folder's config.json, such as `architectures` of our plugin.
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: Codes of one step, the sampled token first; more than one needs a sampler that hands them on.
    codes_per_step: int = 1
    #: Whether the model draws frames (`pipelines.vllm_engine.frames`), which only vLLM's V2 model runner can host.
    v2_runner: bool = False
    #: Further arguments of vLLM's engine, such as `scheduler_cls` for guidance pairs.
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: What a request's `extra_args` say beside its own `extra`: its `prompt_codes`, in the words of the model.
    extra: Callable[[TokenRequest], Mapping[str, Any]] | None = None


@dataclass(slots=True)
class EngineMoment:
    """What the engine last said of itself."""

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    tokens: int = 0
    #: Since the start: requests that lost their place to others, steps, and the sequences that ran in all of them together.
    preemptions: int = 0
    steps: int = 0
    sequence_steps: int = 0


def refuse(vllm_config: Any) -> None:
    """Raises ValueError for an engine that would draw frames wrongly, and says what to change."""
    parallel = vllm_config.parallel_config
    if not vllm_config.use_v2_model_runner:
        raise ValueError("several codes a step need its V2 model runner, which needs Triton and must not be switched off")
    if vllm_config.speculative_config is not None:
        raise ValueError("several codes a step exclude speculative decoding")
    if parallel.pipeline_parallel_size > 1:
        raise ValueError("several codes a step exclude pipeline parallelism; tensor parallelism works")
    if getattr(parallel, "enable_batch_sharded_sampling", False):
        raise ValueError("several codes a step need enable_batch_sharded_sampling=False")
