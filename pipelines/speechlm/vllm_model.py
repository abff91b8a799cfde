"""The backbone as a model of vLLM: a Qwen3 whose vocabulary also has the ids of the streams, and a sampler of
all streams.

For each row the sampler draws the text or all streams with the noise of the row's request. It applies
guidance to pairs.
"""

# vLLM is an extra, so its imports are checked only if it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from kernels.registry import to_device
from kernels.sampler import DrawFlags, frame_noise, sample
from pipelines.engine.state import Placement, SamplingParams, SlotState
from pipelines.speechlm.config import SpeechLmConfig
from pipelines.speechlm.lm import ENDED_BY_EOT, ENDED_BY_LIMIT, StreamSampling
from pipelines.speechlm.weights import EMBEDDING, HEAD, STREAMS
from pipelines.vllm_engine.frames import FrameModel, FrameState, FrameStep
from pipelines.vllm_engine.library import Half, Matched, half_of, match

_NEVER = float("-inf")
#: A row with a top_k up to this is drawn from this number of the likeliest text ids.
_CANDIDATES = 64


#: The sampling of requests without settings, such as those with which vLLM warms up its kernels.
_GREEDY = StreamSampling(0.0, 0)


class _Settings(NamedTuple):
    """The sampling settings of a running request, and its half if it belongs to a pair."""

    text: StreamSampling = _GREEDY
    audio: StreamSampling = _GREEDY
    half: Half | None = None

    @property
    def wide(self) -> bool:
        """Whether its text is drawn from all ids, not only from the likeliest."""
        return self.text.temperature > 0 and not 0 < self.text.top_k <= _CANDIDATES


