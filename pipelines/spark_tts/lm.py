"""The speech LM's folder: what vLLM is told about it, and whether its weights are whole."""

from __future__ import annotations

from pipelines.nn.checkpoint import Checkpoint, bad_checkpoint
from pipelines.spark_tts.config import LLM, LmConfig, SparkConfig
from pipelines.vllm_engine.options import ModelSpec
from pipelines.vllm_engine.padding import qwen2_overrides


def model_spec(config: SparkConfig) -> ModelSpec:
    """What vLLM is told. Call it after `load_vllm`."""
    return ModelSpec(config.folder / LLM, qwen2_overrides(config.lm.head_dim, config.lm.rope_theta))


def check_weights(config: SparkConfig) -> None:
    """Raises `ModelError` (`model.bad_checkpoint`) naming the tensor when LLM/ lacks one or holds one too many.

    vLLM reads the tensors in a process of its own, where an error would only be a dead engine.
    """
    folder = config.folder / LLM
    with Checkpoint.open(folder) as checkpoint:
        held = set(checkpoint.names())
    wanted = _names(config.lm)
    if config.lm.tied:
        held.discard("lm_head.weight")
    if missing := sorted(wanted - held):
        raise bad_checkpoint(f"Tensor {missing[0]} is missing from {folder}.")
    if extra := sorted(name for name in held - wanted if "rotary_emb" not in name):
        raise bad_checkpoint(f"{folder} holds tensors that the config does not account for: {', '.join(extra[:5])}.")


def _names(lm: LmConfig) -> set[str]:
    """The tensors of a Qwen2 model in transformers' names."""
    parts = [f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    parts += ["self_attn.o_proj.weight", *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {f"model.layers.{layer}.{part}" for layer in range(lm.layers) for part in parts}
    return names | {"model.embed_tokens.weight", "model.norm.weight"} | (set() if lm.tied else {"lm_head.weight"})
