"""The interface between the engine and models: `FrameModel`, one class for all families, and `FrameExecutor`,
which runs its frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention import PackedRuns, paged_prefill_attention
from kernels.frame import FrameTensors
from kernels.reference import FrameOutput, backbone_step, draw_frame, run_stack
from kernels.registry import to_device
from kernels.sampler import DrawFlags
from pipelines.engine.buckets import buckets_for
from pipelines.engine.state import PagedKV, SamplingParams, SlotState
from pipelines.engine.turns import CHUNK_FRAMES, FIRST_FRAMES
from pipelines.request import IntArray

#: Rows of every batch on a CPU: with one shape, a row's bits do not depend on the number of rows.
CPU_ROWS = 32


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes of the engine. The positions of a sequence are those of its prompt and of its frames."""

    slots: int = 32
    pages: int = 1024
    page_size: int = 64
    max_context: int = 8192
    #: Maximum positions of one prefill chunk, and of all chunks of one turn.
    prefill_chunk: int = 256
    prefill_tokens: int = 2048
    #: Number of frames for which there must be room to admit a request while others run.
    reserve_frames: int = 64
    #: Frames of a turn; always 1 while a stream is alive. More of them hide the host's work, but all frames
    #: of a turn after the end of a request are wasted.
    frames_per_turn: int = 1
    #: Maximum turns that a whole utterance waits to be admitted together with others while most slots are
    #: taken: a prefill of many costs little more than a prefill of one.
    admit_turns: int = 1
    #: Maximum frames of the codec's batches; None: the codec's default.
    decode_frames: int | None = None
    #: Seconds of speech in a frame.
    frame_seconds: float = 0.08
    #: Slots reserved for streams.
    stream_slots: int = 0
    #: Additional slots for prefilled requests that wait for a row in the frames. When a request ends, one of
    #: them takes its row in the next turn.
    spare_slots: int = 0
    #: Whether there is memory for the weights of persistent kernels, so that the executor "auto" may use them.
    persistent: bool = True
    #: Sizes of a stream's chunks, and possible sizes of its first one; see `TurnPlanner`.
    chunk_frames: tuple[int, ...] = CHUNK_FRAMES
    first_frames: tuple[int, ...] = FIRST_FRAMES
    #: Whether speech that repeats itself or does not end is ended early, see `RunawayGuard`.
    runaway_guard: bool = False


class PrefillRun(NamedTuple):
    """Embeddings [n, hidden] of one request's positions from `start` on."""

    slot: int
    start: int
    embeddings: Tensor


class FrameSettings(NamedTuple):
    """The longest context of a batch after this frame, and the settings of its samplers."""

    max_length: int
    samplings: Sequence[SamplingParams]


