"""One step behind the slow AR: states and logits to tokens and codes, all rows at once, on CUDA in one graph a bucket."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cuda_graphs import GraphPool, capture
from kernels.sampler import RETRY_TEMPERATURE, RETRY_TOP_P, philox
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.fast_ar import FastAr, Pieces

#: Tokens back in which repetition-aware sampling looks.
WINDOW = 10
#: The smallest temperature; below it a draw is greedy anyway.
_COLDEST = 1e-5
_MASK = 0xFFFFFFFF
#: Of a random word, as many bits as float32 holds together with a half.
_NOISE_BITS = 23
#: Tells these draws from others of one seed.
_DOMAIN = 0x46495348


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows are drawn: float32 [n], float32 [n], int64 [n] (0: all)."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor


@dataclass(frozen=True, slots=True)
class Ranked:
    """The likeliest candidates of every row, likeliest first: each [n, ranks]."""

    #: float32, raw.
    logits: Tensor
    #: int64, where a candidate stands in its row.
    order: Tensor
    #: float32, the probability of a candidate and all likelier ones, over all that the row holds.
    cumulative: Tensor


def ranked(logits: Tensor, most: int) -> Ranked:
    """logits: [n, vocabulary]; `most`: ranks to keep, 0 for all."""
    wide = logits.float()
    if 0 < most < wide.shape[1]:
        best, order = wide.topk(most, dim=-1)
    else:
        best, order = wide.sort(dim=-1, descending=True, stable=True)
    return Ranked(best, order, wide.softmax(-1).gather(1, order).cumsum(-1))


def probabilities(candidates: Ranked, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """float32 [n, ranks] in the order of the candidates; 0 for what the filters drop. Settings are those of `Settings`."""
    rank = torch.arange(candidates.logits.shape[1], device=candidates.logits.device)[None]
    dropped = (candidates.cumulative > top_p[:, None]) | ((rank >= top_k[:, None]) & (top_k > 0)[:, None])
    dropped &= rank > 0
    scaled = candidates.logits / temperature.clamp(min=_COLDEST)[:, None]
    return scaled.masked_fill(dropped, float("-inf")).softmax(-1)


def draw(candidates: Ranked, chances: Tensor, uniform: Tensor) -> Tensor:
    """One candidate a row by argmax(p / -log(u)): chances, uniform (within (0, 1)): float32 [n, ranks] -> int64 [n]."""
    best = (chances / -uniform.log()).argmax(-1, keepdim=True)
    return candidates.order.gather(1, best)[:, 0]


def repetition_aware(first: Tensor, second: Tensor, window: Tensor, semantic: range) -> Tensor:
    """The first draw, or the second one where the first is a semantic token that was spoken a moment ago.

    first, second: int64 [n], ids; window: int64 [n, WINDOW], the ids before, 0 where there are none yet.
    """
    speech = (first >= semantic.start) & (first < semantic.stop)
    return torch.where(speech & (window == first[:, None]).any(-1), second, first)


def uniform_noise(seeds: Tensor, frames: Tensor, streams: int, ranks: int) -> Tensor:
    """float32 [n, streams, ranks] within (0, 1): a function of seed, frame, stream and rank alone (Philox4x32-10).

    seeds: int64 [n] >= 0; frames: int64 [n].
    """
    device = seeds.device
    stream = torch.arange(streams, device=device)[None, :, None]
    block = torch.arange(-(-ranks // 4), device=device)[None, None]
    counter = (frames[:, None, None], stream, block, torch.full_like(block, _DOMAIN))
    key = (seeds[:, None, None] & _MASK, seeds[:, None, None] >> 32)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), dim=-1).flatten(2)[..., :ranks]
    return ((words >> (32 - _NOISE_BITS)).float() + 0.5) / (1 << _NOISE_BITS)


#: Candidates that are looked at while no row asks for more; the published top_k is 30.
RANKS = 64
#: Batch sizes that CUDA graphs are captured for.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)

#: Uniform numbers of one draw: (stream, order of the candidates [n, ranks]) -> float32 [n, ranks]. Streams 0 and 1 are the two
#: draws of the token, stream 1 + i is that of code i.
Noise = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a step needs to know of its rows.

    hidden: [n, dim], behind the final norm; logits: [n, semantic tokens + 1], the end last; window: int64 [n, WINDOW], ids that were
    drawn a moment ago, 0 where there are none; temperature, top_p: float32 [n]; top_k, seeds, frames: int64 [n].
    """

    hidden: Tensor
    logits: Tensor
    window: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seeds: Tensor
    frames: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.hidden, self.logits, self.window, self.temperature, self.top_p, self.top_k, self.seeds, self.frames)


