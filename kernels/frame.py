"""The tensors of a frame: an LM over positions (the backbone) with its head, and an LM over the other
codebooks (the depth).

Every frame draws code 0 of each row from the head, the other codebooks from the depth if there is one, and
turns them into the backbone's next input. The types are the same for all families of models; each family
fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

#: Maximum query heads for each kv head in the fused kernels.
LARGEST_GROUP = 16


class Layer(NamedTuple):
    """The weights of one decoder layer. `qkv` and `gate_up` are published matrices concatenated along the
    rows."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    #: Weights [head_dim] of the RMSNorm of every head; None if the model has none.
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None


class StackTensors(NamedTuple):
    """A stack of decoder layers; rope_table: [positions, head_dim], cosines and sines side by side."""

    layers: Sequence[Layer]
    norm: Tensor
    rope_table: Tensor
    heads: int
    kv_heads: int
    eps: float
    scale: float
    #: Whether rotary embedding is computed in float32 and rounded once; otherwise every product is rounded.
    wide_rope: bool = False

    @property
    def head_dim(self) -> int:
        return self.rope_table.shape[1]

    @property
    def hidden(self) -> int:
        return self.norm.shape[0]

    @property
    def inner(self) -> int:
        return self.layers[0].down.shape[1]


def fused_fault(heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Why the fused kernels cannot run a stack with these heads, as a sentence, or None."""
    if head_dim < 16 or head_dim & (head_dim - 1):
        return f"The fused kernels need heads whose size is a power of two, 16 or more; this model's is {head_dim}."
    if heads % kv_heads or heads // kv_heads > LARGEST_GROUP:
        return (
            f"The fused kernels need up to {LARGEST_GROUP} query heads for each kv head, the same number for each; "
            f"this model has {heads} for {kv_heads}."
        )
    return None


class DepthTensors(NamedTuple):
    """The LM over the codebooks after code 0. Its cache of keys and values is kept for one frame only.

    Its first position is the backbone's state, projected if `project` (weight [width, hidden], bias [width])
    is given; its next positions are the codes. heads: [codebooks - 1, codes, width]; inputs: [rows,
    width], the codes' embeddings; starts: int64 [codebooks], the first row of each codebook.
    """

    stack: StackTensors
    heads: Tensor
    inputs: Tensor
    starts: Tensor
    project: tuple[Tensor, Tensor] | None = None


class DrawRules(NamedTuple):
    """How code 0 is drawn, the same for every request. Codes from `suppress_from` on, except `ends`, are never
    drawn."""

    #: One or two codes that end the speech.
    ends: tuple[int, ...]
    suppress_from: int
    #: If true: first top-p on the probabilities without temperature, then top-k by rank, then temperature;
    #: top-p drops the code that crosses its limit. Otherwise: temperature, then top-k, then top-p, which keeps
    #: the code that crosses its limit. Applies to the depth as well.
    nucleus_first: bool = False
    #: Number of recent frames whose code 0 should not be repeated: a repeated one is drawn once more, with the
    #: settings of a retry. A request's first code does not count.
    window: int = 0


class Feedback(NamedTuple):
    """The next input: (the sum of one row of `table` [rows, hidden] for each codebook + a row of `text`) *
    scale.

    starts: int64 [codebooks], the first row of each codebook. text: [ids, hidden], indexed by the request's
    text id for this frame, or by code 0 if `text_by_code`; None: no text is added.
    """

    table: Tensor
    starts: Tensor
    text: Tensor | None = None
    text_by_code: bool = False
    scale: float = 1.0


class FrameTensors(NamedTuple):
    """All weights of a frame. head: [codes, hidden], the rows that can be drawn, padded with rows that are
    never drawn."""

    backbone: StackTensors
    head: Tensor
    draw: DrawRules
    feedback: Feedback
    depth: DepthTensors | None = None

    @property
    def stacks(self) -> list[StackTensors]:
        return [self.backbone] if self.depth is None else [self.backbone, self.depth.stack]

    @property
    def codebooks(self) -> int:
        return 1 if self.depth is None else 1 + self.depth.heads.shape[0]


class DrawTensors(NamedTuple):
    """Sampler settings, one row for each slot. `greedy` is bool or uint8."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    greedy: Tensor

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """temperature, top_k, top_p, greedy (bool) of these slots, in the order of the sampler's
        arguments."""
        return self.temperature[rows], self.top_k[rows], self.top_p[rows], self.greedy[rows] != 0


class StateTensors(NamedTuple):
    """The state of all slots on the device, as in `pipelines.engine.state.SlotState`. `seen` is bool or uint8."""

    inputs: Tensor
    positions: Tensor
    frames: Tensor
    seeds: Tensor
    page_table: Tensor
    trailing: Tensor
    seen: Tensor
    penalty: Tensor
    min_new_tokens: Tensor
    first: DrawTensors
    residual: DrawTensors
    #: int64 [slots, window]: code 0 of the most recent frames, -1 for none.
    recent: Tensor
    #: Number of the slot that no request uses.
    dead: int
