"""How an engine is opened: its sizes by the memory of a device, and the executor of a model's frames."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch

from kernels import lm_persistent
from kernels.cuda_graphs import lacks_memory
from kernels.frame import StackTensors, fused_fault
from kernels.registry import on_device
from kernels.toolchain import TRITON_ADVICE, first_line, triton_fault
from pipelines.codec.decoder import BATCH_FRAMES
from pipelines.codec.stage import CodecStage
from pipelines.engine.buckets import BUCKETS, WIDE_BUCKETS, buckets_for
from pipelines.engine.engine import Engine
from pipelines.engine.executor import EagerExecutor, EngineOptions, FrameExecutor, FrameModel
from pipelines.engine.state import LARGEST_PAGE
from pipelines.errors import ConfigError, ErrorCode, SynthesisError
from pipelines.nn.config_keys import StackConfig
from pipelines.options import CONTEXT, Count, ModelOptions

if TYPE_CHECKING:
    from pipelines.engine.graph import GraphExecutor

log = logging.getLogger(__name__)

#: A stack of layers as it is configured, or loaded.
Stack = StackConfig | StackTensors

#: Executors that can be asked for.
ExecutorKind = Literal["auto", "eager", "graph", "megakernel"]
_CPU_SLOTS, _CPU_KV_BYTES = 32, 1 << 30
_DEFAULTS = EngineOptions()
#: Positions below which no prompt has room for a second of speech.
_LEAST_CONTEXT = 64
#: On a GPU: turns that a newcomer may wait while most slots are taken; frames a turn, and where there are
#: more than 512 slots, whose frame takes longer than the host's work for it.
_ADMIT_TURNS = 4
_FRAMES_PER_TURN, _WIDE_FRAMES_PER_TURN = 2, 1
#: Positions of prompts that a turn prefills for each slot, where there are more than 512.
_WIDE_PREFILL = 12
#: Slots for each spare one, in jobs with 512 slots or more: more than the utterances that end while newcomers
#: wait for company.
_SPARE_PART = 8
#: Share of the free memory that an engine takes where nobody says how much; the rest is for what the
#: allocator cannot use.
DEFAULT_SHARE = 0.9
#: Positions that the default keeps for every slot: 30 s of speech, its text and a recording of 5 s. KV pages
#: are taken as they are needed, and an utterance that finds none starts again later.
TYPICAL_POSITIONS = 512
#: Positions for every slot below which a number that was asked for is refused.
LEAST_POSITIONS = 256
#: The codec's largest batch takes this part of the memory, but has at least so many frames; a multiple of the
#: step.
_DECODE_PART, _LEAST_DECODE_FRAMES, _FRAME_STEP = 8, 512, 64
#: CUDA's context and libraries; workspaces and inputs of all graphs of an engine of 512 slots, and of each
#: one more. Measured on an H200: 0.85 GiB, and 1.2 GiB for 19 graphs.
LIBRARY_BYTES, _GRAPH_BYTES, _MORE_GRAPH_BYTES = 1 << 30, 3 << 29, 1 << 26
#: Beyond the typical positions of all slots, where there are more than 512 by default: further pages, and
#: what the codec's allocator keeps. A job of 1,024 slots on an H200 took 45 GB of the GPU for all but its
#: pages.
_WIDE_ROOM = 32 << 30
#: Rows of a slot in the buffers of all graphs that `MemoryNeeds.slot` counts.
_SLOT_ROWS = 3


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model takes of a GPU, in bytes."""

    #: Weights of the model and of its codec, and what is derived from them.
    weights: int
    #: A slot: its state, and its rows in the buffers of all graphs.
    slot: int
    #: A page of the KV cache.
    page: int
    #: A frame in the codec's batch.
    decoded_frame: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that fit."""

    slots: int
    pages: int
    #: Frames of the codec's largest batch.
    decode_frames: int


def plan_memory(
    budget: int,
    needs: MemoryNeeds,
    page_size: int,
    max_context: int,
    slots: int | None = None,
    pages: int | None = None,
    wide: bool = False,
) -> MemoryPlan:
    """Sizes of an engine that may take `budget` bytes.

    Without `slots` it has the largest bucket of which every slot has room for a typical utterance; with
    `wide` also those above 512, where much memory is left beside them. Half of what is left becomes
    further pages, so that long utterances fit beside each other; the other half is for batches of the
    codec that the allocator keeps. Raises `ConfigError` (`config.invalid`) where the model, or so many
    slots, do not fit, and says how many do.
    """
    decode_frames = budget // _DECODE_PART // needs.decoded_frame
    decode_frames = min(max(decode_frames - decode_frames % _FRAME_STEP, _LEAST_DECODE_FRAMES), BATCH_FRAMES)
    # The allocator keeps blocks of batches of other lengths: the codec takes about twice its largest batch.
    free = budget - LIBRARY_BYTES - _GRAPH_BYTES - needs.weights - 2 * decode_frames * needs.decoded_frame

    def holds(positions: int, beside: int = 0) -> int:
        """The largest number of slots with room for so many positions each, and so many bytes beside them."""
        each = math.ceil(min(positions, max_context) / page_size) * needs.page
        tried = range(1, free // (needs.slot + each) + 1)
        return bisect_right(tried, free - beside, key=lambda count: slots_bytes(needs, count) + count * each)

    most = holds(LEAST_POSITIONS)
    if most < 1:
        message = f"The model does not fit into the GPU's memory: it needs {gib(budget - free)}, and the engine may take {gib(budget)}."
        raise _cannot_run(message, "Use a larger GPU, or raise SPEECH_ENGINE__MEMORY_SHARE if that is set.")
    if slots is None:
        typical = max(holds(TYPICAL_POSITIONS), 1)
        slots = max(bucket for bucket in BUCKETS if bucket <= typical)
        if wide:
            roomy = holds(TYPICAL_POSITIONS, _WIDE_ROOM)
            slots = max([slots, *(bucket for bucket in WIDE_BUCKETS if bucket <= roomy)])
    elif slots > most:
        message = f"{slots} slots do not fit into the GPU's memory: the engine may take {gib(budget)}, which hold {most} slots."
        advice = f"Set SPEECH_ENGINE__SLOTS to {most} or less, or unset it; or raise SPEECH_ENGINE__MEMORY_SHARE if that is set."
        raise _cannot_run(message, advice)
    if pages is None:
        # What the slots typically need, and half of the rest, up to all that they could ever need.
        room = (free - slots_bytes(needs, slots)) // needs.page
        typical = slots * math.ceil(min(TYPICAL_POSITIONS, max_context) / page_size)
        pages = min(
            room if room <= typical else typical + (room - typical) // 2,
            slots * math.ceil(max_context / page_size),
        )
    return MemoryPlan(slots, pages, decode_frames)


def slots_bytes(needs: MemoryNeeds, slots: int) -> int:
    """Bytes of so many slots without their pages, and of what graphs take beyond those of an engine as it
    is by default.

    Every bucket has buffers of its own. A slot counts for `_SLOT_ROWS` rows in them, which is less than
    all buckets have where there are many large ones, or where the largest is far above the slots.
    """
    buckets = buckets_for(slots)
    more = max(len(buckets) - len(BUCKETS), 0)
    return (
        max(slots * needs.slot, math.ceil(sum(buckets) * needs.slot / _SLOT_ROWS)) + more * _MORE_GRAPH_BYTES
    )


def gib(size: int) -> str:
    """Bytes in words."""
    return f"{size / 2**30:.1f} GiB"


def memory_budget(device: torch.device, share: float | None) -> int:
    """Bytes that an engine may take of a GPU now. With a share PyTorch's allocator takes no more than that
    in this process."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share is not None:
        torch.cuda.set_per_process_memory_fraction(max(share - LIBRARY_BYTES / total, 0.0), device)
    return _budget(free, total, share)


