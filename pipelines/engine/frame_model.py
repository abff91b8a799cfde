"""A model as the engine runs it: the tensors of its frame, and how its prompts become embeddings. One
class for all families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from pipelines.engine.state import PagedKV, SlotState


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

    def embed(self, prompt: Any) -> Tensor:
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
        self.write(torch.cat([run.embeddings for run in runs]), pages, kv, attend)

    def write(
        self, x: Tensor, places: TokenPositions, kv: PagedKV, attend: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Writes the keys and values of embeddings [positions, hidden] at these places; attend: (layer,
        queries) -> what they see."""
        run_stack(x, self.tensors.backbone, places, kv.k, kv.v, attend, keys_only_at_the_end=True)

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
