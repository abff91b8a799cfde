"""What the engine runs frames with: a `FrameExecutor`. Which ops that runs is its own matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.engine.buckets import buckets_for
from pipelines.engine.frame_model import FrameModel, FrameSettings, PrefillRun
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
