"""What models with several codes a step cannot run under. Imports no vLLM."""

from __future__ import annotations

from typing import Any


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
