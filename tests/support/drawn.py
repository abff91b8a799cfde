"""What an engine drew against exact probabilities: where each draw lies in its distribution, and whether
these places look random.

The probabilities are those of the published processors: transformers' own, in the order in which
`generate` runs them, in float64, from the logits that the engine's frames really had. A draw of token x
lies at a random place of x's interval in its distribution function, so that the places of all draws are
uniform and independent where the engine draws what it should, whatever the logits. With tokens in the
order of their ids a place is, but for the width of an interval, the random word of the draw: two draws
that share one show. With the likeliest token first a distribution that is too wide or too narrow shows:
its places crowd at one end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import FrameExecutor, FrameSettings, PendingFrames
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.qwen3_tts.config import CONTROL_IDS, Qwen3TTSConfig, SamplingDefaults
from pipelines.qwen3_tts.pipeline import sampling_params
from pipelines.qwen3_tts.prompt import Prompt
from pipelines.request import Generation
from tests.support.listened import ListenedCore
from tests.support.rounds import turn_until

#: (float32 [n, vocab], float32 [residuals, n, codes]): the logits of the frame just made, a row a slot.
Logits = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """One way to draw: what a request asks for, what its checkpoint says, and what the published API makes
    of both."""

    name: str
    asked: dict[str, Any]
    published: dict[str, Any]
    checkpoint: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> SamplingParams:
        """What the product makes of it."""
        return sampling_params(SamplingDefaults(**self.checkpoint), Generation(**self.asked))


DEFAULT = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05,
           "subtalker_temperature": 0.9, "subtalker_top_k": 50, "subtalker_top_p": 1.0}  # fmt: skip


def _settings(
    name: str, asked: dict[str, Any], checkpoint: dict[str, Any] | None = None, **published: Any
) -> Settings:
    return Settings(name, asked, DEFAULT | asked | published, checkpoint or {})


#: Every setting apart from the others, then many at once. A request's settings are codebook 0's; a checkpoint
#: has the others'.
ALL_SETTINGS = (
    _settings("default", {}),
    _settings("cold", {"temperature": 0.5}),
    _settings("hot", {"temperature": 2.0}),
    _settings("few", {"top_k": 6}),
    _settings("all", {"top_k": 0, "temperature": 1.5}),
    _settings("nucleus", {"top_p": 0.6}),
    _settings("penalty", {"repetition_penalty": 3.0, "top_k": 4}),
    _settings("cold predictor", {}, {"predictor_temperature": 0.5}, subtalker_temperature=0.5),
    _settings("few in the predictor", {}, {"predictor_top_k": 5}, subtalker_top_k=5),
    _settings("nucleus in the predictor", {}, {"predictor_top_p": 0.6}, subtalker_top_p=0.6),
    _settings(
        "many",
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.5},
        {"predictor_temperature": 1.2, "predictor_top_k": 0, "predictor_top_p": 0.8},
        subtalker_temperature=1.2,
        subtalker_top_k=0,
        subtalker_top_p=0.8,
    ),
)


def _warpers(temperature: float, top_k: int, top_p: float) -> list[Any]:
    """What `generate` puts together: a warper that changes nothing is left out."""
    found: list[Any] = [TemperatureLogitsWarper(float(temperature))]
    if top_k:
        found.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        found += [_in_order_of_ids, TopPLogitsWarper(top_p)]
    return found


def _in_order_of_ids(_: Tensor, scores: Tensor) -> Tensor:
    """Equal logits, of which bfloat16 has many, by their ids: a sort that is not stable leaves open which
    of them top_p keeps."""
    return scores + 1e-12 * torch.arange(scores.shape[1], dtype=scores.dtype, device=scores.device)


def first_probabilities(
    logits: Tensor, history: Tensor, published: dict[str, Any], end: int, min_new_tokens: int = 2
) -> Tensor:
    """Probabilities of codebook 0, float64 [n, vocab]. logits: [n, vocab]; history: int64 [n, draws],
    codes drawn before."""
    vocab = logits.shape[1]
    banned = [token for token in range(vocab - CONTROL_IDS, vocab) if token != end]
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(float(published["repetition_penalty"])),
            MinNewTokensLengthLogitsProcessor(0, min_new_tokens, end, device=str(logits.device)),
            SuppressTokensLogitsProcessor(banned, device=str(logits.device)),
            *_warpers(published["temperature"], published["top_k"], published["top_p"]),
        ]
    )
    return processors(history, logits.double()).softmax(-1)


def residual_probabilities(logits: Tensor, published: dict[str, Any]) -> Tensor:
    """Probabilities of a later codebook, float64 [n, codes]; logits: [n, codes]."""
    settings = (published[f"subtalker_{name}"] for name in ("temperature", "top_k", "top_p"))
    nothing = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    return LogitsProcessorList(_warpers(*settings))(nothing, logits.double()).softmax(-1)


class Watched:
    """An executor that keeps the logits of every frame, by seed and frame."""

    def __init__(self, executor: FrameExecutor, logits: Callable[[], Logits]) -> None:
        """`logits` gives those of the frame just made; it is called once a frame."""
        self._executor, self._logits = executor, logits
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def frames(self, slots: Sequence[int], count: int, settings: FrameSettings) -> PendingFrames:
        assert count == 1, "logits are kept frame by frame"
        state, rows = self._executor.state, list(slots)
        places = list(zip(state.seeds[rows].tolist(), state.frames[rows].tolist()))
        pending = self._executor.frames(slots, count, settings)
        first, residual = self._logits()
        for row, place in enumerate(places):
            self.kept[place] = first[row].clone(), residual[:, row].clone()
        return pending


class Heard:
    """Codes and finish of every request."""

    def __init__(self) -> None:
        self.codes: dict[str, NDArray[np.int64]] = {}
        self.finish: dict[str, str] = {}

    def frames(self, request: GenerationRequest, codes: NDArray[np.int64]) -> None:
        """Only whole utterances are looked at."""

    def finished(self, request: GenerationRequest, codes: NDArray[np.int64], finish: str) -> None:
        self.codes[request.request_id], self.finish[request.request_id] = codes, finish

    def failed(self, request: GenerationRequest, error: Exception) -> None:
        raise error


@dataclass(frozen=True, slots=True)
class Places:
    """The draws of a run. by_id, by_rank: [requests, frames, codebooks], NaN where nothing was drawn;
    request i has `settings[i % n]`."""

    by_id: NDArray[np.float64]
    by_rank: NDArray[np.float64]
    #: (request, frame, codebook) of draws that the published processors never make.
    impossible: list[tuple[int, int, int]]
    settings: tuple[Settings, ...]

    def of(self, name: str) -> NDArray[np.float64]:
        """`by_rank` of the requests with these settings."""
        return self.by_rank[[one.name for one in self.settings].index(name) :: len(self.settings)]


def seed_of(request: int, requests: int) -> int:
    """Neighbours differ by one; the second half has the seeds of the first, but for their upper 32 bits."""
    half = requests // 2
    return request % half + (request // half << 32)


def drawn(
    config: Qwen3TTSConfig,
    executor: FrameExecutor,
    logits: Callable[[], Logits],
    prompt: Prompt,
    options: EngineOptions,
    requests: int,
    frames: int,
    settings: tuple[Settings, ...] = ALL_SETTINGS,
) -> Places:
    """Runs requests of all settings in one mix and places their draws; `frames`: the longest speech."""
    watched, heard = Watched(executor, logits), Heard()
    core = ListenedCore(watched, options, heard)
    for index in range(requests):
        sampling = settings[index % len(settings)].sampling
        core.add(GenerationRequest(str(index), prompt, sampling, seed_of(index, requests), frames + 1))
    turn_until(lambda: not core.busy, core.step)
    return _placed(config, watched, heard, requests, frames, settings)


def _placed(
    config: Qwen3TTSConfig,
    watched: Watched,
    heard: Heard,
    requests: int,
    frames: int,
    settings: tuple[Settings, ...],
) -> Places:
    dice = np.random.default_rng(0)
    shape = (requests, frames, config.codebooks)
    by_id, by_rank, impossible = np.full(shape, np.nan), np.full(shape, np.nan), []
    end = config.ids.codec_eos_token_id

    def note(members: list[int], frame: int, codebook: int, probabilities: Tensor, tokens: list[int]) -> None:
        low, high, low_rank, possible = intervals(
            probabilities, torch.tensor(tokens, device=probabilities.device)
        )
        spread = dice.random((2, len(members)))
        by_id[members, frame, codebook] = low + spread[0] * (high - low)
        by_rank[members, frame, codebook] = low_rank + spread[1] * (high - low)
        impossible.extend((member, frame, codebook) for member, fine in zip(members, possible) if not fine)

    for kind, one in enumerate(settings):
        for frame in range(frames):
            codes = {index: heard.codes[str(index)] for index in range(kind, requests, len(settings))}
            going = [index for index in codes if len(codes[index]) > frame]
            ended = [
                index for index in codes if len(codes[index]) == frame and heard.finish[str(index)] == "eos"
            ]
            if members := going + ended:
                kept = [watched.kept[seed_of(index, requests), frame] for index in members]
                history = torch.from_numpy(
                    np.stack([codes[index][:frame, 0] for index in members]).reshape(len(members), frame)
                )
                raw = torch.stack([first for first, _ in kept])
                exact = first_probabilities(raw, history.to(raw.device), one.published, end)
                note(
                    members,
                    frame,
                    0,
                    exact,
                    [*(int(codes[index][frame, 0]) for index in going), *[end] * len(ended)],
                )
            for codebook in range(1, config.codebooks if going else 1):
                raw = torch.stack([residual[codebook - 1] for _, residual in kept[: len(going)]])
                tokens = [int(codes[index][frame, codebook]) for index in going]
                note(going, frame, codebook, residual_probabilities(raw, one.published), tokens)
    return Places(by_id, by_rank, impossible, settings)


def intervals(
    probabilities: Tensor, tokens: Tensor
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Each token's interval in the order of ids, where it begins with the likeliest first, and whether it
    is possible at all: [n] each."""
    mine = probabilities.gather(1, tokens[:, None])
    high = probabilities.cumsum(-1).gather(1, tokens[:, None])
    likelier = (
        probabilities * ((probabilities > mine) | ((probabilities == mine) & _before(tokens, probabilities)))
    ).sum(-1)
    found = [x.cpu().numpy() for x in ((high - mine)[:, 0], high[:, 0], likelier, (mine > 0)[:, 0])]
    return found[0], found[1], found[2], found[3].astype(bool)