class FrameMaker:
    """Draws the token, and runs the fast AR for the codes."""

    def __init__(self, config: FishConfig, fast: FastAr, device: torch.device, compiled: bool = False) -> None:
        """`compiled`: what stands between the matrix products is compiled to few kernels, as is the noise."""
        self.fast = fast
        self._noise: Any = uniform_noise
        if compiled:
            fast.pieces = Pieces.compiled()
            self._noise = torch.compile(uniform_noise)
        self.codebooks = config.codebooks
        self._semantic = config.semantic
        self._size = config.fast.vocab
        self._ids = torch.tensor([*config.semantic, config.end], device=device)

    def __call__(self, rows: Rows, ranks: int = RANKS, noise: Noise | None = None) -> tuple[Tensor, Tensor]:
        """Tokens int64 [n], as ids of the vocabulary, and codes int64 [n, codebooks]; `ranks`: 0 for all. Noise is that of the seeds."""
        if noise is None:
            widest = ranks or max(rows.logits.shape[1], self._size)
            uniform = self._noise(rows.seeds, rows.frames, self.codebooks + 1, widest)
            noise = lambda stream, order: uniform[:, stream, : order.shape[1]]  # noqa: E731
        settings = Settings(rows.temperature, rows.top_p, rows.top_k)
        found = ranked(rows.logits, ranks)
        token = self._ids[_drawn(found, settings, noise, 0)]
        again = Settings(torch.full_like(rows.temperature, RETRY_TEMPERATURE), torch.full_like(rows.top_p, RETRY_TOP_P), settings.top_k)
        token = repetition_aware(token, self._ids[_drawn(found, again, noise, 1)], rows.window, self._semantic)
        first = (token - self._semantic.start).clamp(0, self._size - 1)
        codes = self.fast(rows.hidden, first, lambda i, logits: _drawn(ranked(logits, ranks), settings, noise, 1 + i))
        return token, codes


def _drawn(candidates: Ranked, settings: Settings, noise: Noise, stream: int) -> Tensor:
    chances = probabilities(candidates, settings.temperature, settings.top_p, settings.top_k)
    return draw(candidates, chances, noise(stream, candidates.order))


class FrameGraphs:
    """A `FrameMaker` whose usual steps are CUDA graphs; anywhere else it just runs.

    A step of n rows is that of the next larger bucket, its other rows left as they were; what needs more candidates than `RANKS` runs
    without a graph.
    """

    def __init__(self, maker: FrameMaker, most_rows: int, enabled: bool = True) -> None:
        self._maker = maker
        self._enabled = enabled
        self._buckets = [bucket for bucket in BUCKETS if bucket < most_rows] + [most_rows]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Rows, tuple[Tensor, Tensor]]] = {}
        self._pool = GraphPool()
        self._aside: torch.cuda.Stream | None = None

    def capture(self, like: Rows) -> None:
        """Captures every bucket ahead of time; `like`: any rows of the right types on the device. Does nothing off CUDA."""
        if self._enabled and like.hidden.is_cuda:
            for bucket in reversed(self._buckets):
                self._graph(bucket, like)

    def __call__(self, rows: Rows, wide: bool) -> tuple[Tensor, Tensor]:
        """Tokens [n] and codes [n, codebooks]; `wide`: a row asks for more candidates than `RANKS`. They are valid until the next call."""
        count = len(rows.hidden)
        if wide or not self._enabled or not rows.hidden.is_cuda or count > self._buckets[-1]:
            return self._maker(rows, 0 if wide else RANKS)
        bucket = self._buckets[bisect.bisect_left(self._buckets, count)]
        graph, inputs, (tokens, codes) = self._graph(bucket, rows)
        for place, value in zip(inputs.tensors(), rows.tensors()):
            place[:count].copy_(value)
        graph.replay()
        return tokens[:count], codes[:count]

    def _graph(self, bucket: int, like: Rows) -> tuple[torch.cuda.CUDAGraph, Rows, tuple[Tensor, Tensor]]:
        if bucket not in self._graphs:
            inputs = Rows(*(value.new_ones((bucket, *value.shape[1:])) for value in like.tensors()))
            made = self._maker(inputs)  # compiles it: the capture runs it once before, for the workspaces of its stream

            def work() -> None:
                nonlocal made
                made = self._maker(inputs)

            self._aside = self._aside or torch.cuda.Stream(inputs.hidden.device)
            graph = capture(work, self._pool, self._aside)
            self._graphs[bucket] = graph, inputs, made
        return self._graphs[bucket]


__all__ = ["RANKS", "WINDOW", "FrameGraphs", "FrameMaker", "Noise", "Rows"]
