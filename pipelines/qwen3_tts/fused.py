"""Qwen3-TTS under the graph executor: its weights as the fused frame's kernels take them. Needs Triton and a CUDA device."""

from __future__ import annotations

from torch import Tensor

from kernels.layers import rope_table
from kernels.lm_frame import FrameTensors, StackTensors
from pipelines.engine.graph import GraphExecutor
from pipelines.nn.stack import StackWeights
from pipelines.qwen3_tts.config import CONTROL_IDS, StackConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.weights import predictor_inputs


def frame_tensors(model: Qwen3TTSModel) -> FrameTensors:
    """Views of the model's weights; nothing big is copied."""
    config, weights = model.config, model.weights
    table = rope_table(config.codebooks, config.predictor.head_dim, config.predictor.rope_theta, model.dtype, model.device)

    def stack(shape: StackConfig, tensors: StackWeights, rope: Tensor) -> StackTensors:
        layers = [layer.tensors() for layer in tensors.layers]
        return StackTensors(layers, tensors.norm, rope, shape.heads, shape.kv_heads, shape.eps, shape.scale)

    return FrameTensors(
        talker=stack(config.talker, weights.talker.stack, model.rope),
        head=weights.talker.head,
        predictor=stack(config.predictor, weights.predictor.stack, table),
        heads=weights.predictor.heads,
        project=weights.predictor.projection,
        inputs=weights.codec_table if weights.predictor.projection is None else predictor_inputs(weights),
        starts=weights.codec_starts,
        codec_table=weights.codec_table,
        text=model.text.rows,
        end=config.ids.eos,
        suppress_from=config.talker.vocab - CONTROL_IDS,
    )


def graph_executor(
    model: Qwen3TTSModel, slots: int, pages: int, page_size: int, max_context: int, reproducible: bool = False
) -> GraphExecutor:
    """The graph executor of a model; see `GraphExecutor` for `reproducible` and what it raises."""
    return GraphExecutor(model, frame_tensors(model), slots, pages, page_size, max_context, reproducible)
