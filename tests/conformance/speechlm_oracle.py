"""SpeechLM by a plain loop over `transformers`, one request at a time, without an engine: what everything
else is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from kernels.sampler import DrawFlags, frame_noise, sample
from pipelines.nn.checkpoint import Checkpoint
from pipelines.speechlm.config import SpeechLmConfig
from pipelines.speechlm.lm import Script, StreamSampling
from pipelines.speechlm.weights import STREAMS


@dataclass
class Written:
    """What a request wrote: stream-0 ids as golden sets have them, and rows [n, streams] of codec token
    ids."""

    ids: list[int] = field(default_factory=list[int])
    rows: list[list[int]] = field(default_factory=list[list[int]])
    #: Raw logits [streams, layer] of the rows that were drawn, and of the end: main, null and merged.
    logits: list[tuple[Tensor, Tensor | None, Tensor]] = field(
        default_factory=list[tuple[Tensor, "Tensor | None", Tensor]]
    )
    #: Embeddings [positions, hidden] of the prompt, and hidden states [hidden] that the ids came from; of the
    #: null branch, of its rows.
    prompt: Tensor = field(default_factory=lambda: torch.zeros(0))
    states: list[Tensor] = field(default_factory=list[Tensor])
    null_states: list[Tensor] = field(default_factory=list[Tensor])


class Oracle:
    """The decoder of a checkpoint, in float32."""

    def __init__(self, config: SpeechLmConfig) -> None:
        self.config = config
        text = {**config.text_config, "model_type": "qwen3"}
        self.model: Any = Qwen3ForCausalLM._from_config(
            Qwen3Config(**text), attn_implementation="eager"
        ).eval()
        with Checkpoint(config.folder) as checkpoint:
            names = [name for name in checkpoint.left() if name.startswith(("model.", "lm_head."))]
            state = {
                name: checkpoint.take(name, self.model.state_dict()[name].shape, torch.float32)
                for name in names
            }
            self.shifts = checkpoint.take(STREAMS, (config.streams, config.backbone.hidden), torch.float32)
        self.model.load_state_dict(state)
        self.table = state["model.embed_tokens.weight"]
        self.head = state["lm_head.weight"]

    def embed(self, rows: Tensor) -> Tensor:
        """Token ids [n, streams] -> [n, hidden]; a 0 beside the first stream adds nothing."""
        summed = self.table[rows[:, 0]]
        return summed + (self.table[rows[:, 1:]] * (rows[:, 1:] != 0)[..., None]).sum(1)

    @torch.inference_mode()
    def hidden(self, embeddings: Tensor, cache: DynamicCache) -> Tensor:
        """Hidden states [n, hidden] of the next positions."""
        return self.model.model(
            inputs_embeds=embeddings[None], past_key_values=cache, use_cache=True
        ).last_hidden_state[0]

    def stream_logits(self, hidden: Tensor) -> Tensor:
        """Raw logits [streams, layer + 2] of one position over each stream's ids, then eos and eot."""
        config = self.config
        ends = self.head[[config.specials.eos, config.specials.eot]]
        made = []
        for stream in range(config.streams):
            first = config.codec_base_offset + stream * config.codec_layer_size
            shifted = hidden + (self.shifts[stream] if stream else 0)
            made.append(torch.cat((self.head[first : first + config.codec_layer_size], ends)) @ shifted)
        return torch.stack(made)

    def write(self, script: Script) -> Written:
        """A whole request, token after token."""
        config, special = self.config, self.config.specials
        out = Written()
        cache = DynamicCache()
        prompt = self.embed(_column(script.prompt_ids, config.streams))
        for position, rows in script.features:
            prompt[position : position + len(rows)] = rows
        out.prompt = prompt
        hidden = self.hidden(prompt, cache)[-1]
        while len(out.ids) < script.max_tokens:
            token = special.text if not out.ids else self._text(script, hidden, len(out.ids))
            hidden = self._push(out, cache, token, hidden)
            if token == special.eos or (token == special.eot and not script.with_audio):
                return out
            if token == special.eot:
                break
        for token in (special.assistant, special.audio):
            if len(out.ids) < script.max_tokens:
                hidden = self._push(out, cache, token, hidden)
        if out.ids[-1] == special.audio:
            self._audio(script, out, cache, hidden)
        return out

    def _audio(self, script: Script, out: Written, cache: DynamicCache, hidden: Tensor) -> None:
        config, special = self.config, self.config.specials
        null_cache, null = DynamicCache(), None
        if script.cfg > 1:
            before = [special.pad] * (len(script.prompt_ids) + len(out.ids) - 1) + [special.audio]
            null = self.hidden(self.embed(_column(before, config.streams)), null_cache)[-1]
        while len(out.ids) < script.max_tokens:
            main = self.stream_logits(hidden)
            other = None if null is None else self.stream_logits(null)
            merged = main if other is None else script.cfg * main + (1 - script.cfg) * other
            out.logits.append((main, other, merged))
            out.states.append(hidden)
            if null is not None:
                out.null_states.append(null)
            places = self._places(script, merged, len(out.ids), len(out.rows))
            if places[0] >= config.codec_layer_size:
                out.ids.append(special.eos if places[0] == config.codec_layer_size else special.eot)
                return
            row = [
                config.codec_base_offset + stream * config.codec_layer_size + place
                for stream, place in enumerate(places)
            ]
            out.ids.append(row[0])
            out.rows.append(row)
            embedded = self.embed(torch.tensor([row]))
            hidden = self.hidden(embedded, cache)[-1]
            null = None if null is None else self.hidden(embedded, null_cache)[-1]

    def _places(self, script: Script, merged: Tensor, index: int, row: int) -> list[int]:
        logits = merged.clone()
        logits[1:, -2:] = float("-inf")
        if row < script.min_rows:
            logits[0, -2:] = float("-inf")
        noise = frame_noise(torch.tensor([script.seed]), torch.tensor([index]), self.config.streams)[0]
        return drawn(logits, noise, script.audio).tolist()

    def _text(self, script: Script, hidden: Tensor, index: int) -> int:
        config, special = self.config, self.config.specials
        ids = torch.tensor(
            [*range(config.text_token_offset, config.text_token_end), special.eos, special.eot]
        )
        logits = (self.head[ids] @ hidden)[None]
        noise = frame_noise(torch.tensor([script.seed]), torch.tensor([index]), config.streams)[0, :1]
        if script.text.top_k and script.text.temperature:
            # The engine draws among the likeliest, sorted, and the two ends.
            best = logits[0, :-2].topk(script.text.top_k)
            kept = torch.cat((best.indices, torch.tensor([len(ids) - 2, len(ids) - 1])))
            return int(ids[kept[drawn(logits[:, kept], noise, script.text)[0]]])
        return int(ids[drawn(logits, noise, script.text)[0]])

    def _push(self, out: Written, cache: DynamicCache, token: int, state: Tensor) -> Tensor:
        """Writes a token that came from a state, and returns the next one."""
        out.ids.append(token)
        out.states.append(state)
        return self.hidden(self.embed(_column([token], self.config.streams)), cache)[-1]


def drawn(logits: Tensor, noise: Tensor, how: StreamSampling) -> Tensor:
    """One place of each row [n, places]."""
    count = len(logits)
    greedy = how.temperature == 0
    settings = (
        torch.full((count,), how.temperature or 1.0),
        torch.full((count,), how.top_k),
        torch.full((count,), how.top_p),
        torch.full((count,), greedy),
    )
    flags = DrawFlags(min(how.top_k, logits.shape[1]), how.top_p < 1, greedy)
    return sample(logits.float(), noise, settings, flags)


def _column(ids: Any, streams: int) -> Tensor:
    """Stream-0 ids with nothing beside them: [n, streams]."""
    return F.pad(torch.tensor(list(ids))[:, None], (0, streams - 1))
