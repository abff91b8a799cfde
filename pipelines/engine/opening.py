"""Opens engines: chooses their sizes by the memory of the device, and the executor of a model's frames."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

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
from pipelines.errors import ConfigError, ErrorCode, SynthesisError, invalid
from pipelines.nn.config_keys import StackConfig
from pipelines.options import CONTEXT, Count, ModelOptions

if TYPE_CHECKING:
    from pipelines.engine.graph import GraphExecutor

log = logging.getLogger(__name__)

#: A stack of layers, configured or loaded.
Stack = StackConfig | StackTensors

#: Names of executors.
ExecutorKind = Literal["auto", "eager", "graph", "megakernel"]
_CPU_SLOTS = 32
_CPU_KV_BYTES = 1 << 30
#: Minimum positions of a sequence; fewer have no room for a prompt and a second of speech.
_MIN_CONTEXT = 64
#: `EngineOptions.admit_turns` on a GPU.
_ADMIT_TURNS = 4
#: Frames of a turn on a GPU: with up to 512 slots, and with more, when one frame takes longer than the host's
#: work.
_FRAMES_PER_TURN = 2
_WIDE_FRAMES_PER_TURN = 1
#: Prompt positions that a turn prefills for each slot, if there are more than 512 slots.
_WIDE_PREFILL = 12
#: Number of slots for each spare slot, if there are 512 slots or more. So there are more spare slots
#: than utterances that end while new requests are gathered.
_SPARE_PART = 8
#: Default share of the free memory that an engine takes; the rest is for memory that the allocator cannot
#: use, and for the processes of meters.
DEFAULT_SHARE = 0.85
#: Positions for every slot by default: 30 s of speech, its text and a recording of 5 s. KV pages are taken
#: when they are needed, and an utterance that gets no page is restarted later.
TYPICAL_POSITIONS = 512
#: Minimum positions for every slot, below which a configured number of slots is refused.
MIN_POSITIONS = 256
#: The codec's largest batch takes an eighth of the memory. Minimum number of its frames, and the step by which
#: that number grows.
_DECODE_PART = 8
_MIN_DECODE_FRAMES = 512
_FRAME_STEP = 64
#: Bytes of CUDA's context and libraries; bytes of the workspaces and inputs of all graphs of an engine of 512
#: slots, and of each further graph. Measured on an H200: 0.85 GiB, and 1.2 GiB for 19 graphs.
LIBRARY_BYTES = 1 << 30
_GRAPH_BYTES = 3 << 29
_MORE_GRAPH_BYTES = 1 << 26
#: Bytes that must be left for more than 512 slots by default: for further pages, and for memory that the
#: allocator keeps for the codec. A job of 1,024 slots on an H200 took 45 GB without its pages.
_WIDE_ROOM = 32 << 30
#: `MemoryNeeds.slot` counts this many rows for a slot in the buffers of all graphs together.
_SLOT_ROWS = 3


class MemoryNeeds(NamedTuple):
    """The GPU memory that a model needs, in bytes."""

    #: Weights of the model and its codec, and tensors derived from them.
    weights: int
    #: A slot: its state, and its rows in the buffers of all graphs.
    slot: int
    #: A page of the KV cache.
    page: int
    #: A frame of the codec's batch.
    decoded_frame: int


def plan_memory(
    budget: int,
    needs: MemoryNeeds,
    page_size: int,
    max_context: int,
    slots: int | None = None,
    pages: int | None = None,
    wide: bool = False,
) -> EngineOptions:
    """Sizes of an engine that may take `budget` bytes.

    Without `slots`, the number of slots is the largest bucket in which every slot has room for a typical
    utterance; it exceeds 512 only if `wide` is set and much memory is left. Half of the remaining memory
    becomes further pages, so that several long utterances fit; the other half is left for memory that the
    allocator keeps for batches of the codec. Raises `ConfigError` (`config.invalid`) with the number of slots
    that fit, if the model or `slots` do not fit.
    """
    decode_frames = budget // _DECODE_PART // needs.decoded_frame
    decode_frames = min(max(decode_frames - decode_frames % _FRAME_STEP, _MIN_DECODE_FRAMES), BATCH_FRAMES)
    # The allocator keeps blocks of batches of other lengths, so the codec takes about twice its largest batch.
    free = budget - LIBRARY_BYTES - _GRAPH_BYTES - needs.weights - 2 * decode_frames * needs.decoded_frame

    def holds(positions: int, beside: int = 0) -> int:
        """The maximum number of slots with this many positions each, with `beside` bytes left."""
        each = math.ceil(min(positions, max_context) / page_size) * needs.page
        tried = range(1, free // (needs.slot + each) + 1)
        return bisect_right(tried, free - beside, key=lambda count: slots_bytes(needs, count) + count * each)

    maximum = holds(MIN_POSITIONS)
    if maximum < 1:
        raise invalid(
            f"The model does not fit into the GPU's memory: it needs {gib(budget - free)}, and the engine may take {gib(budget)}.",
            "Use a larger GPU, or raise SPEECH_ENGINE__MEMORY_SHARE if that is set.",
        )
    if slots is None:
        typical = max(holds(TYPICAL_POSITIONS), 1)
        slots = max(bucket for bucket in BUCKETS if bucket <= typical)
        if wide:
            roomy = holds(TYPICAL_POSITIONS, _WIDE_ROOM)
            slots = max([slots, *(bucket for bucket in WIDE_BUCKETS if bucket <= roomy)])
    elif slots > maximum:
        raise invalid(
            f"{slots} slots do not fit into the GPU's memory: the engine may take {gib(budget)}, which hold {maximum} slots.",
            f"Set SPEECH_ENGINE__SLOTS to {maximum} or less, or unset it; or raise SPEECH_ENGINE__MEMORY_SHARE if that is set.",
        )
    if pages is None:
        # The pages of typical utterances and half of the rest, up to the maximum that the slots can use.
        room = (free - slots_bytes(needs, slots)) // needs.page
        typical = slots * math.ceil(min(TYPICAL_POSITIONS, max_context) / page_size)
        pages = min(
            room if room <= typical else typical + (room - typical) // 2,
            slots * math.ceil(max_context / page_size),
        )
    return EngineOptions(slots, pages, page_size, max_context, decode_frames=decode_frames)


def slots_bytes(needs: MemoryNeeds, slots: int) -> int:
    """Bytes of slots without their pages, and of the graphs beyond those of 512 slots.

    Every bucket has its own buffers. Their rows are counted as `_SLOT_ROWS` for each slot, or exactly if that
    is more: many buckets may be large, or the largest one far above the number of slots.
    """
    buckets = buckets_for(slots)
    more = max(len(buckets) - len(BUCKETS), 0)
    return (
        max(slots * needs.slot, math.ceil(sum(buckets) * needs.slot / _SLOT_ROWS)) + more * _MORE_GRAPH_BYTES
    )


def gib(size: int) -> str:
    """Formats bytes as GiB."""
    return f"{size / 2**30:.1f} GiB"


@contextmanager
def explain_oom() -> Iterator[None]:
    """Raises `SynthesisError` (`synth.oom`) instead of an out-of-memory error while a model is opened."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise SynthesisError(
            ErrorCode.SYNTH_OOM,
            f"The GPU ran out of memory while the model was opened: {first_line(error)}.",
            "End other programs on the GPU, or lower SPEECH_ENGINE__SLOTS or SPEECH_ENGINE__MEMORY_SHARE.",
        ) from error


