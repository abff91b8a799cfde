"""How an engine is opened: its sizes by the memory of a device, and the executor of a model's frames."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from kernels import lm_persistent
from kernels.cuda_graphs import lacks_memory
from kernels.frame import Heads, fused_fault
from kernels.registry import on_device
from kernels.toolchain import TRITON_ADVICE, first_line, triton_fault
from pipelines.engine.buckets import BUCKETS, Prefill
from pipelines.engine.core import EngineOptions
from pipelines.engine.eager import EagerExecutor
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.frame_model import FrameModel
from pipelines.engine.memory import DEFAULT_SHARE, LIBRARY_BYTES, MemoryNeeds, MemoryPlan, gib, plan_memory
from pipelines.engine.state import LARGEST_PAGE
from pipelines.errors import ConfigError, ErrorCode, SynthesisError

if TYPE_CHECKING:
    from pipelines.engine.graph import GraphExecutor

log = logging.getLogger(__name__)

#: Executors that can be asked for.
ExecutorKind = Literal["auto", "eager", "graph", "megakernel"]
_CPU_SLOTS, _CPU_KV_BYTES = 32, 1 << 30
_DEFAULTS = EngineOptions()
#: Positions below which no prompt has room for a second of speech.
_LEAST_CONTEXT = 64
#: On a GPU: turns that a newcomer may wait while most slots are taken; frames a turn, and where there are more than 512 slots, whose frame
#: takes longer than the host's work for it.
_ADMIT_TURNS = 4
_FRAMES_PER_TURN, _WIDE_FRAMES_PER_TURN = 2, 1
#: Positions of prompts that a turn prefills for each slot, where there are more than 512.
_WIDE_PREFILL = 12
#: Slots for each spare one, in jobs with 512 slots or more: more than the utterances that end while newcomers wait for company.
_SPARE_PART = 8


def context_of(max_context: int, max_positions: int) -> int:
    """Positions of an utterance at most. Raises `ConfigError` (`config.invalid`) for a context that is too short for any prompt."""
    context = min(max_context, max_positions)
    if context < _LEAST_CONTEXT:
        message = f"A context of {context} positions is too short for a prompt and a second of speech."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, f"Set SPEECH_ENGINE__MAX_CONTEXT to {_LEAST_CONTEXT} or more, or unset it.")
    return context


def plan_engine(
    needs: MemoryNeeds,
    device: torch.device,
    context: int,
    *,
    slots: int | None = None,
    streams: int = 0,
    pages: int | None = None,
    page_size: int = 64,
    memory_share: float | None = None,
    frame_seconds: float = _DEFAULTS.frame_seconds,
    prefill: Prefill = "auto",
    wide: bool = False,
) -> EngineOptions:
    """Sizes of the engine of a model that is not loaded yet; None means the best for the device. `needs` are those of its weights too.

    wide: it may have more than 512 slots by default, and spare ones, where that was measured to be faster.

    Raises `ConfigError` (`config.invalid`) for slots that the GPU's memory does not hold, and `SynthesisError` (`synth.oom`) where it would
    hold them if no other program filled it.
    """
    if device.type == "cpu":
        slots = slots or _CPU_SLOTS
        pages = pages or max(1, min(_CPU_KV_BYTES // needs.page, slots * math.ceil(context / page_size)))
        return EngineOptions(slots, pages, page_size, context, frame_seconds=frame_seconds, stream_slots=min(streams, slots // 2))
    plan = _plan_gpu(needs, device, context, slots, pages, page_size, memory_share, prefill, wide)
    many = plan.slots > BUCKETS[-1]
    return EngineOptions(
        plan.slots,
        plan.pages,
        page_size,
        context,
        frames_per_turn=_WIDE_FRAMES_PER_TURN if many else _FRAMES_PER_TURN,
        admit_turns=_ADMIT_TURNS,
        decode_frames=plan.decode_frames,
        frame_seconds=frame_seconds,
        stream_slots=min(streams, plan.slots // 2),
        prefill=prefill,
        spare_slots=plan.slots // _SPARE_PART if wide and plan.slots >= BUCKETS[-1] else 0,
        prefill_tokens=_WIDE_PREFILL * plan.slots if many else _DEFAULTS.prefill_tokens,
    )


def memory_budget(device: torch.device, share: float | None) -> int:
    """Bytes that an engine may take of a GPU now. With a share PyTorch's allocator takes no more than that in this process."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share is not None:
        torch.cuda.set_per_process_memory_fraction(max(share - LIBRARY_BYTES / total, 0.0), device)
    return _budget(free, total, share)


