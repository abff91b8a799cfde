"""Talker and code predictor: prompts to embeddings, and one frame of codes a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels.attention import attend_padded, padded_places, paged_decode_attention, paged_prefill_attention
from kernels.layers import LAYER_TENSORS, codec_embedding_sum, rms_norm, rope, rope_table, swiglu
from kernels.registry import op, to_device
from kernels.sampler import all_finite, frame_noise, process_first, sample
from kernels.varlen_attention import PackedRuns
from pipelines.engine.executor import ENDED, NOT_FINITE, FrameOutput, FrameSettings, PrefillRun
from pipelines.engine.state import LARGEST_PAGE, SCRATCH_PAGE, PagedKV, SlotState
from pipelines.nn.stack import TokenPositions, run_stack
from pipelines.qwen3_tts.config import CONTROL_IDS, Qwen3TTSConfig
from pipelines.qwen3_tts.weights import ModelWeights, TextTable, predictor_inputs

if TYPE_CHECKING:
    from pipelines.qwen3_tts.prompt import Prompt


@op(
    "predictor_frame(Tensor hidden, Tensor first, Tensor[] weights, Tensor norm, Tensor heads, Tensor inputs, Tensor starts, "
    "Tensor rope_table, int kv_heads, float eps, float scale, Tensor random, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor greedy, int max_top_k, bool any_top_p, bool all_greedy, Tensor? forced=None) -> (Tensor, Tensor, Tensor)"
)
def predictor_frame(
    hidden: Tensor,
    first: Tensor,
    weights: list[Tensor],
    norm: Tensor,
    heads: Tensor,
    inputs: Tensor,
    starts: Tensor,
    rope_table: Tensor,
    kv_heads: int,
    eps: float,
    scale: float,
    random: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    greedy: Tensor,
    max_top_k: int,
    any_top_p: bool,
    all_greedy: bool,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs all residual codebooks of a frame; the cache of its 16 positions lives only here.

    hidden: [n, width], the talker's state, already projected; first: int64 [n], codebook 0; weights: `LAYER_TENSORS` of every layer;
    norm: [width]; heads: [residuals, codes, width]; inputs: [rows, width], projected embeddings of all codebooks one after the
    other; starts: [codebooks], the first row of each; rope_table: [>= codebooks, head_dim]; random: int64 [n, residuals];
    sampling settings as in `sample`; forced: int64 [n, codebooks] to feed instead of what was drawn.
    Returns codes int64 [n, codebooks], finite: bool [n], and float32 logits [residuals, n, codes].
    """
    residuals = heads.shape[0]
    head_dim = rope_table.shape[1]
    cache = hidden.new_empty(2, len(weights) // len(LAYER_TENSORS), hidden.shape[0], kv_heads, residuals + 1, head_dim)
    codes = [first]
    finite = torch.ones_like(greedy)
    kept = []
    x = torch.stack((hidden, inputs[first + starts[0]]), dim=1)
    for step in range(residuals):
        out = _forward(x, 0 if step == 0 else step + 1, weights, cache, rope_table, eps, scale)
        logits = functional.linear(rms_norm(out[:, -1], norm, eps), heads[step]).float()
        finite &= all_finite(logits)
        kept.append(logits)
        code = sample(logits, random[:, step], temperature, top_k, top_p, greedy, max_top_k, any_top_p, all_greedy)
        codes.append(code)
        fed = code if forced is None else forced[:, step + 1]
        x = inputs[fed + starts[step + 1]][:, None]
    return torch.stack(codes, dim=1), finite, torch.stack(kept)


def _forward(x: Tensor, start: int, weights: list[Tensor], cache: Tensor, table: Tensor, eps: float, scale: float) -> Tensor:
    """All layers over the new positions from `start` on; x: [n, new, width] -> [n, new, width]."""
    rows, new, _ = x.shape
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    angles = table[start : start + new].repeat(rows, 1)
    end = start + new
    for layer in range(cache.shape[1]):
        input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down = weights[
            layer * len(LAYER_TENSORS) : (layer + 1) * len(LAYER_TENSORS)
        ]
        packed = functional.linear(rms_norm(x, input_norm, eps), qkv).view(rows * new, -1, head_dim)
        q, k, v = packed.split((packed.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        keys, values = cache[0, layer], cache[1, layer]
        keys[:, :, start:end] = rope(rms_norm(k, k_norm, eps), angles).view(rows, new, kv_heads, head_dim).transpose(1, 2)
        values[:, :, start:end] = v.reshape(rows, new, kv_heads, head_dim).transpose(1, 2)
        q = rope(rms_norm(q, q_norm, eps), angles).view(rows, new, -1, head_dim).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], is_causal=new > 1, scale=scale, enable_gqa=True
        )
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), o)
        x = x + functional.linear(swiglu(functional.linear(rms_norm(x, post_norm, eps), gate_up)), down)
    return x