def check_executor(
    device: torch.device,
    kind: ExecutorKind,
    reproducible: bool,
    page_size: int,
    stacks: Sequence[Stack],
) -> None:
    """Raises `ConfigError` (`config.invalid`) for an executor that does not work on a device or with a model of
    these stacks, before weights are loaded."""
    on_gpu = device.type == "cuda"
    graphs = kind in ("graph", "megakernel")
    eager = "Set SPEECH_ENGINE__EXECUTOR to eager, or unset it"
    if graphs and not on_gpu:
        raise invalid(f"The {kind} executor needs a CUDA device.", f"{eager}.")
    if reproducible and on_gpu and kind in ("eager", "megakernel"):
        raise invalid(
            f"The {kind} executor is not reproducible on a GPU.",
            "Set SPEECH_ENGINE__EXECUTOR to graph, or unset it; or unset SPEECH_ENGINE__REPRODUCIBLE.",
        )
    if on_gpu and kind != "eager" and (page_size > LARGEST_PAGE or page_size & (page_size - 1)):
        raise invalid(
            f"The kernels of graphs need a page_size that is a power of two up to {LARGEST_PAGE}; page_size is {page_size}.",
            "Leave the option page_size out, or set it to 64.",
        )
    if on_gpu and (graphs or reproducible):
        if fault := _unsupported_heads(stacks):
            raise invalid(
                f"The graph executor cannot run this model. {fault}",
                f"{eager}, and unset SPEECH_ENGINE__REPRODUCIBLE.",
            )
        if fault := triton_fault():
            raise _no_graphs(fault)


