"""The backbone on vLLM: what it reads of a dialogue, what is asked of it for each part of a request, and
what it writes.

A prompt is that of the checkpoint's serving template: `[bos]`, then for each message role, modality,
content, `[eos]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from pipelines.errors import unsupported
from pipelines.nn.config_keys import bad_checkpoint
from pipelines.request import Message, Mode
from pipelines.speechlm.config import SpeechLmConfig, own_keys
from pipelines.tokens import TokenRequest, TokenSampling
from pipelines.vllm_engine.library import PRIVATE, ModelSpec
from pipelines.vllm_engine.pairs import Half


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of a prompt. Audio is its marker and one more of it for each feature; `features` are where those
    go."""

    ids: list[int]
    #: (first position, features) of each recording, in order.
    features: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class TextCoder:
    """The checkpoint's tokenizer for plain text: what looks like a control token is text like any other."""

    def __init__(self, config: SpeechLmConfig) -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) for a tokenizer that is missing or cannot be read."""
        self._start, self._end = config.text_start, config.text_end
        path = config.folder / "tokenizer.json"
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            # Without them nothing that a user writes can become a control token.
            table["added_tokens"] = []
            table["post_processor"] = None
            self.tokenizer = Tokenizer.from_str(json.dumps(table))
        except Exception as error:  # the library raises plain Exception
            raise bad_checkpoint(f"{path} cannot be read: {error}.") from error

    def encode(self, text: str) -> list[int]:
        """Text ids. Raises `InputError` (`input.unsupported`) where the tokenizer writes something else."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if any(not self._start <= token < self._end for token in ids):
            message = "This model's tokenizer turns a part of the text into control tokens."
            raise unsupported(message, "Remove control characters and markup from the text.")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; others than text ids are left out."""
        return self.tokenizer.decode([token for token in ids if self._start <= token < self._end])


def chosen_messages(messages: Sequence[Message], mode: Mode) -> list[Message]:
    """The messages that a prompt is made of: for audio generation the assistant's are what is asked for,
    and skipped."""
    return [one for one in messages if not (mode == "text_audio" and one.role == "assistant")]


def build_prompt(
    config: SpeechLmConfig, coder: TextCoder, messages: Sequence[Message], feature_counts: Sequence[int]
) -> Prompt:
    """The prompt of these messages, up to the assistant's turn.

    `feature_counts` are the lengths of the audio messages, in order. Source: the checkpoint's
    chat_template.jinja.
    """
    special = config.specials
    roles = {"system": special.system, "user": special.user, "assistant": special.assistant}
    ids = [special.bos]
    features: list[tuple[int, int]] = []
    counts = iter(feature_counts)
    for message in messages:
        ids.append(roles[message.role])
        if message.modality == "audio":
            count = next(counts)
            ids.append(special.audio)
            features.append((len(ids), count))
            ids += [special.audio] * count
        else:
            assert isinstance(message.content, str)
            ids += [special.text, *coder.encode(message.content)]
        ids.append(special.eos)
    ids.append(special.assistant)
    return Prompt(ids, features)


#: Positions of a sequence, as the published servers have it.
_CONTEXT = 16_384
#: Of the GPU's memory: the tower and the codec have about 2 GB, and work beside the backbone.
_MEMORY_SHARE = 0.85


def model_spec(config: SpeechLmConfig, share_prefixes: bool | None = None) -> ModelSpec:
    """The description of the model for vLLM."""
    return ModelSpec(
        config.folder,
        own_keys(config.text),
        "SpeechLmForCausalLM",
        codes_per_step=config.streams,
        share_prefixes=share_prefixes,
        pairs=True,
        memory_share=_MEMORY_SHARE,
        context=_CONTEXT,
        max_positions=config.backbone.max_positions,
    )


class StreamSampling(NamedTuple):
    """How one modality is drawn; a temperature of 0 is greedy, a top_k of 0 all."""

    temperature: float
    top_k: int
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Script:
    """One request to the model: a text, and audio after it. Each is a sequence of the engine."""

    request_id: str
    prompt_ids: Sequence[int]
    #: Stream-0 steps, text and audio together, with the markers that are never drawn.
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

    def text_request(self, config: SpeechLmConfig) -> TokenRequest:
        """The text after its marker. Nothing stands beside its tokens: the audio that follows it, and
        others, may share its KV."""
        special = config.specials
        prompt, ends = [*self.prompt_ids, special.text], (special.eos, special.eot)
        extra = {"text": self.text, **self._extra(private=False)}
        return TokenRequest(
            self.request_id,
            prompt,
            self._sampling(max(self.max_tokens - 1, 1), ends),
            extra,
            codes=False,
            cache_salt=self.salt,
        )

    def audio_request(self, config: SpeechLmConfig, before: Sequence[int], pair: str) -> TokenRequest:
        """The audio after the stream-0 ids `before`, which end with its marker; guided, a pair of this
        name, which no other one has.

        The null branch sees zeros up to the marker of audio, and the same audio. Its prompt begins like
        that of every other null branch.
        """
        special, prompt = config.specials, [*self.prompt_ids, *before]
        # A broken pair ends with the pad.
        sampling = self._sampling(self.max_tokens - len(before), (special.eos, special.pad))
        limits = {"min_rows": self.min_rows, "max_rows": self.max_rows}
        extra = {"audio": self.audio, **limits, **self._extra(private=True)}
        shadow = None
        if self.cfg > 1:
            null = [special.pad] * (len(prompt) - 1) + [special.audio]
            other = {key: value for key, value in extra.items() if key != "features"}
            extra["pair"], other["pair"] = Half(pair, "main", self.cfg), Half(pair, "null", self.cfg)
            shadow = TokenRequest(self.request_id, null, sampling, other, codes=False)
        return TokenRequest(self.request_id, prompt, sampling, extra, cache_salt=self.salt, shadow=shadow)

    def _sampling(self, most: int, stops: tuple[int, ...]) -> TokenSampling:
        return TokenSampling(most, temperature=1.0, seed=self.seed, stop_ids=stops, ignore_end=True)

    def _extra(self, private: bool) -> dict[str, Any]:
        features = [(position, rows.float().numpy().tobytes()) for position, rows in self.features]
        extra: dict[str, Any] = {"features": features} if features else {}
        return {**extra, "noise_origin": len(self.prompt_ids), PRIVATE: private}


#: First code of the row that ends the audio, whose token is always eos: what ended it.
ENDED_BY_EOT, ENDED_BY_LIMIT = 1, 2
End = Literal["eos", "eot", "length"]
_ENDS: tuple[End, ...] = ("eos", "eot", "length")


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Stream-0 ids with the markers and the end, as published models write them, and the rows of audio."""

    ids: list[int]
    #: int64 [rows, streams]: 0 is a stream's pad, 1 + c its code c. None of them where no audio was asked for.
    rows: NDArray[np.int64]
    end: End