class Qwen3TTSModel:
    """The `FrameModel` of Qwen3-TTS. Stateless but for its weights: what runs lives in `SlotState` and `PagedKV`."""

    def __init__(self, config: Qwen3TTSConfig, weights: ModelWeights, max_context: int) -> None:
        self.config = config
        self.weights = weights
        self.codebooks = config.codebooks
        self.dtype = weights.codec_table.dtype
        self.device = weights.codec_table.device
        self.text = TextTable(weights.talker)
        self._codec_starts = weights.codec_starts.to("cpu")
        talker, predictor = config.talker, config.predictor
        # Prompts are filled up to whole pages, and a context may end within one.
        self.rope = rope_table(max_context + LARGEST_PAGE, talker.head_dim, talker.rope_theta, self.dtype, self.device)
        self._predictor_rope = rope_table(config.codebooks, predictor.head_dim, predictor.rope_theta, self.dtype, self.device)
        self._predictor_layers = [tensor for layer in weights.predictor.stack.layers for tensor in layer.tensors()]
        self._predictor_inputs = predictor_inputs(weights)
        self.text.ensure(torch.tensor([config.ids.tts_pad]))

    def make_kv(self, pages: int, page_size: int) -> PagedKV:
        talker = self.config.talker
        return PagedKV(talker.layers, pages, talker.kv_heads, page_size, talker.head_dim, self.dtype, self.device)

    def make_state(self, slots: int, max_pages: int, max_trailing: int) -> SlotState:
        talker = self.config.talker
        pad = self.config.ids.tts_pad
        return SlotState(slots, talker.hidden, talker.vocab, max_pages, max_trailing, pad, self.dtype, self.device)

    def embed(self, prompt: Prompt) -> Tensor:
        """Embeddings [length, hidden] of a prompt: projected text, plus the sum of its codec embeddings, plus the voice vector."""
        text, codes = torch.from_numpy(prompt.text), torch.from_numpy(prompt.codes)
        trailing = torch.from_numpy(prompt.trailing)
        self.text.ensure(torch.cat((text[text >= 0], trailing)))
        codec_rows = torch.where(codes >= 0, codes + self._codec_starts, len(self.weights.codec_table) - 1)
        text_rows = torch.where(text >= 0, text, self.config.text_vocab)
        rows = to_device(torch.cat((codec_rows, text_rows[:, None]), dim=1), self.device)
        codec = self.weights.codec_table[rows[:, :-1]].sum(dim=1)
        if prompt.voice_at is not None and prompt.voice is not None:
            codec[prompt.voice_at] = to_device(torch.from_numpy(prompt.voice), self.device).to(self.dtype)
        return self.text.rows[rows[:, -1]] + codec

    def take_text(self, ids: NDArray[np.int64]) -> None:
        """As `FrameModel` says."""
        self.text.ensure(torch.from_numpy(ids))

    def prefill(self, runs: Sequence[PrefillRun], state: SlotState, kv: PagedKV) -> None:
        """Writes keys and values of packed runs; nothing is computed beyond the last layer's keys and values."""
        counts, starts = [len(run.embeddings) for run in runs], [run.start for run in runs]
        owner = np.repeat(np.arange(len(runs)), counts)
        places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts)])
        slots = to_device(torch.tensor([run.slot for run in runs]), self.device)
        owner, positions = to_device(torch.from_numpy(np.stack((owner, places))), self.device).unbind(0)
        table = state.page_table[slots]
        if self.device.type == "cpu":
            lengths = [start + count for start, count in zip(starts, counts)]

            def attend(layer: int, q: Tensor) -> Tensor:
                return paged_prefill_attention(q, kv.k[layer], kv.v[layer], table, counts, lengths, self.config.talker.scale)
        else:
            packed = PackedRuns(table, starts, counts, kv.page_size)

            def attend(layer: int, q: Tensor) -> Tensor:
                return packed.attend(q, kv.k[layer], kv.v[layer], self.config.talker.scale)

        self._talker(
            torch.cat([run.embeddings for run in runs]),
            TokenPositions(positions, table[owner, positions // kv.page_size], positions % kv.page_size),
            kv,
            attend,
            keys_only=True,
        )

    def prefill_padded(self, embeddings: Tensor, pages: Tensor, counts: Tensor, start: int, kv: PagedKV) -> None:
        """`prefill` of new positions from `start` on, in shapes that depend on no prompt, so that it can be captured; see `FrameModel`."""
        places = TokenPositions(*padded_places(pages, counts, embeddings.shape[1], start, kv.page_size, SCRATCH_PAGE))

        def attend(layer: int, q: Tensor) -> Tensor:
            return attend_padded(q, kv.k[layer], kv.v[layer], pages, start, self.config.talker.scale)

        self._talker(embeddings.flatten(0, 1), places, kv, attend, keys_only=True)

    def frame(self, rows: Tensor, settings: FrameSettings, state: SlotState, kv: PagedKV, forced: Tensor | None = None) -> FrameOutput:
        """One frame of the slots `rows` [n]: talker step, codebook 0, the predictor's codebooks, the next input."""
        hidden = self._talker_step(rows, settings, state, kv)
        logits = functional.linear(hidden, self.weights.talker.head).float()
        frames = state.frames[rows]
        noise = frame_noise(state.seeds[rows], frames, self.codebooks)
        end = self.config.ids.eos
        processed = process_first(
            logits, state.seen[rows], state.penalty[rows], frames < state.min_new_tokens[rows], end, self._suppress_from
        )
        flags = settings.first
        drawn = sample(processed, noise[:, 0], *state.first.rows(rows), flags.max_top_k, flags.any_top_p, flags.all_greedy)
        first = drawn if forced is None else forced[:, 0]
        codes, finite, residual = self._predict(hidden, first, noise[:, 1:], rows, settings, state, forced)
        self._advance(rows, codes if forced is None else forced, state)
        failed = ~(finite & all_finite(logits))
        codes[:, 0] = drawn
        status = (drawn == end).to(torch.uint8) * ENDED + failed.to(torch.uint8) * NOT_FINITE
        return FrameOutput(codes, status, logits, hidden, residual)

    @property
    def _suppress_from(self) -> int:
        return self.config.talker.vocab - CONTROL_IDS

    def _talker_step(self, rows: Tensor, settings: FrameSettings, state: SlotState, kv: PagedKV) -> Tensor:
        """The talker's state [n, hidden], after the final norm, at the position of each row's input."""
        positions, table = state.positions[rows], state.page_table[rows]
        pages = table.gather(1, (positions // kv.page_size)[:, None])[:, 0]
        lengths = torch.where(rows == state.dead, 0, positions + 1)
        out = self._talker(
            state.inputs[rows],
            TokenPositions(positions, pages, positions % kv.page_size),
            kv,
            lambda layer, q: paged_decode_attention(
                q, kv.k[layer], kv.v[layer], table, lengths, settings.max_length, self.config.talker.scale
            ),
        )
        return rms_norm(out, self.weights.talker.stack.norm, self.config.talker.eps)

    def _talker(self, x: Tensor, places: TokenPositions, kv: PagedKV, attend, keys_only: bool = False) -> Tensor:
        return run_stack(x, self.weights.talker.stack, self.config.talker.eps, self.rope, places, kv.k, kv.v, attend, keys_only)

    def _predict(
        self, hidden: Tensor, first: Tensor, noise: Tensor, rows: Tensor, settings: FrameSettings, state: SlotState, forced: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        predictor, flags = self.config.predictor, settings.residual
        return predictor_frame(
            self.weights.predictor.project(hidden),
            first,
            self._predictor_layers,
            self.weights.predictor.stack.norm,
            self.weights.predictor.heads,
            self._predictor_inputs,
            self.weights.codec_starts,
            self._predictor_rope,
            predictor.kv_heads,
            predictor.eps,
            predictor.scale,
            noise,
            *state.residual.rows(rows),
            flags.max_top_k,
            flags.any_top_p,
            flags.all_greedy,
            forced,
        )

    def _advance(self, rows: Tensor, codes: Tensor, state: SlotState) -> None:
        """Writes the next input, position and history of each row; the dead slot stays where it is."""
        alive = (rows != state.dead).long()
        frames = state.frames[rows]
        text = state.trailing[rows, frames.clamp(max=state.trailing.shape[1] - 1)]
        state.inputs[rows] = codec_embedding_sum(codes, self.weights.codec_table, self.weights.codec_starts) + self.text.rows[text]
        state.positions[rows] += alive
        state.frames[rows] += alive
        state.seen[rows, codes[:, 0]] = True