def _unsupported_heads(stacks: Sequence[Stack]) -> str | None:
    faults = (fused_fault(stack.heads, stack.kv_heads, stack.head_dim) for stack in stacks)
    return next((fault for fault in faults if fault is not None), None)


def _no_graphs(fault: str) -> ConfigError:
    return invalid(f"The graph executor cannot run here. {fault}", TRITON_ADVICE)


def open_executor(
    model: FrameModel,
    sizes: EngineOptions,
    kind: ExecutorKind = "auto",
    reproducible: bool = False,
    streams: int = 0,
    few: bool = False,
) -> FrameExecutor:
    """Opens the executor of a model. "auto" means graphs on a CUDA device, with persistent kernels for one and
    two rows if they were measured faster (`may_be_persistent`) and `sizes` have memory for them; else eager.

    Captures the graphs that are needed first. With `streams` captures all graphs, unless `few`, and gives
    frames priority on the device. If the kernels of graphs cannot be made, "auto" falls back to eager with a warning. Raises
    `ConfigError` (`config.invalid`) if graphs, or `reproducible` on a GPU, were asked for and cannot run.
    """
    device = model.device
    stacks = model.tensors.stacks
    check_executor(device, kind, reproducible, sizes.page_size, stacks)
    if kind == "eager" or device.type != "cuda":
        return EagerExecutor(model, sizes)
    with on_device(device):
        unsupported = _unsupported_heads(stacks)
        fault = unsupported or triton_fault()
        if fault is None:
            persistent = kind == "megakernel" or (
                sizes.persistent
                and may_be_persistent(kind, reproducible, streams > 0, device)
                and lm_persistent.predictor_config(model.tensors) is not None
            )
            try:
                executor = graph_executor(model, sizes, reproducible, streams > 0, persistent=persistent)
                executor.warm(everything=streams > 0 and not few)
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
        fault, "" if unsupported else TRITON_ADVICE,
    )  # fmt: skip
    return EagerExecutor(model, sizes)