def _budget(free: int, total: int, share: float | None) -> int:
    return int(DEFAULT_SHARE * free) if share is None else min(int(share * total), free)


@contextmanager
def memory_told() -> Iterator[None]:
    """Around the opening of a model. Raises `SynthesisError` (`synth.oom`) for a lack of the GPU's memory
    inside."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        advice = (
            "End other programs on the GPU, or lower SPEECH_ENGINE__SLOTS or SPEECH_ENGINE__MEMORY_SHARE."
        )
        message = f"The GPU ran out of memory while the model was opened: {first_line(error)}."
        raise SynthesisError(ErrorCode.SYNTH_OOM, message, advice) from error


def check_executor(
    device: torch.device,
    kind: ExecutorKind,
    reproducible: bool,
    page_size: int = 64,
    stacks: Sequence[Stack] = (),
) -> None:
    """Raises `ConfigError` (`config.invalid`) for an executor that a device, or a model of these stacks,
    cannot have, before anything is loaded."""
    on_gpu, graphs = device.type == "cuda", kind in ("graph", "megakernel")
    eager = "Set SPEECH_ENGINE__EXECUTOR to eager, or unset it"
    if graphs and not on_gpu:
        raise _cannot_run(f"The {kind} executor needs a CUDA device.", f"{eager}.")
    if reproducible and on_gpu and kind in ("eager", "megakernel"):
        advice = "Set SPEECH_ENGINE__EXECUTOR to graph, or unset it; or unset SPEECH_ENGINE__REPRODUCIBLE."
        raise _cannot_run(f"The {kind} executor is not reproducible on a GPU.", advice)
    if on_gpu and kind != "eager" and (page_size > LARGEST_PAGE or page_size & (page_size - 1)):
        message = f"The kernels of graphs need pages of a power of two of positions, and a maximum of {LARGEST_PAGE}; page_size is {page_size}."
        raise _cannot_run(message, "Leave the option page_size out, or set it to 64.")
    if on_gpu and (graphs or reproducible):
        if fault := _unknown_heads(stacks):
            advice = f"{eager}, and unset SPEECH_ENGINE__REPRODUCIBLE."
            raise _cannot_run(f"The graph executor cannot run this model. {fault}", advice)
        if fault := triton_fault():
            raise _no_graphs(fault)


def _unknown_heads(stacks: Sequence[Stack]) -> str | None:
    faults = (fused_fault(stack.heads, stack.kv_heads, stack.head_dim) for stack in stacks)
    return next((fault for fault in faults if fault is not None), None)


def _no_graphs(fault: str) -> ConfigError:
    return _cannot_run(f"The graph executor cannot run here. {fault}", TRITON_ADVICE)


def _cannot_run(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)


def open_executor(
    model: FrameModel,
    sizes: EngineOptions,
    kind: ExecutorKind = "auto",
    reproducible: bool = False,
    streams: int = 0,
) -> FrameExecutor:
    """The executor of a model; "auto" means graphs on a CUDA device, persistent kernels of one and two
    rows included where they were measured (`may_be_persistent`) and `sizes` have memory for them, else
    eager.

    The first graphs are captured before this returns; all of them where it is made for `streams`, whose
    frames go first on the device. Where the kernels of graphs cannot be made "auto" is eager too, with a
    warning. Raises `ConfigError` (`config.invalid`) when graphs are asked for where they cannot run, or
    `reproducible` on a GPU without them.
    """
    device, stacks = model.device, model.tensors.stacks
    check_executor(device, kind, reproducible, sizes.page_size, stacks)
    if kind == "eager" or device.type != "cuda":
        return EagerExecutor(model, sizes)
    with on_device(device):
        unknown = _unknown_heads(stacks)
        fault = unknown or triton_fault()
        if fault is None:
            persistent = kind == "megakernel" or (
                sizes.persistent
                and may_be_persistent(kind, reproducible, streams > 0, device)
                and lm_persistent.predictor_config(model.tensors) is not None
            )
            try:
                executor = graph_executor(model, sizes, reproducible, streams > 0, persistent=persistent)
                executor.warm(everything=streams > 0)
                return executor
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:
                log.warning("the graph executor could not be set up", exc_info=True)
                fault = f"Its kernels could not be made ({first_line(error)})."
    if kind != "auto" or reproducible:
        raise _no_graphs(fault)
    log.warning(
        "%s Frames run as single PyTorch ops (the eager executor) instead of one graph launch each, which is much slower. %s",
        fault, "" if unknown else TRITON_ADVICE,
    )  # fmt: skip
    return EagerExecutor(model, sizes)


def may_be_persistent(kind: ExecutorKind, reproducible: bool, streams: bool, device: torch.device) -> bool:
    """Whether a model may have the persistent kernels: they are asked for, or nothing is and they were
    measured better on such a device.

    For streams they were not: they keep the codec's first chunk waiting (docs/adr/0009).
    """
    if kind != "auto" or reproducible or streams:
        return kind == "megakernel"
    blocks = max(config.blocks for config in lm_persistent.PREDICTORS.values())
    measured = torch.cuda.get_device_capability(device) == lm_persistent.MEASURED_ON
    return measured and torch.cuda.get_device_properties(device).multi_processor_count >= blocks


def graph_executor(
    model: FrameModel,
    sizes: EngineOptions,
    reproducible: bool = False,
    first_on_device: bool = False,
    persistent: bool = False,
) -> GraphExecutor:
    """The graph executor of a model, which needs Triton and a CUDA device; see `GraphExecutor`.
    persistent: `MegakernelExecutor`."""
    if persistent:
        from pipelines.engine.megakernel import MegakernelExecutor as Chosen
    else:
        from pipelines.engine.graph import GraphExecutor as Chosen
    return Chosen(model, sizes, reproducible, first_on_device)


#: Requests that wait for a slot on a CPU.
_CPU_WAITING_ROOM = 64


@dataclass(frozen=True, slots=True)
class NativeModelOptions(ModelOptions):
    """How a checkpoint whose LM runs on our own engine is opened; None means the best for the device."""

    #: How frames are made: PyTorch ops one by one, or CUDA graphs of fused kernels. "megakernel": as graphs,
    #: with persistent kernels for one or two utterances of Qwen3-TTS. "auto": graphs on a CUDA device with
    #: Triton, and those kernels where they were measured.
    executor: ExecutorKind = "auto"
    #: Streams that run at once: as many slots, but for one, are kept free of whole utterances. On a GPU
    #: everything that they, or any request, need is compiled and captured before the pipeline is open, which
    #: takes a while.
    streams: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: KV pages of `page_size` positions.
    pages: Count | None = None
    page_size: Count = 64

    def plan(
        self,
        needs: MemoryNeeds,
        device: torch.device,
        max_positions: int,
        context: int = CONTEXT,
        frame_seconds: float = _DEFAULTS.frame_seconds,
        wide: bool = False,
    ) -> EngineOptions:
        """Sizes of the engine of a model that is not loaded yet; `needs` are those of its weights too.

        context: positions where nobody chose; wide: it may have more than 512 slots by default, and spare
        ones, where that was measured to be faster.

        Raises `ConfigError` (`config.invalid`) for slots that the GPU's memory does not hold, and for a
        context that is too short for any prompt, and `SynthesisError` (`synth.oom`) where it would hold
        them if no other program filled it.
        """
        context = self.positions(max_positions, context)
        if device.type == "cpu":
            slots = self.slots or _CPU_SLOTS
            needed = slots * math.ceil(context / self.page_size)
            return EngineOptions(
                slots,
                self.pages or max(1, min(_CPU_KV_BYTES // needs.page, needed)),
                self.page_size,
                context,
                frame_seconds=frame_seconds,
                stream_slots=min(self.streams, slots // 2),
            )

        def planned(budget: int) -> MemoryPlan:
            return plan_memory(budget, needs, self.page_size, context, self.slots, self.pages, wide)

        try:
            plan = planned(memory_budget(device, self.memory_share))
        except ConfigError as error:
            free, total = torch.cuda.mem_get_info(device)
            # Raises where a GPU that nobody else uses would not do either. CUDA itself takes some of it.
            planned(_budget(total - LIBRARY_BYTES, total, self.memory_share))
            message = f"Another program fills the GPU: {gib(free)} of its {gib(total)} are free, too little for this engine."
            advice = "End that program (`nvidia-smi` shows it), use another GPU, or lower SPEECH_ENGINE__SLOTS if that is set."
            raise SynthesisError(ErrorCode.SYNTH_OOM, message, advice) from error
        many = plan.slots > BUCKETS[-1]
        return EngineOptions(
            plan.slots,
            plan.pages,
            self.page_size,
            context,
            frames_per_turn=_WIDE_FRAMES_PER_TURN if many else _FRAMES_PER_TURN,
            admit_turns=_ADMIT_TURNS,
            decode_frames=plan.decode_frames,
            frame_seconds=frame_seconds,
            stream_slots=min(self.streams, plan.slots // 2),
            spare_slots=plan.slots // _SPARE_PART if wide and plan.slots >= BUCKETS[-1] else 0,
            prefill_tokens=_WIDE_PREFILL * plan.slots if many else _DEFAULTS.prefill_tokens,
        )

    def positions(self, max_positions: int, context: int = CONTEXT) -> int:
        """Positions of an utterance at most, of a model that has so many; `context`: where nobody chose."""
        found = min(self.context(context), max_positions)
        if found < _LEAST_CONTEXT:
            message = f"A context of {found} positions is too short for a prompt and a second of speech."
            advice = f"Set SPEECH_ENGINE__MAX_CONTEXT to {_LEAST_CONTEXT} or more, or unset it."
            raise _cannot_run(message, advice)
        return found

    def open_engine(
        self, model: FrameModel, sizes: EngineOptions, stage: CodecStage[Any], codec: str = ""
    ) -> Engine:
        """The engine of a loaded model, whose speech goes on to `stage`. Raises as `open_executor`."""
        executor = open_executor(model, sizes, self.executor, self.reproducible, self.streams)
        room = self.waiting_room or (sizes.slots if model.device.type == "cuda" else _CPU_WAITING_ROOM)
        return Engine(executor, sizes, room, stage, codec)
