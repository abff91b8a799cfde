"""What runs a loaded model on its device: sizes of the engine, the executor of its frames, the codec's stage."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kernels.layers import rope_table
from kernels.registry import on_device
from kernels.toolchain import TRITON_ADVICE, first_line, triton_fault
from pipelines.codec.decoder import CodecState
from pipelines.codec.stage import CodecStage
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import EagerExecutor, FrameExecutor
from pipelines.engine.memory import DEFAULT_SHARE, LIBRARY_BYTES, MemoryNeeds, plan_memory
from pipelines.engine.state import LARGEST_PAGE
from pipelines.errors import ConfigError, ErrorCode
from pipelines.nn.stack import StackWeights
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.codec_config import CodecDecoderConfig
from pipelines.qwen3_tts.config import CONTROL_IDS, Qwen3TTSConfig, StackConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.weights import predictor_inputs

if TYPE_CHECKING:
    from kernels.lm_frame import FrameTensors, StackTensors
    from pipelines.engine.graph import GraphExecutor

log = logging.getLogger(__name__)

_CPU_SLOTS, _CPU_KV_BYTES = 32, 1 << 30
#: Positions below which no prompt has room for a second of speech.
_LEAST_CONTEXT = 64
#: Of the codec's decoder in bfloat16 on a GPU: what a frame of a batch takes at most. Measured: 4.6 GiB for batches of 4,096 frames.
_DECODED_FRAME_BYTES = 1_300_000
#: On a GPU: turns that a newcomer may wait while most slots are taken, and frames a turn.
_ADMIT_TURNS = 4
_FRAMES_PER_TURN = 2
#: On a GPU: seconds that an utterance waits to be decoded with others, and frames and utterances that are company enough.
_GATHER_SECONDS = 0.2
_GATHER_FRAMES, _MAX_UTTERANCES = 16384, 256
#: States of streams that left their slot and whose last chunk is still decoded, beside one for every slot.
LATE_STATES = 128


def engine_options(
    config: Qwen3TTSConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    slots: int | None = None,
    streams: int = 0,
    pages: int | None = None,
    page_size: int = 64,
    max_context: int = 8192,
    memory_share: float | None = None,
    weight_bytes: int = 0,
    stream_bytes: int = 0,
    state_bytes: int = 0,
) -> EngineOptions:
    """Sizes of the engine of a model that is not loaded yet; None means the best for the device. `weight_bytes`: its codec's too.

    `stream_bytes`, `state_bytes`: what the codec takes for streams, and for the state of one in each slot.
    Raises `ConfigError` (`config.invalid`) for slots that the GPU's memory does not hold, and a context that is too short for any prompt.
    """
    context = min(max_context, config.talker.max_positions)
    if context < _LEAST_CONTEXT:
        message = f"A context of {context} positions is too short for a prompt and a second of speech."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, f"Set SPEECH_ENGINE__MAX_CONTEXT to {_LEAST_CONTEXT} or more, or unset it.")
    needs = memory_needs(config, dtype, page_size, context, weight_bytes + stream_bytes)
    needs = replace(needs, slot=needs.slot + state_bytes)
    if device.type == "cpu":
        slots = slots or _CPU_SLOTS
        pages = pages or max(1, min(_CPU_KV_BYTES // needs.page, slots * math.ceil(context / page_size)))
        return EngineOptions(slots, pages, page_size, context, stream_slots=min(streams, slots // 2))
    plan = plan_memory(memory_budget(device, memory_share), needs, page_size, context, slots, pages)
    return EngineOptions(
        plan.slots,
        plan.pages,
        page_size,
        context,
        frames_per_turn=_FRAMES_PER_TURN,
        admit_turns=_ADMIT_TURNS,
        decode_frames=plan.decode_frames,
        stream_slots=min(streams, plan.slots // 2),
    )


def memory_needs(config: Qwen3TTSConfig, dtype: torch.dtype, page_size: int, max_context: int, weight_bytes: int) -> MemoryNeeds:
    """What a checkpoint takes of a GPU; `weight_bytes` are those of its files in their types on the device."""
    talker, predictor, width = config.talker, config.predictor, dtype.itemsize
    # The text embeddings behind their projection, and those of the codebooks.
    derived = (config.text_vocab + 1) * talker.hidden * width
    if config.needs_projection:
        derived += (talker.vocab + (config.codebooks - 1) * predictor.vocab + 1) * predictor.hidden * width
    # A row's keys and values of a frame in the predictor, whose positions are filled up to a power of two; other buffers take less again.
    span = 1 << (config.codebooks - 1).bit_length()
    row = 2 * 2 * predictor.layers * span * predictor.kv_width * width
    return MemoryNeeds(
        weights=weight_bytes + derived,
        # The text that follows a prompt, as int64; and rows in the graphs of all buckets, which have up to three rows for a slot.
        slot=8 * max_context + 3 * row,
        page=2 * talker.layers * talker.kv_width * page_size * width,
        decoded_frame=_DECODED_FRAME_BYTES,
    )


class _Shapes:
    """Takes the place of a checkpoint: tensors without values."""

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


def stream_needs(config: CodecDecoderConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a GPU that a codec which is not loaded yet takes for streams: its graphs, and the state of one stream."""
    decoder = CodecDecoder(config, _Shapes(), "meta", dtype, fused=False)
    return decoder.stream_bytes(LATE_STATES), decoder.state_size * dtype.itemsize