def may_be_persistent(kind: ExecutorKind, reproducible: bool, streams: bool, device: torch.device) -> bool:
    """Whether a model may use the persistent kernels: if they are asked for, or by default if they were
    measured faster on such a device.

    They are not the default for streams, where they delay the codec's first chunk (docs/adr/0009).
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
    """Makes the graph executor of a model, or the `MegakernelExecutor` if `persistent`. Needs Triton and a CUDA
    device."""
    if persistent:
        from pipelines.engine.megakernel import MegakernelExecutor as Chosen
    else:
        from pipelines.engine.graph import GraphExecutor as Chosen
    return Chosen(model, sizes, reproducible, first_on_device)


#: Maximum requests that wait for a slot on a CPU.
_CPU_WAITING_ROOM = 64


@dataclass(frozen=True, slots=True)
class NativeModelOptions(ModelOptions):
    """Options of a checkpoint whose LM runs on the native engine; None selects the best value for the
    device."""

    #: "eager": PyTorch ops one by one; "graph": CUDA graphs of fused kernels; "megakernel": graphs with
    #: persistent kernels for one or two utterances of Qwen3-TTS. "auto": graphs on a CUDA device with Triton,
    #: with those kernels if they were measured faster.
    executor: ExecutorKind = "auto"
    #: Maximum streams at once; this many slots, up to half of all slots, are reserved for them. On a GPU all
    #: kernels and graphs are compiled and captured before the pipeline is open, which takes a while.
    streams: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: With streams: whether only the graphs that every batch can use are captured before the pipeline is open,
    #: and the others by need.
    few_graphs: bool = False
    #: Number of KV pages, and positions of each page.
    pages: Count | None = None
    page_size: Count = 64
    #: Whether speech that repeats itself or is much longer than its text is ended early, with `synth.runaway`.
    runaway_guard: bool = True

    def plan(
        self,
        needs: MemoryNeeds,
        device: torch.device,
        max_positions: int,
        context: int = CONTEXT,
        frame_seconds: float = EngineOptions().frame_seconds,
        wide: bool = False,
    ) -> EngineOptions:
        """Sizes of the engine of a model that is not loaded yet.

        context: default number of positions; wide: allows more than 512 slots by default, and spare slots,
        which were measured faster for such models.

        Raises `ConfigError` (`config.invalid`) for slots that do not fit into the GPU's memory, and for a
        context that is too short for any prompt; `SynthesisError` (`synth.oom`) if they would fit without the
        other programs on the GPU.
        """
        context = self.positions(max_positions, context)
        if not self.decodes:
            needs = needs._replace(decoded_frame=1)
        if device.type == "cpu":
            slots = self.slots or _CPU_SLOTS
            needed = slots * math.ceil(context / self.page_size)
            pages = self.pages or max(1, min(_CPU_KV_BYTES // needs.page, needed))
            streams = min(self.streams, slots // 2)
            return EngineOptions(
                slots, pages, self.page_size, context, frame_seconds=frame_seconds, stream_slots=streams
            )

        share = self.memory_share

        def planned(free: int) -> EngineOptions:
            budget = int(DEFAULT_SHARE * free) if share is None else min(int(share * total), free)
            return plan_memory(budget, needs, self.page_size, context, self.slots, self.pages, wide)

        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        # PyTorch's allocator would else keep what the meters' processes need.
        limit = (
            (torch.cuda.memory_reserved(device) + DEFAULT_SHARE * free) / total if share is None else share
        )
        if share is not None or self.slots is None:
            limit = max(limit - LIBRARY_BYTES / total, 0.0)
            torch.cuda.set_per_process_memory_fraction(limit, device.index)
        try:
            plan = planned(free)
        except ConfigError as error:
            # Raises `ConfigError` if the slots would not fit into an unused GPU either, whose memory CUDA
            # itself uses in part.
            planned(total - LIBRARY_BYTES)
            raise SynthesisError(
                ErrorCode.SYNTH_OOM,
                f"Another program fills the GPU: {gib(free)} of its {gib(total)} are free, too little for this engine.",
                "End that program (`nvidia-smi` shows it), use another GPU, or lower SPEECH_ENGINE__SLOTS if that is set.",
            ) from error
        many = plan.slots > BUCKETS[-1]
        return replace(
            plan,
            frames_per_turn=_WIDE_FRAMES_PER_TURN if many else _FRAMES_PER_TURN,
            admit_turns=_ADMIT_TURNS,
            frame_seconds=frame_seconds,
            stream_slots=min(self.streams, plan.slots // 2),
            spare_slots=plan.slots // _SPARE_PART if wide and plan.slots >= BUCKETS[-1] else 0,
            prefill_tokens=_WIDE_PREFILL * plan.slots if many else plan.prefill_tokens,
        )

    def positions(self, max_positions: int, context: int = CONTEXT) -> int:
        """The maximum positions of an utterance, up to the model's `max_positions`; `context`: the default."""
        found = min(self.context(context), max_positions)
        if found < _MIN_CONTEXT:
            raise invalid(
                f"A context of {found} positions is too short for a prompt and a second of speech.",
                f"Set SPEECH_ENGINE__MAX_CONTEXT to {_MIN_CONTEXT} or more, or unset it.",
            )
        return found

    def waiting(self, device: torch.device, slots: int) -> int:
        """The maximum number of requests that wait for a slot."""
        return self.waiting_room or (slots if device.type == "cuda" else _CPU_WAITING_ROOM)

    def open_engine(
        self, model: FrameModel, sizes: EngineOptions, stage: CodecStage, codec: str = ""
    ) -> Engine:
        """Opens the engine of a loaded model, whose codes `stage` decodes. Raises like `open_executor`."""
        sizes = replace(sizes, runaway_guard=self.runaway_guard and not self.keep_unfinished)
        executor = open_executor(
            model, sizes, self.executor, self.reproducible, self.streams, self.few_graphs
        )
        return Engine(executor, sizes, self.waiting(model.device, sizes.slots), stage, codec)