class SpeechLmState(FrameState):
    """The state of the running requests. `pipelines.speechlm.lm.Script` sets the keys of
    `TokenRequest.extra`."""

    def begin(self) -> None:
        slots = self.max_num_reqs
        device = self.device
        self._config = self.model.speechlm
        #: Seeds; positions of the first row of audio; minimum rows of audio; settings of the text (`first`)
        #: and of audio (`residual`).
        self.drawing = SlotState(slots, 1, 1, 1, 0, 0, torch.float32, device)
        self._unused = torch.zeros(1, device=device)
        #: For each slot: the position from which its noise counts, and its maximum rows of audio.
        self.origins, self.max_rows = torch.zeros(2, slots, dtype=torch.int64, device=device)
        #: For each slot: whether it draws audio; whether its text is drawn from all ids (`_Settings.wide`).
        self.speaks, self.wide = torch.zeros(2, slots, dtype=torch.bool, device=device)
        special = self._config.specials
        #: Ids of the ends, and of all text. They are on the device from the start, because a copy would
        #: block.
        self._ends_ids = torch.tensor((special.eos, special.eot), device=device)
        self._text_ids = torch.arange(
            self._config.text_token_offset, self._config.text_token_end, device=device
        )
        self._settings = [_Settings()] * slots
        #: For each slot whose prompt is not computed beyond its recordings: (first position, rows [n,
        #: hidden]) of each recording.
        self._features = dict[int, list[tuple[int, Tensor]]]()

    def admit(self, slot: int, prompt: list[int], written: int, sampling: Any) -> None:
        extra = sampling.extra_args or {}
        length = len(prompt)
        text, audio = (StreamSampling(*extra.get(kind, _GREEDY)) for kind in ("text", "audio"))
        settings = _Settings(text, audio, half_of(extra))
        draws = SamplingParams(*text, 1.0, *audio, min_new_tokens=extra.get("min_rows", 0))
        seed = sampling.seed or 0
        self.drawing.place([Placement(slot, (), seed, draws, np.zeros(0, np.int64), self._unused, length)])
        self._settings[slot] = settings
        self.origins[slot] = extra.get("noise_origin", length)
        self.max_rows[slot] = extra.get("max_rows", 1)
        self.speaks[slot], self.wide[slot] = "audio" in extra, settings.wide
        self._features[slot] = []
        for position, data in extra.get("features", ()):
            rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, self.inputs_embeds_size)
            self._features[slot].append((position, rows.to(self.device, self.dtype)))

    def embed(self, ids: Tensor, codes: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        return self.model.embed_frames(ids, codes.long())

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """See vLLM's `ModelState`. Features of recordings replace the embeddings of their markers."""
        inputs = super().prepare_inputs(input_batch, req_states)
        embeds = inputs["inputs_embeds"]
        for slot, features in list(self._features.items()):
            for row in np.flatnonzero(input_batch.idx_mapping_np[: input_batch.num_reqs] == slot):
                begin, end = input_batch.query_start_loc_np[row : row + 2].tolist()
                last = int(input_batch.seq_lens_cpu_upper_bound[row])
                first = last - (end - begin)
                shift = end - last
                for position, rows in features:
                    low = max(position, first)
                    high = min(position + len(rows), last)
                    if low < high:
                        embeds[low + shift : high + shift] = rows[low - position : high - position]
                if all(position + len(rows) <= first for position, rows in features):
                    del self._features[slot]
        return inputs

    def draw(self, logits: Tensor, hidden: Tensor, step: FrameStep) -> tuple[Tensor, Tensor]:
        """See `FrameState.draw`."""
        # Random words that depend only on the request's seed, the position in its output, and the stream.
        noise = frame_noise(
            self.drawing.seeds[step.slots], step.positions - self.origins[step.slots], self._config.streams
        )
        settings = [self._settings[slot] for slot in step.slots_host.tolist()]
        # float32 [n, streams * layer + 2]: lm_head(h + stream_emb[s]) in the places of stream s.
        rows = functional.linear(hidden.float(), self.model.frame_head, self.model.frame_bias)
        pairs = match([row.half for row in settings], step.positions_host, step.whole_host)
        both = self._merge(rows, pairs)
        audio = self._draw_audio(rows, step, noise, settings)
        text = self._draw_text(logits, step, noise[:, 0], settings)
        full = step.positions - self.drawing.positions[step.slots] >= self.max_rows[step.slots]
        token, codes = self._assemble(self.speaks[step.slots], text, audio, full)
        if both is not None:
            mains, nulls = both
            token[nulls], codes[nulls] = token[mains], codes[mains]
        if pairs.broken:
            token[to_device(pairs.broken, self.device)] = self._config.specials.pad
        return token, codes

    def _merge(self, rows: Tensor, pairs: Matched) -> tuple[Tensor, Tensor] | None:
        """Applies guidance to the float32 logits of main rows in place. Returns the rows of both halves; None
        if there are no pairs."""
        if not pairs.mains:
            return None
        mains, nulls, scales = (
            to_device(part, self.device) for part in (pairs.mains, pairs.nulls, pairs.scales)
        )
        rows[mains] = scales[:, None] * rows[mains] + (1 - scales[:, None]) * rows[nulls]
        return mains, nulls

    def _draw_audio(self, rows: Tensor, step: FrameStep, noise: Tensor, settings: list[_Settings]) -> Tensor:
        """Indices [n, streams] into the ids of each stream. After them, stream 0 has two more: eos and
        eot."""
        count = len(rows)
        streams = self._config.streams
        layer = self._config.codec_layer_size
        logits = rows.new_full((count, streams, layer + 2), _NEVER)
        logits[:, :, :layer] = rows[:, :-2].view(count, streams, layer)
        drawing = self.drawing
        early = step.positions - drawing.positions[step.slots] < drawing.min_new_tokens[step.slots]
        logits[:, 0, layer:] = rows[:, -2:].masked_fill(early[:, None], _NEVER)
        sampling = [setting.repeat_interleave(streams) for setting in drawing.residual.rows(step.slots)]
        flags = DrawFlags.of([row.audio for row in settings])
        drawn = sample(logits.view(count * streams, layer + 2), noise.reshape(-1), sampling, flags)
        # NaN logits may draw any index, and the embedding table may lack a row for an index beyond a stream's
        # ids.
        drawn = drawn.view(count, streams)
        return torch.cat((drawn[:, :1], drawn[:, 1:].clamp(max=layer - 1)), 1)

    def _draw_text(self, logits: Tensor, step: FrameStep, noise: Tensor, settings: list[_Settings]) -> Tensor:
        """Text ids, eos or eot [n]. A row whose top_k allows it is drawn only from the likeliest ids, because
        the vocabulary is large."""
        start = self._config.text_token_offset
        span = logits[:, start : self._config.text_token_end]
        ends = logits.index_select(1, self._ends_ids)
        flags = DrawFlags.of([row.text for row in settings])
        # The number does not depend on other rows, because the order and the number of candidates change a
        # draw.
        likeliest, places = span.topk(min(_CANDIDATES, span.shape[1]), dim=-1)
        token = self._drawn(likeliest, places + start, ends, step, noise, flags)
        if any(row.wide for row in settings):
            whole = self._drawn(span, self._text_ids.expand_as(span), ends, step, noise, flags)
            token = torch.where(self.wide[step.slots], whole, token)
        return token

    def _drawn(
        self, logits: Tensor, ids: Tensor, ends: Tensor, step: FrameStep, noise: Tensor, flags: DrawFlags
    ) -> Tensor:
        """One of `ids` [n, candidates] or of the two ends for each row."""
        candidates = torch.cat((logits, ends), 1).float()
        place = sample(candidates, noise, self.drawing.first.rows(step.slots), flags)
        return torch.cat((ids, self._ends_ids.expand(len(ids), 2)), 1).gather(1, place[:, None])[:, 0]

    def _assemble(self, speaks: Tensor, text: Tensor, audio: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        """The token [n] and the codes [n, width] of each row, from its text or its audio. `audio`: the drawn
        indices; `full`: whether a row has its maximum of audio."""
        eos = self._config.specials.eos
        layer = self._config.codec_layer_size
        ended = (audio[:, 0] >= layer) | full
        first = torch.where(ended, eos, audio[:, 0] + self._config.codec_base_offset)
        codes = torch.where((speaks & ~ended)[:, None], audio[:, 1:] + 1, 0)
        marks = torch.where(full, ENDED_BY_LIMIT, (audio[:, 0] == layer + 1).long() * ENDED_BY_EOT)
        codes[:, 0] += marks * (speaks & ended)
        return torch.where(speaks, first, text), codes


class SpeechLmForCausalLM(FrameModel, Qwen3ForCausalLM):
    """The decoder. The codes beside a token are those of the streams from 1 on: 1 + the index in the stream's
    ids, or 0 for none.

    The codec's rows of the embedding and the head are copied to tensors of their own. A step therefore
    gathers and multiplies 8,202 rows instead of eight times 160,392, every rank of a tensor-parallel group
    has all of these rows, and logits of audio are float32 for weights of any type.
    """

    state_class = SpeechLmState

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.speechlm = SpeechLmConfig.from_folder(Path(vllm_config.model_config.model))
        self.width = self.speechlm.streams - 1
        rows = self.speechlm.streams * self.speechlm.codec_layer_size
        hidden = self.speechlm.backbone.hidden
        dtype = vllm_config.model_config.dtype
        #: [1 + width * layer, hidden]: row 0 is zero, for tokens without a code.
        self.frame_embedding = _parameter(
            torch.zeros(1 + rows - self.speechlm.codec_layer_size, hidden, dtype=dtype)
        )
        #: float32 [streams * layer + 2, hidden] and its bias: every stream's ids, then eos and eot for stream
        #: 0.
        self.frame_head = _parameter(torch.zeros(rows + 2, hidden, dtype=torch.float32))
        self.frame_bias = _parameter(torch.zeros(rows + 2, dtype=torch.float32))

    def embed_frames(self, ids: Tensor, codes: Tensor) -> Tensor:
        """Sum of the embeddings of a token [n] and of its codes [n, width]: [n, hidden]."""
        offsets = torch.arange(self.width, device=codes.device) * self.speechlm.codec_layer_size
        places = torch.where(codes > 0, codes + offsets, 0)
        return self.embed_input_ids(ids) + functional.embedding_bag(
            places, self.frame_embedding, mode="sum", padding_idx=0
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the decoder's tensors; vLLM does not run the tower and the codec."""
        held = dict[str, Tensor]()

        def decoder() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in (EMBEDDING, HEAD, STREAMS):
                    held[name] = tensor
                if name == HEAD or name.startswith("model."):
                    yield name, tensor

        loaded = super().load_weights(decoder())
        config = self.speechlm
        head = held[HEAD]
        layer = config.codec_layer_size
        self.frame_embedding.data[1:] = held[EMBEDDING][config.codec_base_offset + layer : config.codec_end]
        self.frame_head.data[:-2] = head[config.codec_base_offset : config.codec_end]
        self.frame_head.data[-2:] = head[[config.specials.eos, config.specials.eot]]
        shifts = held[STREAMS].to(self.frame_head.device).float()
        for stream in range(1, config.streams):
            rows = slice(stream * layer, (stream + 1) * layer)
            self.frame_bias.data[rows] = self.frame_head[rows] @ shifts[stream]
        return loaded | {"frame_embedding", "frame_head", "frame_bias"}


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