def _before(tokens: Tensor, probabilities: Tensor) -> Tensor:
    """Tokens with smaller ids, to which ties go."""
    return torch.arange(probabilities.shape[1], device=tokens.device) < tokens[:, None]


def uniform(places: NDArray[np.float64], bins: int = 10) -> float:
    """Chi-square: the chance of places at least this uneven among equal bins."""
    seen = places[~np.isnan(places)]
    return float(stats.chisquare(np.histogram(seen, bins, (0, 1))[0]).pvalue)


def independent(one: NDArray[np.float64], other: NDArray[np.float64], bins: int = 4) -> tuple[float, int]:
    """(chance, pairs). Chi-square over the bins x bins squares of pairs of places, all equally likely
    where pairs are independent."""
    known = ~(np.isnan(one) | np.isnan(other))
    counts, _, _ = np.histogram2d(one[known], other[known], bins, ((0, 1), (0, 1)))
    return float(stats.chisquare(counts.ravel()).pvalue), int(known.sum())


def lagged(places: NDArray[np.float64]) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Pairs of draws that must not know of each other, by what tells them apart. places: [requests,
    frames, codebooks]."""
    requests, frames, codebooks = places.shape
    half = requests // 2
    pairs = {f"frames {lag} apart": (places[:, lag:], places[:, :-lag]) for lag in range(1, frames)}
    pairs |= {
        f"codebooks {lag} apart": (places[:, :, lag:], places[:, :, :-lag]) for lag in range(1, codebooks)
    }
    pairs |= {
        f"codebooks 0 and {other}": (places[:, :, 0], places[:, :, other]) for other in range(1, codebooks)
    }
    pairs |= {
        f"seeds {lag} apart": (places[lag:half], places[: half - lag]) for lag in (1, 2, 3, len(ALL_SETTINGS))
    }
    pairs["seeds 2**32 apart"] = places[:half], places[half : 2 * half]
    pairs["a frame and a codebook on"] = places[:, 1:, 1:], places[:, :-1, :-1]
    pairs["a frame on, a codebook back"] = places[:, 1:, :-1], places[:, :-1, 1:]
    return pairs


def power(effect: float, count: int, freedom: int, alpha: float) -> float:
    """The chance that a chi-square test notices an effect w (Cohen): sum (p - q)^2 / q = w^2 over its
    cells, in `count` draws."""
    return float(stats.ncx2.sf(stats.chi2.isf(alpha, freedom), freedom, count * effect**2))
