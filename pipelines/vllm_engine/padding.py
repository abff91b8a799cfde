"""Which models need padded heads, and the config that asks for them. Imports no model code of vLLM's."""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from pipelines.vllm_engine.library import on_cpu

#: Key of the config that keeps the width of the stored heads.
STORED_WIDTH = "nightjar_stored_head_dim"
#: The narrowest heads of Triton's attention, which float32 runs on; FlashAttention knows narrower ones, that no published model has.
LEAST_CUDA_WIDTH = 32


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
        return max(head_dim, LEAST_CUDA_WIDTH)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    widths = sorted(CPUAttentionBackend.get_supported_head_sizes())
    return next((width for width in widths if width >= head_dim), head_dim)
