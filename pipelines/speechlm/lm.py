"""The backbone on vLLM: what the engine is told, and what is asked of it for each part of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipelines.speechlm.config import SpeechLmConfig, own_keys
from pipelines.speechlm.output import Phase
from pipelines.tokens import TokenRequest, TokenSampling
from pipelines.vllm_engine.library import PRIVATE, ModelSpec, head_overrides
from pipelines.vllm_engine.pairs import pair_extra


def model_spec(config: SpeechLmConfig, share_prefixes: bool | None = None) -> ModelSpec:
    """What vLLM is told. Call it after `load_vllm`."""
    return ModelSpec(
        config.folder,
        {**own_keys(config.text), **head_overrides(config.backbone.head_dim, config.backbone.rope_theta)},
        "SpeechLmForCausalLM",
        codes_per_step=config.streams,
        share_prefixes=share_prefixes,
        pairs=True,
    )


@dataclass(frozen=True, slots=True)
class StreamSampling:
    """How one modality is drawn; a temperature of 0 is greedy, a top_k of 0 all."""

    temperature: float
    top_k: int
    top_p: float = 1.0

    def values(self) -> list[float]:
        return [self.temperature, self.top_k, self.top_p]


@dataclass(frozen=True, slots=True)
class Script:
    """One request to the model, whichever engine requests it takes."""

    request_id: str
    prompt_ids: Sequence[int]
    #: Stream-0 steps, text and audio together.
    max_tokens: int
    seed: int
    text: StreamSampling
    audio: StreamSampling
    #: Whether audio follows the text, and its guidance: 1 or less is none.
    with_audio: bool = True
    cfg: float = 1.0
    #: Rows of audio before which it may not end.
    min_rows: int = 0
    #: Rows of audio after which it must.
    max_rows: int = 1 << 30
    #: (first position, features [n, hidden] on the host) of each recording.
    features: Sequence[tuple[int, Tensor]] = field(default_factory=list[tuple[int, Tensor]])
    #: What names the recordings' content.
    salt: str | None = None

    @property
    def guided(self) -> bool:
        """Whether its audio runs as a pair of its own, once the text is there."""
        return self.with_audio and self.cfg > 1

    def first_request(self, config: SpeechLmConfig) -> TokenRequest:
        """The whole request, or the text alone where the audio is guided."""
        special = config.specials
        goes_on = self.with_audio and not self.guided
        stops = (special.eos,) if goes_on else (special.eos, special.eot)
        # Text has nothing beside its tokens: the guided audio that follows it, and others, may share its KV.
        extra = self._extra(Phase.TEXT_MARK, private=goes_on)
        return TokenRequest(
            self.request_id, self.prompt_ids, self._sampling(self.max_tokens, stops), extra, codes=goes_on, cache_salt=self.salt
        )

    def audio_pair(self, config: SpeechLmConfig, written: Sequence[int], pair: str) -> TokenRequest:
        """The guided audio after the text `written`, which ended with eot; `pair` is a name that no other pair has.

        The null branch sees zeros up to the marker of audio, and the same audio. Its prompt begins like that of every other null branch.
        """
        special = config.specials
        prompt = [*self.prompt_ids, *written, special.assistant, special.audio]
        null = [special.pad] * (len(prompt) - 1) + [special.audio]
        # A broken pair ends with the pad.
        sampling = self._sampling(self.max_tokens - len(written) - 2, (special.eos, special.pad))
        main = {**self._extra(Phase.AUDIO, private=True), **pair_extra(pair, "main", self.cfg)}
        other = {key: value for key, value in main.items() if key != "features"} | pair_extra(pair, "null", self.cfg)
        shadow = TokenRequest(self.request_id, null, sampling, other, codes=False)
        return TokenRequest(self.request_id, prompt, sampling, main, cache_salt=self.salt, shadow=shadow)

    def _sampling(self, most: int, stops: tuple[int, ...]) -> TokenSampling:
        return TokenSampling(most, temperature=1.0, seed=self.seed, stop_ids=stops, ignore_end=True)

    def _extra(self, phase: Phase, private: bool) -> dict[str, Any]:
        extra: dict[str, Any] = {
            "phase": int(phase),
            "text": self.text.values(),
            "audio": self.audio.values(),
            "min_rows": self.min_rows,
            "max_rows": self.max_rows,
            "noise_origin": len(self.prompt_ids),
            PRIVATE: private,
        }
        if self.features:
            extra["features"] = [(position, features_bytes(rows), rows.element_size() == 2) for position, rows in self.features]
        return extra


def features_bytes(rows: Tensor) -> bytes:
    """The values of a float32 or bfloat16 tensor, row after row."""
    return rows.contiguous().view(torch.uint8).numpy().tobytes()
