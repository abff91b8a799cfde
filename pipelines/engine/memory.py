"""How many slots and KV pages a GPU's memory holds: arithmetic on bytes, without a device."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from pipelines.codec.decoder import BATCH_FRAMES
from pipelines.engine.buckets import BUCKETS, WIDE_BUCKETS, Prefill, buckets_for, prefill_graphs
from pipelines.errors import ConfigError, ErrorCode

#: Share of the free memory that an engine takes where nobody says how much; the rest is for what the allocator cannot use.
DEFAULT_SHARE = 0.9
#: Positions that the default keeps for every slot: 30 s of speech, its text and a recording of 5 s. KV pages are taken as they are needed,
#: and an utterance that finds none starts again later.
TYPICAL_POSITIONS = 512
#: Positions for every slot below which a number that was asked for is refused.
LEAST_POSITIONS = 256
#: The codec's largest batch takes this part of the memory, but has at least so many frames; a multiple of the step.
_DECODE_PART, _LEAST_DECODE_FRAMES, _FRAME_STEP = 8, 512, 64
#: CUDA's context and libraries; workspaces and inputs of all graphs of an engine of 512 slots, and of each one more. Measured on an
#: H200: 0.85 GiB, and 1.2 GiB for 19 graphs.
LIBRARY_BYTES, _GRAPH_BYTES, _MORE_GRAPH_BYTES = 1 << 30, 3 << 29, 1 << 26
_DEFAULT_GRAPHS = len(BUCKETS) + prefill_graphs("padded")
#: Beyond the typical positions of all slots, where there are more than 512 by default: further pages, and what the codec's allocator keeps.
#: A job of 1,024 slots on an H200 took 45 GB of the GPU for all but its pages.
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
    prefill: Prefill = "auto",
    wide: bool = False,
) -> MemoryPlan:
    """Sizes of an engine that may take `budget` bytes.

    Without `slots` it has the largest bucket of which every slot has room for a typical utterance; with `wide` also those above 512, where
    much memory is left beside them. Half of what is left becomes further pages, so that long utterances fit beside each other; the other
    half is for batches of the codec that the allocator keeps.
    Raises `ConfigError` (`config.invalid`) where the model, or so many slots, do not fit, and says how many do.
    """
    decode_frames = _decode_frames(budget, needs)
    # The allocator keeps blocks of batches of other lengths: the codec takes about twice its largest batch.
    free = budget - LIBRARY_BYTES - _GRAPH_BYTES - needs.weights - 2 * decode_frames * needs.decoded_frame

    def holds(positions: int, beside: int = 0) -> int:
        """The largest number of slots with room for so many positions each, and so many bytes beside them."""
        each = math.ceil(min(positions, max_context) / page_size) * needs.page
        tried = range(1, free // (needs.slot + each) + 1)
        return bisect_right(tried, free - beside, key=lambda count: slots_bytes(needs, count, prefill) + count * each)

    most = holds(LEAST_POSITIONS)
    if most < 1:
        message = f"The model does not fit into the GPU's memory: it needs {gib(budget - free)}, and the engine may take {gib(budget)}."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Use a larger GPU, or raise SPEECH_ENGINE__MEMORY_SHARE if that is set.")
    if slots is None:
        typical = max(holds(TYPICAL_POSITIONS), 1)
        slots = max(bucket for bucket in BUCKETS if bucket <= typical)
        if wide:
            roomy = holds(TYPICAL_POSITIONS, _WIDE_ROOM)
            slots = max([slots, *(bucket for bucket in WIDE_BUCKETS if bucket <= roomy)])
    elif slots > most:
        message = f"{slots} slots do not fit into the GPU's memory: the engine may take {gib(budget)}, which hold {most} slots."
        advice = f"Set SPEECH_ENGINE__SLOTS to {most} or less, or unset it; or raise SPEECH_ENGINE__MEMORY_SHARE if that is set."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, advice)
    room = (free - slots_bytes(needs, slots, prefill)) // needs.page
    return MemoryPlan(slots, pages or _pages(room, slots, page_size, max_context), decode_frames)


def slots_bytes(needs: MemoryNeeds, slots: int, prefill: Prefill = "auto") -> int:
    """Bytes of so many slots without their pages, and of what graphs take beyond those of an engine as it is by default.

    Every bucket has buffers of its own. A slot counts for `_SLOT_ROWS` rows in them, which is less than all buckets have where there are
    many large ones, or where the largest is far above the slots.
    """
    buckets = buckets_for(slots)
    graphs = max(len(buckets) + prefill_graphs(prefill) - _DEFAULT_GRAPHS, 0)
    return max(slots * needs.slot, math.ceil(sum(buckets) * needs.slot / _SLOT_ROWS)) + graphs * _MORE_GRAPH_BYTES


def _pages(room: int, slots: int, page_size: int, max_context: int) -> int:
    """KV pages for so many slots where `room` fit: what they typically need, and half of the rest, up to all that they could ever need."""
    typical = slots * math.ceil(min(TYPICAL_POSITIONS, max_context) / page_size)
    return min(room if room <= typical else typical + (room - typical) // 2, slots * math.ceil(max_context / page_size))


def _decode_frames(budget: int, needs: MemoryNeeds) -> int:
    frames = budget // _DECODE_PART // needs.decoded_frame
    return min(max(frames - frames % _FRAME_STEP, _LEAST_DECODE_FRAMES), BATCH_FRAMES)


def gib(size: int) -> str:
    """Bytes in words."""
    return f"{size / 2**30:.1f} GiB"
