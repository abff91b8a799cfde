"""Talker and code predictor: prompts to embeddings, and one frame of codes a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention import attend_padded, padded_places, paged_decode_attention, paged_prefill_attention
from kernels.layers import codec_embedding_sum, rms_norm, rope_table
from kernels.registry import to_device
from kernels.sampler import all_finite, frame_noise, process_first, sample
from kernels.varlen_attention import PackedRuns
from pipelines.engine.executor import ENDED, NOT_FINITE, FrameOutput, FrameSettings, PrefillRun
from pipelines.engine.state import SCRATCH_PAGE, PagedKV, SlotState
from pipelines.nn.stack import TokenPositions, run_stack
from pipelines.qwen3_tts.config import CONTROL_IDS, Qwen3TTSConfig
from pipelines.qwen3_tts.predictor import predictor_frame
from pipelines.qwen3_tts.weights import ModelWeights, TextTable, predictor_inputs

if TYPE_CHECKING:
    from pipelines.qwen3_tts.prompt import Prompt


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
        self._no_starts = torch.zeros_like(weights.codec_starts)
        talker, predictor = config.talker, config.predictor
        self.rope = rope_table(max_context, talker.head_dim, talker.rope_theta, self.dtype, self.device)
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
        codec = codec_embedding_sum(rows[:, :-1], self.weights.codec_table, self._no_starts)
        if prompt.voice_at is not None and prompt.voice is not None:
            codec[prompt.voice_at] = to_device(torch.from_numpy(prompt.voice), self.device).to(self.dtype)
        return self.text.rows[rows[:, -1]] + codec

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