def read_output(
    config: SpeechLmConfig, ids: Sequence[int], codes: NDArray[np.int64] | None, *, finished: bool
) -> ModelOutput:
    """Reads the ids of a request; `codes` [rows, streams] are those of its audio; `finished` unless
    max_tokens ended it."""
    special, ids = config.specials, list(ids)
    ends: dict[int, End] = {special.eos: "eos", special.eot: "eot"}
    end = ends.get(ids[-1], "length") if finished else "length"
    if codes is None:
        return ModelOutput(ids, np.zeros((0, config.streams), np.int64), end)
    rows = codes.copy()
    if end != "length":
        end, rows = _ENDS[rows[-1, 1]], rows[:-1]
        ids[-1] = special.eot if end == "eot" else special.eos
    rows[:, 0] -= config.codec_base
    # Codes beside the token are 1 + their place in their stream's ids; a pad stands in place 0.
    rows[:, 1:] -= 1
    return ModelOutput(ids, rows, end)


def deinterleave(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows [n, streams], 0 a pad and 1 + c the code c, each stream one row after the one before it, to
    codes [max(n - streams + 1, 0), streams]; a pad becomes code 0."""
    streams = rows.shape[1]
    frames = max(len(rows) - streams + 1, 0)
    codes = np.stack([rows[stream : stream + frames, stream] for stream in range(streams)], axis=1)
    return np.maximum(codes - 1, 0)
