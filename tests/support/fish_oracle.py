"""The dual AR of Fish Speech S2 as a plain loop over one sequence: what every engine is measured against.

Written from the description of the model alone and shares no code with the product: neighbours are rotated
as pairs, tables are rounded to bfloat16, every frame recomputes the whole fast AR, and sampling sorts the
whole vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

#: Uniform numbers of a draw: (step, what, values) -> [values]; `what` is 0 and 1 for the two slow draws, 1 +
#: i for code i.
Noise = Callable[[int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One column: the token, its codes, and what made them."""

    column: list[int]
    token_a: int
    token_b: int
    window: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    """One sequence; columns [1 + codebooks, n] with the last one, and the states (behind the final norm)
    that made each of them."""

    steps: list[Step]
    columns: Tensor
    hidden: Tensor
    logits: Tensor
    ended: bool


class Stack:
    """One of the two transformers."""

    def __init__(
        self, weights: dict[str, Tensor], prefix: str, config: dict, eps: float, base: float, positions: int
    ) -> None:
        self.weights, self.prefix, self.config, self.eps = weights, prefix, config, eps
        frequencies = 1.0 / base ** (torch.arange(0, config["head_dim"], 2).float() / config["head_dim"])
        angles = torch.arange(positions).float()[:, None] * frequencies
        self.cos, self.sin = (table.to(torch.bfloat16).float() for table in (angles.cos(), angles.sin()))

    def weight(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}{name}.weight"]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """x: [T, heads, head_dim], pairs of neighbours."""
        cos, sin = (table[start : start + len(x), None] for table in (self.cos, self.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

    def __call__(self, x: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """x: [T, dim] -> behind the final norm; a cache has the keys and values of what came before, and
        is grown."""
        heads, few, width = (self.config[name] for name in ("n_head", "n_local_heads", "head_dim"))
        start = cache[0][0].shape[0] if cache else 0
        grown: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.config["n_layer"]):
            at = f"layers.{layer}."
            packed = self.norm(x, self.weight(f"{at}attention_norm")) @ self.weight(f"{at}attention.wqkv").T
            q, k, v = packed.view(len(x), -1, width).split((heads, few, few), dim=1)
            if self.config["attention_qk_norm"]:
                q, k = (
                    self.norm(q, self.weight(f"{at}attention.q_norm")),
                    self.norm(k, self.weight(f"{at}attention.k_norm")),
                )
            q, k = self.rotate(q, start), self.rotate(k, start)
            if cache:
                k, v = torch.cat((cache[layer][0], k)), torch.cat((cache[layer][1], v))
            grown.append((k, v))
            wide_k, wide_v = (t.repeat_interleave(heads // few, dim=1).transpose(0, 1) for t in (k, v))
            mask = torch.arange(len(k))[None] <= torch.arange(start, start + len(x))[:, None]
            out = scaled_dot_product_attention(q.transpose(0, 1), wide_k, wide_v, attn_mask=mask)
            x = x + out.transpose(0, 1).flatten(1) @ self.weight(f"{at}attention.wo").T
            inner = self.norm(x, self.weight(f"{at}ffn_norm"))
            gate = silu(inner @ self.weight(f"{at}feed_forward.w1").T) * (
                inner @ self.weight(f"{at}feed_forward.w3").T
            )
            x = x + gate @ self.weight(f"{at}feed_forward.w2").T
        if cache is not None:
            cache[:] = grown
        return self.norm(x, self.weight("norm"))


class OracleLm:
    """Both transformers in float32, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        text, audio = self.config["text_config"], self.config["audio_decoder_config"]
        files = sorted(folder.glob("*.safetensors"))
        self.weights = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
        eps, base = text["norm_eps"], text["rope_base"]
        self.slow = Stack(self.weights, "text_model.model.", text, eps, base, text["max_seq_len"])
        self.fast = Stack(self.weights, "audio_decoder.", audio, eps, base, audio["num_codebooks"])
        self.codebooks, self.size = audio["num_codebooks"], audio["vocab_size"]
        self.first, self.last, self.end = (
            self.config[f"{n}_token_id"] for n in ("semantic_start", "semantic_end", "eos")
        )

    def embed(self, columns: Tensor) -> Tensor:
        """int64 [1 + codebooks, T] -> [T, dim]."""
        ids, codes = columns[0], columns[1:]
        text = self.slow.weight("embeddings")[ids]
        offsets = torch.arange(self.codebooks)[:, None] * self.size
        speech = self.fast.weight("codebook_embeddings")[codes + offsets].sum(0)
        spoken = (ids >= self.first) & (ids <= self.last)
        return torch.where(spoken[:, None], (text + speech) / math.sqrt(self.codebooks + 1), text)

    def masked(self, logits: Tensor) -> Tensor:
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        allowed[self.first : self.last + 1] = True
        allowed[self.end] = True
        return logits.masked_fill(~allowed, float("-inf"))

    @torch.inference_mode()
    def run(self, prompt: Tensor, most: int, sampling: dict, noise: Noise | None = None) -> Trace:
        """A prompt of columns, int64 [1 + codebooks, T], to its end or `most` columns; without noise every
        draw is the likeliest."""
        cache: list[tuple[Tensor, Tensor]] = []
        x, steps, hidden, all_logits, tokens = self.embed(prompt), [], [], [], []
        temperature, top_p, top_k = (sampling[name] for name in ("temperature", "top_p", "top_k"))
        while len(steps) < most:
            state = self.slow(x, cache)[-1]
            logits = self.slow.weight("embeddings") @ state
            allowed, step = self.masked(logits), len(steps)
            a = draw(probabilities(allowed, temperature, top_p, top_k), noise, step, 0)
            b = draw(probabilities(allowed, 1.0, 0.9, top_k), noise, step, 1)
            window = ([0] * 10 + tokens[1:])[-10:]
            token = choose(a, b, window if step else None, self.first, self.last)
            tokens.append(token)
            codes = self.frame(
                state,
                token,
                lambda i, row, step=step: draw(
                    probabilities(row, temperature, top_p, top_k), noise, step, 1 + i
                ),
            )
            column = [token, *codes]
            steps.append(Step(column, a, b, window))
            hidden.append(state)
            all_logits.append(logits)
            if token == self.end:
                break
            x = self.embed(torch.tensor(column)[:, None])
        columns = torch.tensor([step.column for step in steps]).T
        return Trace(steps, columns, torch.stack(hidden), torch.stack(all_logits), tokens[-1] == self.end)

    def frame(self, state: Tensor, token: int, choose: Callable[[int, Tensor], int]) -> list[int]:
        """The codes of a token: the whole fast AR again for every code."""
        codes = [min(max(token - self.first, 0), self.size - 1)]
        for index in range(1, self.codebooks):
            codes.append(choose(index, self.fast_logits(state, codes)[index]))
        return codes

    def fast_logits(self, state: Tensor, codes: list[int]) -> Tensor:
        """Logits [1 + given codes, codes] of a frame: row 0 would be code 0 again, row i is code i."""
        if "audio_decoder.project_in.weight" in self.weights:
            state = state @ self.fast.weight("project_in").T + self.weights["audio_decoder.project_in.bias"]
        x = torch.cat((state[None], self.fast.weight("embeddings")[torch.tensor(codes, dtype=torch.long)]))
        return self.fast(x[: self.codebooks]) @ self.fast.weight("output").T


def probabilities(logits: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """[vocabulary] -> [vocabulary]: filters on the raw logits, the token that crosses top_p dropped, then
    temperature."""
    ordered, order = logits.sort(descending=True, stable=True)
    removed = (ordered.softmax(-1).cumsum(-1) > top_p) | (torch.arange(len(logits)) >= (top_k or len(logits)))
    removed[0] = False
    kept = torch.zeros_like(removed).scatter(0, order, ~removed)
    return (logits.masked_fill(~kept, float("-inf")) / max(temperature, 1e-5)).softmax(-1)


def draw(chances: Tensor, noise: Noise | None, step: int, what: int) -> int:
    if noise is None:
        return int(chances.argmax())
    return int((chances / -noise(step, what, len(chances)).log()).argmax())


def choose(a: int, b: int, window: list[int] | None, first: int, last: int) -> int:
    """Repetition-aware sampling of one token; the first token of a sequence has no window."""
    return b if window is not None and first <= a <= last and a in window else a
