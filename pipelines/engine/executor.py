"""What the engine runs frames of: a `FrameModel`, one class for all families; and with what: a `FrameExecutor`.
Which ops that runs is its own matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import PackedRuns, paged_prefill_attention
from kernels.frame import FrameTensors
from kernels.reference import FrameOutput, TokenPositions, run_frame, run_stack
from kernels.registry import to_device
from kernels.sampler import DrawFlags
from pipelines.engine.buckets import buckets_for
from pipelines.engine.state import PagedKV, SlotState
from pipelines.engine.turns import CHUNK_FRAMES, FIRST_FRAMES

#: Rows of every batch on CPU: with one shape for all batches, no row's bits depend on how many rows there
#: are.
CPU_ROWS = 32


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes of the engine. Positions are prompt positions plus frames."""

    slots: int = 32
    pages: int = 1024
    page_size: int = 64
    max_context: int = 8192
    #: Positions of one prefill chunk, and of all chunks of one turn.
    prefill_chunk: int = 256
    prefill_tokens: int = 2048
    #: Frames that a request must have room for before it is let in beside others.
    reserve_frames: int = 64
    #: Frames a scheduling turn; more hide the host, and waste up to that many when a request ends. One while
    #: a stream is alive.
    frames_per_turn: int = 1
    #: Turns that whole utterances may wait for company while most slots are taken: one prefill of many costs
    #: little more than one of one.
    admit_turns: int = 1
    #: Frames that the codec decodes in one batch; None: its own maximum.
    decode_frames: int | None = None
    #: The speech in a frame.
    frame_seconds: float = 0.08
    #: Slots that whole utterances leave free for streams.
    stream_slots: int = 0
    #: Slots beside `slots` whose requests are prefilled and have no row in a frame yet: one of them takes, in
    #: the next turn, the row of a request that has ended.
    spare_slots: int = 0
    #: Whether the executor "auto" may have persistent kernels: there is memory for the weights that they
    #: read.
    persistent: bool = True
    #: Sizes of a stream's chunks, and those of them that the first one may have; see `TurnPlanner`.
    chunk_frames: tuple[int, ...] = CHUNK_FRAMES
    first_frames: tuple[int, ...] = FIRST_FRAMES


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """New positions of one request: embeddings [n, hidden] from position `start` on."""

    slot: int
    start: int
    embeddings: Tensor


@dataclass(frozen=True, slots=True)
class FrameSettings:
    """What the host knows of a batch: its longest context after this frame and what its samplers need."""

    max_length: int
    first: DrawFlags
    residual: DrawFlags

    def later(self, frames: int) -> FrameSettings:
        """The settings that many frames on."""
        return replace(self, max_length=self.max_length + frames)


