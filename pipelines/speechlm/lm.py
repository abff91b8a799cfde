"""The backbone on vLLM: what it reads of a dialogue, what is asked of it for each part of a request, and
what it writes.

A prompt is that of the checkpoint's serving template: `[bos]`, then for each message role, modality,
content, `[eos]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from pipelines.errors import ErrorCode, InputError
from pipelines.nn.config_keys import bad_checkpoint
from pipelines.request import Message, Mode
from pipelines.speechlm.config import Specials, SpeechLmConfig, own_keys
from pipelines.tokens import TokenRequest, TokenSampling
from pipelines.vllm_engine.library import PRIVATE, ModelSpec
from pipelines.vllm_engine.pairs import pair_extra


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
            message = "The text holds something that this model's tokenizer turns into control tokens."
            raise InputError(
                ErrorCode.INPUT_UNSUPPORTED, message, "Remove control characters and markup from the text."
            )
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


class Phase(IntEnum):
    #: The marker of text is forced.
    TEXT_MARK = 0
    TEXT = 1
    #: After the text's eot: the second assistant token is forced, then the marker of audio.
    ASSISTANT = 2
    AUDIO_MARK = 3
    AUDIO = 4


def phase_after(start: Phase, written: Sequence[int], special: Specials) -> tuple[Phase, int]:
    """The phase of a request that began in `start` and wrote these stream-0 ids, and how many of them came
    before its audio."""
    if start is Phase.AUDIO or not written:
        return start, 0
    if special.audio in written:
        return Phase.AUDIO, written.index(special.audio) + 1
    after = {special.assistant: Phase.AUDIO_MARK, special.eot: Phase.ASSISTANT}
    return after.get(written[-1], Phase.TEXT), 0


def next_phase(phase: Tensor, token: Tensor, eot: int) -> Tensor:
    """The phases after these tokens, int64 [n]. A text that may not go on ends with its eot, so nobody
    asks what comes then."""
    text = (phase == Phase.TEXT_MARK) | (phase == Phase.TEXT)
    after_text = (token == eot).long() + Phase.TEXT
    return after_text.where(text, (phase + 1).clamp(max=int(Phase.AUDIO)))


#: Positions of a sequence, as the published servers have it.
_CONTEXT = 16_384
#: Of the GPU's memory: the tower and the codec have about 2 GB, and work beside the backbone.
_MEMORY_SHARE = 0.85


def model_spec(config: SpeechLmConfig, share_prefixes: bool | None = None) -> ModelSpec:
    """What vLLM is told."""
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
            self.request_id,
            self.prompt_ids,
            self._sampling(self.max_tokens, stops),
            extra,
            codes=goes_on,
            cache_salt=self.salt,
        )

    def audio_pair(self, config: SpeechLmConfig, written: Sequence[int], pair: str) -> TokenRequest:
        """The guided audio after the text `written`, which ended with eot; `pair` is a name that no other
        pair has.

        The null branch sees zeros up to the marker of audio, and the same audio. Its prompt begins like
        that of every other null branch.
        """
        special = config.specials
        prompt = [*self.prompt_ids, *written, special.assistant, special.audio]
        null = [special.pad] * (len(prompt) - 1) + [special.audio]
        # A broken pair ends with the pad.
        sampling = self._sampling(self.max_tokens - len(written) - 2, (special.eos, special.pad))
        main = {**self._extra(Phase.AUDIO, private=True), **pair_extra(pair, "main", self.cfg)}
        other = {key: value for key, value in main.items() if key != "features"} | pair_extra(
            pair, "null", self.cfg
        )
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
            extra["features"] = [
                (position, rows.float().numpy().tobytes()) for position, rows in self.features
            ]
        return extra


#: First code of the row that ends the audio, whose token is always eos: what ended it.
ENDED_BY_EOT, ENDED_BY_LIMIT = 1, 2
End = Literal["eos", "eot", "length"]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Stream-0 ids with the forced ones and the end, as published models write them, and the rows of
    audio."""

    ids: list[int]
    text_ids: list[int]
    #: int64 [rows, streams]: 0 is a stream's pad, 1 + c its code c. None where the audio's marker never came.
    rows: NDArray[np.int64] | None
    end: End


def read_output(
    config: SpeechLmConfig, ids: Sequence[int], codes: NDArray[np.int64] | None, *, finished: bool
) -> ModelOutput:
    """Reads the ids of a request; `codes` [len(ids), streams] where it may have audio; `finished` unless
    max_tokens ended it."""
    special = config.specials
    ids = list(ids)
    begin = ids.index(special.audio) + 1 if special.audio in ids else None
    written = ids[: ids.index(special.assistant)] if special.assistant in ids else ids
    text_ids = [one for one in written if config.text_start <= one < config.text_end]
    if begin is None or codes is None:
        last = ids[-1] if ids and finished else None
        return ModelOutput(
            ids, text_ids, None, "eos" if last == special.eos else "eot" if last == special.eot else "length"
        )
    rows = codes[begin:].copy()
    end: End = "length"
    if finished and len(rows) and rows[-1, 0] == special.eos:
        mark = int(rows[-1, 1])
        end = "eot" if mark == ENDED_BY_EOT else "length" if mark == ENDED_BY_LIMIT else "eos"
        ids[-1] = special.eot if end == "eot" else special.eos
        rows = rows[:-1]
    rows[:, 0] -= config.codec_base
    # Codes beside the token are 1 + their place in their stream's ids; a pad stands in place 0.
    rows[:, 1:] -= 1
    return ModelOutput(ids, text_ids, rows, end)


def interleave(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Codes [frames, streams] in 0.. -> rows [frames + streams - 1, streams]; 0 is the pad, code c is 1 +
    c."""
    frames, streams = codes.shape
    rows = np.zeros((frames + streams - 1 if frames else 0, streams), np.int64)
    for stream in range(streams):
        rows[stream : stream + frames, stream] = codes[:, stream] + 1
    return rows


def deinterleave(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows [n, streams] as in `interleave` -> codes [max(n - streams + 1, 0), streams]; a pad becomes code
    0."""
    streams = rows.shape[1]
    frames = max(len(rows) - streams + 1, 0)
    codes = np.stack([rows[stream : stream + frames, stream] for stream in range(streams)], axis=1)
    return np.maximum(codes - 1, 0)
