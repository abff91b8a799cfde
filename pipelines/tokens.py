"""Sequences of tokens: requests to an engine, their sampling, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from pipelines.errors import ErrorCode, InputError
from pipelines.nn.config_keys import BaseSamplingDefaults
from pipelines.request import FloatArray, Generation, IntArray
from pipelines.results import SpeechEngine
from pipelines.validation import MAX_TOP_K, bounded, or_default

Finish = Literal["stop", "length"]
#: The highest temperature that vLLM takes.
MAX_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """Sampling settings. A temperature of 0 means greedy, a top_k of 0 means no limit."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    #: Whether the sequence continues after an end token, up to `max_tokens`.
    ignore_end: bool = False


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """The prompt of a sequence. It contains the whole text, so `trailing` is empty."""

    ids: Sequence[int]
    #: int64 [positions, codebooks]: the codes at the positions that hold frames, in order, for models that feed
    #: whole frames back.
    codes: IntArray = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    #: Lengths of prefixes that other prompts share, ascending, such as those of a voice or of the dialogue so
    #: far. A prompt's last position is in none, because its keys and values are computed with the first frame.
    shared: Sequence[int] = ()
    trailing = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """A request for one sequence."""

    request_id: str
    prompt: TokenPrompt
    sampling: TokenSampling
    #: `extra_args` of vLLM, read by Nightjar's samplers and schedulers.
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: Whether the codes of its steps are returned, for models that make several codes per step.
    codes: bool = True
    #: Number of inaudible tokens at the start of a stream: tokens before the speech, and tokens that the
    #: codec holds back.
    inaudible: int = 0
    #: Identifies everything that keys and values depend on besides the ids: only prompts with equal salts
    #: share a prefix.
    cache_salt: str | None = None
    #: A second sequence that runs as long as this one does, such as the null branch of guidance; its tokens are
    #: dropped.
    shadow: TokenRequest | None = None
    #: Maximum tokens that its text can need; None: unknown.
    longest: int | None = None


class Tokens(NamedTuple):
    """The result of a sequence."""

    #: On vLLM the last id is the one that ended the sequence, if any.
    ids: list[int]
    finish: Finish
    #: int64 [steps, codes_per_step] for models that make several codes per step.
    codes: IntArray | None = None
    #: [ids]: see `pipelines.results.FinishedCodes`; None: the engine does not measure them.
    log_probabilities: FloatArray | None = None


#: An engine of token sequences, which calls a `Receiver` for each request; both engines implement it.
#: `submit` blocks while the waiting room is full, but never on the engine's own thread. It raises
#: `SynthesisError` (`synth.aborted`) once the engine is closed.
TokenHost = SpeechEngine[TokenRequest]


def token_sampling(
    defaults: BaseSamplingDefaults, generation: Generation, max_tokens: int, seed: int, stops: tuple[int, ...]
) -> TokenSampling:
    """The sampling of a request: its own settings, or the model's defaults for settings that it does not
    have.

    Raises `InputError` (`input.bad_generation`) for a temperature that vLLM would refuse.
    """
    temperature = or_default(generation.temperature, defaults.temperature)
    if temperature > MAX_TEMPERATURE:
        raise InputError(
            ErrorCode.INPUT_BAD_GENERATION,
            f"`temperature` is {temperature!r}; this model takes 0 to {MAX_TEMPERATURE:g}.",
            "Correct the `generation` object.",
        )
    return TokenSampling(
        max_tokens=max_tokens,
        temperature=bounded(temperature),
        top_k=min(or_default(generation.top_k, defaults.top_k), MAX_TOP_K),
        top_p=or_default(generation.top_p, defaults.top_p),
        repetition_penalty=bounded(or_default(generation.repetition_penalty, defaults.repetition_penalty)),
        seed=seed,
        stop_ids=stops,
    )