def memory_budget(device: torch.device, share: float | None) -> int:
    """Bytes that an engine may take of a GPU now. With a share PyTorch's allocator takes no more than that in this process."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share is None:
        return int(DEFAULT_SHARE * free)
    torch.cuda.set_per_process_memory_fraction(max(share - LIBRARY_BYTES / total, 0.0), device)
    return min(int(share * total), free)


def check_executor(device: torch.device, kind: Literal["auto", "eager", "graph"], reproducible: bool, page_size: int = 64) -> None:
    """Raises `ConfigError` (`config.invalid`) for an executor that a device cannot have, before anything is loaded."""
    on_gpu = device.type == "cuda"
    if kind == "eager" and reproducible and on_gpu:
        advice = "Set SPEECH_ENGINE__EXECUTOR to graph, or unset it; or unset SPEECH_ENGINE__REPRODUCIBLE."
        raise ConfigError(ErrorCode.CONFIG_INVALID, "The eager executor is not reproducible on a GPU.", advice)
    if kind == "graph" and not on_gpu:
        advice = "Set SPEECH_ENGINE__EXECUTOR to eager, or unset it."
        raise ConfigError(ErrorCode.CONFIG_INVALID, "The graph executor needs a CUDA device.", advice)
    if on_gpu and kind != "eager" and (page_size > LARGEST_PAGE or page_size & (page_size - 1)):
        message = (
            f"The kernels of graphs need pages of a power of two of positions, and a maximum of {LARGEST_PAGE}; page_size is {page_size}."
        )
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Leave the option page_size out, or set it to 64.")
    if on_gpu and (kind == "graph" or reproducible) and (fault := triton_fault()) is not None:
        raise _no_graphs(fault)


def open_executor(
    model: Qwen3TTSModel,
    sizes: EngineOptions,
    kind: Literal["auto", "eager", "graph"] = "auto",
    reproducible: bool = False,
    streams: int = 0,
) -> FrameExecutor:
    """The executor of a model; "auto" means graphs on a CUDA device, else eager.

    The first graphs are captured before this returns; all of them where it is made for `streams`, whose frames go first on the device.
    Where the kernels of graphs cannot be made "auto" is eager too, with a warning.
    Raises `ConfigError` (`config.invalid`) when graphs are asked for where they cannot run, or `reproducible` on a GPU without them.
    """
    check_executor(model.device, kind, reproducible, sizes.page_size)
    if kind != "eager" and model.device.type == "cuda":
        with on_device(model.device):
            executor, fault = _open_graphs(model, sizes, reproducible, streams > 0)
        if executor is not None:
            return executor
        if kind == "graph" or reproducible:
            raise _no_graphs(fault)
        log.warning(
            "%s Frames run as single PyTorch ops (the eager executor) instead of one graph launch each, which is much slower. %s",
            fault, TRITON_ADVICE,
        )  # fmt: skip
    return EagerExecutor(model, sizes.slots, sizes.pages, sizes.page_size, sizes.max_context)


def _no_graphs(fault: str | None) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, f"The graph executor cannot run here. {fault}", TRITON_ADVICE)


def _open_graphs(model: Qwen3TTSModel, sizes: EngineOptions, reproducible: bool, streams: bool) -> tuple[FrameExecutor | None, str | None]:
    """The graph executor, or None and why its kernels cannot be made. Raises what a lack of memory raises."""
    fault = triton_fault()
    if fault is not None:
        return None, fault
    try:
        executor = graph_executor(model, sizes.slots, sizes.pages, sizes.page_size, sizes.max_context, reproducible, streams)
        executor.warm(everything=streams)
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
    model: Qwen3TTSModel,
    slots: int,
    pages: int,
    page_size: int,
    max_context: int,
    reproducible: bool = False,
    first_on_device: bool = False,
) -> GraphExecutor:
    """The graph executor of a model, which needs Triton and a CUDA device; see `GraphExecutor` for `reproducible` and what it raises."""
    from pipelines.engine.graph import GraphExecutor

    return GraphExecutor(model, frame_tensors(model), slots, pages, page_size, max_context, reproducible, first_on_device)


def start_warming(decoder: CodecDecoder) -> Callable[[], None]:
    """Makes the codec's decoder ready on a GPU while other parts of the model are opened. What it returns waits for that."""
    if decoder.device.type == "cpu":
        return lambda: None
    thread = threading.Thread(target=_warm, args=(decoder,), name="codec-warming", daemon=True)
    thread.start()
    return thread.join


def _warm(decoder: CodecDecoder) -> None:
    """What fails here fails again, and is told, where speech is decoded."""
    try:
        with on_device(decoder.device), torch.cuda.stream(torch.cuda.Stream(decoder.device)):
            decoder.warm()
            torch.cuda.current_stream().synchronize()
    except Exception:
        log.warning("the codec could not be made ready", exc_info=True)


def open_stage(decoder: CodecDecoder, decode_frames: int | None = None) -> CodecStage[CodecState]:
    """The codec's stage: on a GPU it gathers utterances into large batches, of which `decode_frames` are decoded together."""
    decoder.batch_frames = decode_frames or decoder.batch_frames
    if decoder.device.type == "cpu":
        return CodecStage(decoder)
    return CodecStage(decoder, _MAX_UTTERANCES, decoder.device, _GATHER_SECONDS, _GATHER_FRAMES)