def _budget(free: int, total: int, share: float | None) -> int:
    if share is None:
        return int(DEFAULT_SHARE * free)
    return min(int(share * total), free)


def _plan_gpu(
    needs: MemoryNeeds,
    device: torch.device,
    context: int,
    slots: int | None,
    pages: int | None,
    page_size: int,
    share: float | None,
    prefill: Prefill,
    wide: bool,
) -> MemoryPlan:
    """The plan for what a GPU has free now; raises as `plan_engine`."""
    budget = memory_budget(device, share)
    try:
        return plan_memory(budget, needs, page_size, context, slots, pages, prefill, wide)
    except ConfigError as error:
        free, total = torch.cuda.mem_get_info(device)
        # Raises where a GPU that nobody else uses would not do either. CUDA itself takes some of it.
        plan_memory(_budget(total - LIBRARY_BYTES, total, share), needs, page_size, context, slots, pages, prefill, wide)
        message = f"Another program fills the GPU: {gib(free)} of its {gib(total)} are free, too little for this engine."
        advice = "End that program (`nvidia-smi` shows it), use another GPU, or lower SPEECH_ENGINE__SLOTS if that is set."
        raise SynthesisError(ErrorCode.SYNTH_OOM, message, advice) from error


@contextmanager
def memory_told() -> Iterator[None]:
    """Around the opening of a model. Raises `SynthesisError` (`synth.oom`) for a lack of the GPU's memory inside."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        advice = "End other programs on the GPU, or lower SPEECH_ENGINE__SLOTS or SPEECH_ENGINE__MEMORY_SHARE."
        message = f"The GPU ran out of memory while the model was opened: {first_line(error)}."
        raise SynthesisError(ErrorCode.SYNTH_OOM, message, advice) from error


def check_executor(
    device: torch.device,
    kind: ExecutorKind,
    reproducible: bool,
    page_size: int = 64,
    stacks: Sequence[Heads] = (),
    prefill: Prefill = "auto",
) -> None:
    """Raises `ConfigError` (`config.invalid`) for an executor that a device, or a model of these stacks, cannot have, before anything is
    loaded."""
    on_gpu = device.type == "cuda"
    if kind == "eager" and reproducible and on_gpu:
        advice = "Set SPEECH_ENGINE__EXECUTOR to graph, or unset it; or unset SPEECH_ENGINE__REPRODUCIBLE."
        raise ConfigError(ErrorCode.CONFIG_INVALID, "The eager executor is not reproducible on a GPU.", advice)
    if prefill == "packed" and reproducible and on_gpu:
        advice = "Leave out the option `prefill`, or unset SPEECH_ENGINE__REPRODUCIBLE."
        raise ConfigError(ErrorCode.CONFIG_INVALID, "The packed prefill is not reproducible.", advice)
    if prefill == "packed" and (kind == "eager" or not on_gpu):
        advice = "Leave out the option `prefill`; on a GPU, unset SPEECH_ENGINE__EXECUTOR instead if it is eager."
        raise ConfigError(ErrorCode.CONFIG_INVALID, "The packed prefill needs the graph executor and a CUDA device.", advice)
    if kind == "megakernel" and reproducible and on_gpu:
        advice = "Set SPEECH_ENGINE__EXECUTOR to graph, or unset it; or unset SPEECH_ENGINE__REPRODUCIBLE."
        raise ConfigError(ErrorCode.CONFIG_INVALID, "The megakernel executor is not reproducible.", advice)
    if kind in ("graph", "megakernel") and not on_gpu:
        advice = "Set SPEECH_ENGINE__EXECUTOR to eager, or unset it."
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"The {kind} executor needs a CUDA device.", advice)
    if on_gpu and kind != "eager" and (page_size > LARGEST_PAGE or page_size & (page_size - 1)):
        message = (
            f"The kernels of graphs need pages of a power of two of positions, and a maximum of {LARGEST_PAGE}; page_size is {page_size}."
        )
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Leave the option page_size out, or set it to 64.")
    if on_gpu and _needs_graphs(kind, reproducible, prefill):
        if (fault := _unknown_heads(stacks)) is not None:
            advice = "Set SPEECH_ENGINE__EXECUTOR to eager, or unset it, and unset SPEECH_ENGINE__REPRODUCIBLE."
            raise ConfigError(ErrorCode.CONFIG_INVALID, f"The graph executor cannot run this model. {fault}", advice)
        if (fault := triton_fault()) is not None:
            raise _no_graphs(fault)


def _needs_graphs(kind: ExecutorKind, reproducible: bool, prefill: Prefill) -> bool:
    """Whether a GPU's engine was asked for what the eager executor does not have."""
    return kind in ("graph", "megakernel") or reproducible or prefill == "packed"


