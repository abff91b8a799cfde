"""What runs a loaded model on its device: sizes of the engine, the executor of its frames, the codec's stage."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kernels.layers import rope_table
from kernels.toolchain import TRITON_ADVICE, first_line, triton_fault
from pipelines.codec.decoder import CodecState
from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import EagerExecutor, FrameExecutor
from pipelines.errors import ConfigError, ErrorCode
from pipelines.nn.stack import StackWeights
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.config import CONTROL_IDS, StackConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.weights import predictor_inputs

if TYPE_CHECKING:
    from kernels.lm_frame import FrameTensors, StackTensors
    from pipelines.engine.graph import GraphExecutor

log = logging.getLogger(__name__)

_CPU_KV_BYTES = 1 << 30
#: On a GPU: turns that a newcomer may wait while most slots are taken, and frames a turn.
_ADMIT_TURNS = 4
_FRAMES_PER_TURN = 2
#: On a GPU: seconds that an utterance waits to be decoded with others, and frames and utterances that are company enough.
_GATHER_SECONDS = 0.2
_GATHER_FRAMES, _MAX_UTTERANCES = 16384, 256


def engine_options(model: Qwen3TTSModel, slots: int | None, pages: int | None, page_size: int, max_context: int) -> EngineOptions:
    """Slots, pages and context; None means the best for the device's memory."""
    on_cpu = model.device.type == "cpu"
    slots = slots or (32 if on_cpu else 128)
    talker = model.config.talker
    context = min(max_context, talker.max_positions)
    page_bytes = 2 * talker.layers * talker.kv_width * page_size * torch.empty(0, dtype=model.dtype).element_size()
    memory = _CPU_KV_BYTES if on_cpu else torch.cuda.mem_get_info(model.device)[0] // 2
    enough = slots * math.ceil(context / page_size)
    pages = pages or max(1, min(memory // page_bytes, enough))
    if on_cpu:
        return EngineOptions(slots=slots, pages=pages, page_size=page_size, max_context=context)
    return EngineOptions(slots, pages, page_size, context, frames_per_turn=_FRAMES_PER_TURN, admit_turns=_ADMIT_TURNS)


def open_executor(
    model: Qwen3TTSModel, sizes: EngineOptions, kind: Literal["auto", "eager", "graph"] = "auto", reproducible: bool = False
) -> FrameExecutor:
    """The executor of a model; "auto" means graphs on a CUDA device, else eager. Graphs are captured before this returns.

    Where the kernels of graphs cannot be made "auto" is eager too, with a warning.
    Raises `ConfigError` (`config.invalid`) when graphs are asked for where they cannot run, or `reproducible` on a GPU without them.
    """
    on_gpu = model.device.type == "cuda"
    if kind == "eager" and reproducible and on_gpu:
        raise ConfigError(ErrorCode.CONFIG_INVALID, "The eager executor is not reproducible on a GPU.", "Use the graph executor.")
    if kind == "graph" and not on_gpu:
        raise ConfigError(ErrorCode.CONFIG_INVALID, "The graph executor needs a CUDA device.", "Use the eager executor.")
    if kind != "eager" and on_gpu:
        executor, fault = _open_graphs(model, sizes, reproducible)
        if executor is not None:
            return executor
        if kind == "graph" or reproducible:
            raise ConfigError(ErrorCode.CONFIG_INVALID, f"The graph executor cannot run here. {fault}", TRITON_ADVICE)
        log.warning(
            "%s Frames run as single PyTorch ops (the eager executor) instead of one graph launch each, which is much slower. %s",
            fault, TRITON_ADVICE,
        )  # fmt: skip
    return EagerExecutor(model, sizes.slots, sizes.pages, sizes.page_size, sizes.max_context)


def _open_graphs(model: Qwen3TTSModel, sizes: EngineOptions, reproducible: bool) -> tuple[FrameExecutor | None, str | None]:
    """The graph executor with its graphs captured, or None and why its kernels cannot be made. Raises what a lack of memory raises."""
    fault = triton_fault()
    if fault is not None:
        return None, fault
    try:
        executor = graph_executor(model, sizes.slots, sizes.pages, sizes.page_size, sizes.max_context, reproducible)
        executor.warm(sizes.slots)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        log.warning("the graph executor could not be set up", exc_info=True)
        return None, f"Its kernels could not be made ({first_line(error)})."
    return executor, None


def frame_tensors(model: Qwen3TTSModel) -> FrameTensors:
    """A model's weights as the fused frame's kernels take them: views, nothing big is copied. Needs Triton."""
    from kernels.lm_frame import FrameTensors, StackTensors

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
    """The graph executor of a model, which needs Triton and a CUDA device; see `GraphExecutor` for `reproducible` and what it raises."""
    from pipelines.engine.graph import GraphExecutor

    return GraphExecutor(model, frame_tensors(model), slots, pages, page_size, max_context, reproducible)


def open_stage(decoder: CodecDecoder) -> CodecStage[CodecState]:
    """The codec's stage: on a GPU it gathers utterances into large batches."""
    if decoder.device.type == "cpu":
        return CodecStage(decoder)
    return CodecStage(decoder, _MAX_UTTERANCES, decoder.device, _GATHER_SECONDS, _GATHER_FRAMES)