class FrameModel:
    """An LM that makes one frame of codes per step. Requests' states are in `SlotState` and `PagedKV`.

    Families derive from it: they provide the tensors and embed prompts.
    """

    def __init__(self, tensors: FrameTensors, pad_text: int | None = None) -> None:
        """`pad_text`: the text id that is used after the end of a request's text; None if no text follows a
        prompt."""
        self.tensors = tensors
        self.codebooks = tensors.codebooks
        self.dtype = tensors.head.dtype
        self.device = tensors.head.device
        self._pad_text = pad_text

    def embed(self, prompt: Any, /) -> Tensor:
        """Embeddings [length, hidden] of a prompt. Also prepares the text that follows the prompt."""
        raise NotImplementedError

    def embed_all(self, prompts: Sequence[Any]) -> list[Tensor]:
        """Embeds several prompts. Families can override it to use fewer launches."""
        return [self.embed(prompt) for prompt in prompts]

    def take_text(self, ids: IntArray) -> None:
        """Prepares text ids that follow a prompt."""

    def make_kv(self, pages: int, page_size: int) -> PagedKV:
        """Makes the pages for keys and values of the backbone."""
        return PagedKV(self.tensors.backbone, pages, page_size)

    def make_state(self, slots: int, max_pages: int, max_trailing: int) -> SlotState:
        """Makes the device's state of `slots` slots."""
        tensors = self.tensors
        trailing = 0 if self._pad_text is None else max_trailing
        return SlotState(
            slots, tensors.backbone.hidden, len(tensors.head), max_pages, trailing, self._pad_text or 0, self.dtype, self.device,
            tensors.draw.window,
        )  # fmt: skip

    def prefill(self, runs: Sequence[PrefillRun], state: SlotState, kv: PagedKV) -> None:
        """Writes keys and values of packed runs of prompt positions; computes nothing after the last layer's
        keys and values."""
        counts = [len(run.embeddings) for run in runs]
        starts = [run.start for run in runs]
        owner = np.repeat(np.arange(len(runs)), counts)
        places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts)])
        slots = to_device([run.slot for run in runs], self.device)
        owner, positions = to_device(np.stack((owner, places)), self.device).unbind(0)
        table = state.page_table[slots]
        if self.device.type == "cpu":
            lengths = [start + count for start, count in zip(starts, counts)]
            attend = partial(paged_prefill_attention, page_table=table, rows=counts, lengths=lengths)
        else:
            attend = PackedRuns(table, starts, counts, kv.page_size).attend
        pages = positions, table[owner, positions // kv.page_size], positions % kv.page_size
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
        """Makes one frame of the slots `rows` [n] (padded with the dead slot) and updates `state`.

        `forced` [n, codebooks] replaces the drawn codes wherever they are fed back.
        """
        tensors = self.tensors
        hidden = backbone_step(tensors.backbone, state.tensors, kv.k, kv.v, rows, settings.max_length)
        own = settings.samplings
        first = DrawFlags.of([(s.temperature, s.top_k, s.top_p) for s in own])
        others = DrawFlags.of([(s.residual_temperature, s.residual_top_k, s.residual_top_p) for s in own])
        return draw_frame(tensors, state.tensors, rows, hidden, first, others, forced)


class FrameCodes(NamedTuple):
    """Frames on the host. codes: int64 [frames, rows, codebooks]; flags: uint8 [frames, rows] of `ENDED` and
    `NOT_FINITE`; log_probabilities: float32 [frames, rows] of codebook 0, see `kernels.sampler.log_probability`."""

    codes: IntArray
    flags: NDArray[np.uint8]
    log_probabilities: NDArray[np.float32]


#: Waits for frames that were started, and returns them.
PendingFrames = Callable[[], FrameCodes]


class FrameExecutor:
    """Runs frames of a model for the slots of a `SlotState`."""

    name: str
    #: The kind of its kernels: `fused CUDA`, `Triton`, or `plain` for PyTorch's own.
    kernels: str = "plain"
    #: Whether prompts are prefilled one after another in one row, without padding.
    packed: bool = False
    #: The CUDA stream that its caller must use; None: any.
    stream: torch.cuda.Stream | None = None
    #: Numbers of rows that batches are padded to, ascending.
    batch_sizes: Sequence[int]
    #: Maximum turns that are pending after a step of the engine: 0 if frames are made synchronously, 1 to
    #: overlap the host's work with the GPU's.
    lag: int = 1

    def __init__(self, model: FrameModel, sizes: EngineOptions, reproducible: bool) -> None:
        """`reproducible`: whether the bits of a request's codes do not depend on its batch."""
        self.reproducible = reproducible
        self._model = model
        self.kv = model.make_kv(sizes.pages, sizes.page_size)
        self.state = model.make_state(
            sizes.slots + sizes.spare_slots, self.kv.pages_for(sizes.max_context), sizes.max_context
        )

    @torch.inference_mode()
    def embed(self, prompts: Sequence[Any]) -> list[Tensor]:
        """Embeddings [length, hidden] of prompts, in few launches if possible."""
        return [self._model.embed(prompt) for prompt in prompts]

    @torch.inference_mode()
    def take_text(self, ids: IntArray) -> None:
        """Prepares text ids that follow a prompt."""
        self._model.take_text(ids)

    def prefill(self, runs: Sequence[PrefillRun]) -> None:
        """Writes keys and values of prompt positions; the slots' pages are already in their tables."""
        raise NotImplementedError

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        """Starts `count` frames of these slots; `settings` are those of the first frame."""
        raise NotImplementedError

    def prepare(self) -> bool:
        """Prepares one thing that makes later batches faster, such as a graph; called while the engine is
        idle. Returns False if nothing is left to prepare."""
        return False


class EagerExecutor(FrameExecutor):
    """Runs PyTorch ops one by one, on any device; the reference for the other executors.

    On a CPU every batch has `CPU_ROWS` rows (more slots make several batches) and every prompt is prefilled
    alone, so that the bits of a request's codes do not depend on its batch.
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
            self._model.frame(
                part, settings._replace(max_length=settings.max_length + step), self.state, self.kv
            )
            for step in range(count)
            for part in rows
        ]
        codes = torch.stack([output.codes for output in outputs]).view(count, -1, self._model.codebooks)
        flags = torch.stack([output.flags for output in outputs]).view(count, -1)
        own = torch.stack([output.log_probabilities for output in outputs]).view(count, -1)
        made = [each[:, : len(slots)] for each in (codes, flags, own)]
        event = None
        if not self._on_cpu:
            made = [
                torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
                for each in made
            ]
            event = torch.cuda.Event()
            event.record()
        return partial(_read, made, event)


def _read(made: Sequence[Tensor], event: torch.cuda.Event | None) -> FrameCodes:
    """Reads frames once their transfer is complete."""
    if event is not None:
        event.synchronize()
    codes, flags, log_probabilities = made
    return FrameCodes(codes.numpy(), flags.numpy(), log_probabilities.numpy())