class FrameModel:
    """An LM that makes one frame of codes a step. Stateless but for its weights: what runs lives in
    `SlotState` and `PagedKV`.

    A family derives from it: it fills in the tensors and says how a prompt is embedded.
    """

    def __init__(self, tensors: FrameTensors, pad_text: int | None = None) -> None:
        """`pad_text`: the text id that is fed once a request's own are used up; None where no text follows
        a prompt."""
        self.tensors = tensors
        self.codebooks = tensors.codebooks
        self.dtype = tensors.head.dtype
        self.device = tensors.head.device
        self._pad_text = pad_text

    def embed(self, prompt: Any, /) -> Tensor:
        """Embeddings [length, hidden] of a prompt; also makes ready what its trailing text needs."""
        raise NotImplementedError

    def embed_all(self, prompts: Sequence[Any]) -> list[Tensor]:
        """`embed` of each. A family whose prompts come often can do it in a few launches for all of them."""
        return [self.embed(prompt) for prompt in prompts]

    def take_text(self, ids: NDArray[np.int64]) -> None:
        """Makes ready what text that comes later needs. Nothing, where no text follows a prompt."""

    def make_kv(self, pages: int, page_size: int) -> PagedKV:
        """Pages for keys and values of the backbone."""
        stack = self.tensors.backbone
        return PagedKV(
            len(stack.layers), pages, stack.kv_heads, page_size, stack.head_dim, self.dtype, self.device
        )

    def make_state(self, slots: int, max_pages: int, max_trailing: int) -> SlotState:
        """The device side of so many slots."""
        tensors = self.tensors
        trailing = 0 if self._pad_text is None else max_trailing
        return SlotState(
            slots, tensors.backbone.hidden, len(tensors.head), max_pages, trailing, self._pad_text or 0, self.dtype, self.device,
            tensors.draw.window,
        )  # fmt: skip

    def prefill(self, runs: Sequence[PrefillRun], state: SlotState, kv: PagedKV) -> None:
        """Writes keys and values of packed runs of prompt positions; nothing is computed beyond the last
        layer's keys and values."""
        counts, starts = [len(run.embeddings) for run in runs], [run.start for run in runs]
        owner = np.repeat(np.arange(len(runs)), counts)
        places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts)])
        slots = to_device(torch.tensor([run.slot for run in runs]), self.device)
        owner, positions = to_device(torch.from_numpy(np.stack((owner, places))), self.device).unbind(0)
        table, scale = state.page_table[slots], self.tensors.backbone.scale
        if self.device.type == "cpu":
            lengths = [start + count for start, count in zip(starts, counts)]

            def attend(layer: int, q: Tensor) -> Tensor:
                return paged_prefill_attention(q, kv.k[layer], kv.v[layer], table, counts, lengths, scale)
        else:
            packed = PackedRuns(table, starts, counts, kv.page_size)

            def attend(layer: int, q: Tensor) -> Tensor:
                return packed.attend(q, kv.k[layer], kv.v[layer], scale)

        pages = TokenPositions(positions, table[owner, positions // kv.page_size], positions % kv.page_size)
        x = torch.cat([run.embeddings for run in runs])
        run_stack(x, self.tensors.backbone, pages, kv.k, kv.v, attend, keys_only_at_the_end=True)

    def frame(
        self,
        rows: Tensor,
        settings: FrameSettings,
        state: SlotState,
        kv: PagedKV,
        forced: Tensor | None = None,
    ) -> FrameOutput:
        """One frame of the slots `rows` [n] (filled up with the dead slot): backbone, draws, next input;
        updates `state`.

        `forced` [n, codebooks] stands in for the drawn codes wherever they are fed back.
        """
        return run_frame(
            self.tensors,
            state.tensors(),
            kv.k,
            kv.v,
            rows,
            settings.max_length,
            settings.first,
            settings.residual,
            forced,
        )


@dataclass(frozen=True, slots=True)
class FrameCodes:
    """Frames on the host. codes: int64 [frames, rows, codebooks]; flags: uint8 [frames, rows] of `ENDED`,
    `NOT_FINITE`."""

    codes: NDArray[np.int64]
    flags: NDArray[np.uint8]


#: Waits for frames that the device may still be making.
PendingFrames = Callable[[], FrameCodes]


class FrameExecutor:
    """Makes frames of a model, of the slots of a `SlotState`."""

    name: str
    #: What its kernels are made with: `fused CUDA`, `Triton`, or `plain` for PyTorch's own.
    kernels: str = "plain"
    #: Whether graphs prefill prompts one after the other in one row, without padding.
    packed: bool = False
    #: The CUDA stream that its caller should be on; None: any.
    stream: torch.cuda.Stream | None = None
    #: Numbers of rows that batches are filled up to, in order.
    batch_sizes: Sequence[int]
    #: Turns that may be under way before the oldest is read: 0 where frames are made at once, 1 to hide the
    #: host behind a GPU.
    lag: int = 1

    def __init__(self, model: FrameModel, sizes: EngineOptions, reproducible: bool) -> None:
        """`reproducible`: whether a request's codes are the same bits alone and in any company."""
        self.reproducible = reproducible
        self._model = model
        self.kv = model.make_kv(sizes.pages, sizes.page_size)
        self.state = model.make_state(
            sizes.slots + sizes.spare_slots, self.kv.pages_for(sizes.max_context), sizes.max_context
        )

    @torch.inference_mode()
    def embed(self, prompt: Any) -> Tensor:
        """Embeddings [length, hidden] of a prompt."""
        return self._model.embed(prompt)

    def embed_all(self, prompts: Sequence[Any]) -> list[Tensor]:
        """`embed` of each, where a device allows it in a few launches for all of them."""
        return [self.embed(prompt) for prompt in prompts]

    @torch.inference_mode()
    def take_text(self, ids: NDArray[np.int64]) -> None:
        """Makes ready what text ids need that come after their request's prompt."""
        self._model.take_text(ids)

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        """Writes keys and values of prompt positions; a slot's pages are already in its table."""
        raise NotImplementedError

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        """Starts `count` frames of these slots; `settings.max_length` holds for the first and grows by one
        a frame."""
        raise NotImplementedError

    def prepare(self) -> bool:
        """Makes one thing ready that later batches are faster with, while nothing else is to do; False
        when there is nothing left."""
        return False


class EagerExecutor(FrameExecutor):
    """PyTorch ops one by one, on any device: the oracle of the other executors.

    On CPU a batch always has `CPU_ROWS` rows (more slots make several batches) and every prompt is
    prefilled alone, so that a request's codes are the same bits alone and in any company.
    """

    name = "eager"

    def __init__(self, model: FrameModel, sizes: EngineOptions) -> None:
        self._on_cpu = model.device.type == "cpu"
        super().__init__(model, sizes, self._on_cpu and torch.get_num_threads() == 1)
        slots = self.state.slots
        self.lag = 0 if self._on_cpu else 1
        self.batch_sizes = range(CPU_ROWS, slots + CPU_ROWS, CPU_ROWS) if self._on_cpu else buckets_for(slots)

    @torch.inference_mode()
    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        for group in [[run] for run in runs] if self._on_cpu else [runs]:
            self._model.prefill(group, self.state, self.kv)

    @torch.inference_mode()
    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        block = CPU_ROWS if self._on_cpu else len(slots)
        parts = [list(slots[start : start + block]) for start in range(0, len(slots), block)]
        rows = [
            torch.tensor(part + [self.state.dead] * (block - len(part)), device=self._model.device)
            for part in parts
        ]
        outputs = [
            self._model.frame(part, settings.later(step), self.state, self.kv)
            for step in range(count)
            for part in rows
        ]
        made = [
            torch.stack([output.codes for output in outputs]).view(count, -1, self._model.codebooks)[
                :, : len(slots)
            ]
        ]
        made.append(torch.stack([output.flags for output in outputs]).view(count, -1)[:, : len(slots)])
        if self._on_cpu:
            return partial(_read, made)
        made = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
            for each in made
        ]
        event = torch.cuda.Event()
        event.record()
        return partial(_read, made, event)


def _read(made: Sequence[Tensor], event: torch.cuda.Event | None = None) -> FrameCodes:
    """Codes and flags that are on their way to the host."""
    if event is not None:
        event.synchronize()
    codes, flags = made
    return FrameCodes(codes.numpy(), flags.numpy())
