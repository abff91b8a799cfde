"""The dual AR of Fish Speech S2 on our engine: the slow AR as a frame's backbone, the fast AR as its depth, and prompts to embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.frame import DepthTensors, DrawRules, Feedback, FrameTensors, StackTensors
from kernels.reference import next_inputs
from kernels.registry import to_device
from pipelines.engine.frame_model import FrameModel
from pipelines.engine.state import LARGEST_PAGE
from pipelines.fish_speech.config import FishConfig, StackConfig
from pipelines.fish_speech.frame import WINDOW
from pipelines.fish_speech.prompt import Prompt
from pipelines.fish_speech.weights import FAST, SLOW, NormedSource, projection_name, rotary_table, take_stack
from pipelines.nn.checkpoint import Checkpoint
from pipelines.nn.stack import StackWeights

#: Kernels take heads of a multiple of so many rows.
_ROW_STEP = 64


@dataclass(frozen=True, slots=True)
class LmWeights:
    """Both transformers, and their tables."""

    slow: StackWeights
    fast: StackWeights
    #: [vocabulary, dim], the embeddings of all ids and the head that draws them.
    embeddings: Tensor
    #: [codebooks * codes, dim]: what the codes of a frame add to the slow AR's input.
    codebooks: Tensor
    #: [codes, fast dim] each: the fast AR's inputs, and its head.
    inputs: Tensor
    output: Tensor
    #: Weight [fast dim, dim] and bias, where the fast AR has another width.
    project: tuple[Tensor, Tensor] | None


def take_weights(source: NormedSource, config: FishConfig, dtype: torch.dtype, device: torch.device | str) -> LmWeights:
    """Reads both transformers. Raises `ModelError` (`model.bad_checkpoint`) that names the tensor at fault."""
    slow, fast = config.slow, config.fast

    def take(name: str, *shape: int) -> Tensor:
        return source.take(name, shape, dtype, device)

    project = None
    if fast.dim != slow.dim:
        place = FAST + projection_name(source)
        project = take(f"{place}.weight", fast.dim, slow.dim), take(f"{place}.bias", fast.dim)
    return LmWeights(
        slow=take_stack(source, SLOW, slow, dtype, device),
        fast=take_stack(source, FAST, fast, dtype, device),
        embeddings=take(f"{SLOW}embeddings.weight", slow.vocab, slow.dim),
        codebooks=take(f"{FAST}codebook_embeddings.weight", fast.vocab * config.codebooks, slow.dim),
        inputs=take(f"{FAST}embeddings.weight", fast.vocab, fast.dim),
        output=take(f"{FAST}output.weight", fast.vocab, fast.dim),
        project=project,
    )


def load_weights(config: FishConfig, dtype: torch.dtype, device: torch.device) -> LmWeights:
    """The dual AR of a checkpoint folder. Raises as `take_weights`, and for a tensor too many."""
    with Checkpoint.open(config.folder) as checkpoint:
        weights = take_weights(checkpoint, config, dtype, device)
        checkpoint.finish()
    return weights


class FishModel(FrameModel):
    """A Qwen3 whose input at speech positions is a token and the codes of its frame, all scaled.

    Code 0 of a frame counts the semantic tokens; the one after them is the end.
    """

    def __init__(self, config: FishConfig, weights: LmWeights, max_context: int) -> None:
        super().__init__(_frame_tensors(config, weights, max_context))
        self._semantic = config.semantic
        self._embeddings = weights.embeddings

    def embed(self, prompt: Prompt) -> Tensor:
        """Embeddings [length, dim] of a prompt."""
        ids = np.asarray(prompt.ids, np.int64)
        made = self._embeddings[to_device(torch.from_numpy(ids), self.device)]
        if len(prompt.codes):
            spoken = np.flatnonzero((ids >= self._semantic.start) & (ids < self._semantic.stop))
            places, codes = (to_device(torch.from_numpy(part), self.device) for part in (spoken, prompt.codes))
            made[places] = next_inputs(self.tensors.feedback, codes, codes[:, 0])
        return made


def _frame_tensors(config: FishConfig, weights: LmWeights, max_context: int) -> FrameTensors:
    """Views of the weights, but for the head and the depth's inputs."""
    semantic, device = len(config.semantic), weights.embeddings.device
    drawn = weights.embeddings[torch.tensor([*config.semantic, config.end], device=device)]
    head = functional.pad(drawn, (0, 0, 0, -len(drawn) % _ROW_STEP))
    # A broken row draws any row of the head before it is noticed, so each of them has an input.
    inputs = functional.pad(weights.inputs, (0, 0, 0, max(len(head) - len(weights.inputs), 0)))
    codebook = torch.arange(config.codebooks, device=device)
    behind = config.codebooks - 1
    return FrameTensors(
        # Prompts are filled up to whole pages, and a context may end within one.
        backbone=_stack(weights.slow, config.slow, max_context + LARGEST_PAGE),
        head=head,
        draw=DrawRules((semantic,), semantic + 1, nucleus_first=True, window=WINDOW),
        feedback=Feedback(
            weights.codebooks, codebook * config.fast.vocab, head, text_by_code=True, scale=1 / math.sqrt(config.codebooks + 1)
        ),
        depth=DepthTensors(
            _stack(weights.fast, config.fast, config.codebooks),
            weights.output.expand(behind, -1, -1),
            inputs,
            torch.zeros_like(codebook),
            weights.project,
        ),
    )


def _stack(weights: StackWeights, config: StackConfig, positions: int) -> StackTensors:
    table = torch.cat(rotary_table(positions, config.head_dim, config.rope_base), dim=1).to(weights.norm.device, weights.norm.dtype)
    return weights.tensors(config, table, wide_rope=True)