def _unknown_heads(stacks: Iterable[Heads]) -> str | None:
    return next((fault for stack in stacks if (fault := fused_fault(stack)) is not None), None)


def open_executor(
    model: FrameModel,
    sizes: EngineOptions,
    kind: ExecutorKind = "auto",
    reproducible: bool = False,
    streams: int = 0,
) -> FrameExecutor:
    """The executor of a model; "auto" means graphs on a CUDA device, persistent kernels of one and two rows included where they were
    measured (`may_be_persistent`) and `sizes` have memory for them, else eager.

    The first graphs are captured before this returns; all of them where it is made for `streams`, whose frames go first on the device.
    Where the kernels of graphs cannot be made "auto" is eager too, with a warning.
    Raises `ConfigError` (`config.invalid`) when graphs or packed prefill are asked for where they cannot run, or `reproducible` on a GPU
    without them.
    """
    check_executor(model.device, kind, reproducible, sizes.page_size, model.tensors.stacks, sizes.prefill)
    if kind != "eager" and model.device.type == "cuda":
        with on_device(model.device):
            executor, fault = _open_graphs(model, sizes, reproducible, streams > 0, kind)
        if executor is not None:
            return executor
        if _needs_graphs(kind, reproducible, sizes.prefill):
            raise _no_graphs(fault)
        log.warning(
            "%s Frames run as single PyTorch ops (the eager executor) instead of one graph launch each, which is much slower.%s",
            fault, "" if _unknown_heads(model.tensors.stacks) else f" {TRITON_ADVICE}",
        )  # fmt: skip
    return EagerExecutor(model, sizes.slots + sizes.spare_slots, sizes.pages, sizes.page_size, sizes.max_context)


def _no_graphs(fault: str | None) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, f"The graph executor cannot run here. {fault}", TRITON_ADVICE)


def _open_graphs(
    model: FrameModel, sizes: EngineOptions, reproducible: bool, streams: bool, kind: ExecutorKind
) -> tuple[FrameExecutor | None, str | None]:
    """The graph executor, or None and why its kernels cannot be made. Raises what a lack of memory raises."""
    fault = _unknown_heads(model.tensors.stacks) or triton_fault()
    if fault is not None:
        return None, fault
    try:
        wanted = sizes.persistent and may_be_persistent(kind, reproducible, streams, model.device)
        persistent = kind == "megakernel" or (wanted and lm_persistent.predictor_cut(model.tensors) is not None)
        executor = graph_executor(
            model, sizes.slots, sizes.pages, sizes.page_size, sizes.max_context,
            reproducible, streams, persistent=persistent, prefill=sizes.prefill, spare_slots=sizes.spare_slots,
        )  # fmt: skip
        executor.warm(everything=streams)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        log.warning("the graph executor could not be set up", exc_info=True)
        return None, f"Its kernels could not be made ({first_line(error)})."
    return executor, None


def may_be_persistent(kind: ExecutorKind, reproducible: bool, streams: bool, device: torch.device) -> bool:
    """Whether a model may have the persistent kernels: they are asked for, or nothing is and they were measured better on such a device.

    For streams they were not: they keep the codec's first chunk waiting (benchmarks/NOTES.md).
    """
    if kind != "auto" or reproducible or streams:
        return kind == "megakernel"
    blocks = max(cut.blocks for cut in lm_persistent.PREDICTORS.values())
    measured = torch.cuda.get_device_capability(device) == lm_persistent.MEASURED_ON
    return measured and torch.cuda.get_device_properties(device).multi_processor_count >= blocks


def graph_executor(
    model: FrameModel,
    slots: int,
    pages: int,
    page_size: int,
    max_context: int,
    reproducible: bool = False,
    first_on_device: bool = False,
    persistent: bool = False,
    prefill: Prefill = "auto",
    spare_slots: int = 0,
) -> GraphExecutor:
    """The graph executor of a model, which needs Triton and a CUDA device; see `GraphExecutor` for `reproducible` and what it raises.

    persistent: `MegakernelExecutor`.
    """
    if persistent:
        from pipelines.engine.megakernel import MegakernelExecutor as Chosen
    else:
        from pipelines.engine.graph import GraphExecutor as Chosen
    return Chosen(model, slots, pages, page_size, max_context, reproducible, first_on_device, prefill, spare_slots)
