"""The backbone on vLLM: the prompt of a dialogue, the requests for its text and its audio, and their output.

A prompt has the layout of the checkpoint's serving template: `[bos]`, then for each message role, modality,
content, `[eos]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from pipelines.errors import unsupported
from pipelines.nn.config_keys import bad_checkpoint
from pipelines.request import IntArray, Message, Mode
from pipelines.speechlm.config import SpeechLmConfig, own_keys
from pipelines.tokens import TokenPrompt, TokenRequest, TokenSampling
from pipelines.vllm_engine.library import PRIVATE, Half, ModelSpec


class Prompt(NamedTuple):
    """Ids of a prompt. Audio is its marker, then the marker once for each feature; features replace these."""

    ids: list[int]
    #: (first position, number of features) of each recording, in order.
    features: list[tuple[int, int]]


class TextCoder:
    """The checkpoint's tokenizer for plain text. Text that looks like a control token is ordinary text."""

    def __init__(self, config: SpeechLmConfig) -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) for a tokenizer that is missing or cannot be read."""
        self._start = config.text_token_offset
        self._end = config.text_token_end
        path = config.folder / "tokenizer.json"
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            # Without added tokens no text of a user can become a control token.
            table["added_tokens"] = []
            table["post_processor"] = None
            self.tokenizer = Tokenizer.from_str(json.dumps(table))
        except Exception as error:  # the library raises plain Exception
            raise bad_checkpoint(f"{path} cannot be read: {error}.") from error

    def encode(self, text: str) -> list[int]:
        """Text ids. Raises `InputError` (`input.unsupported`) if the tokenizer returns other ids."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if any(not self._start <= token < self._end for token in ids):
            raise unsupported(
                "This model's tokenizer turns a part of the text into control tokens.",
                "Remove control characters and markup from the text.",
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; ids that are not text are skipped."""
        return self.tokenizer.decode([token for token in ids if self._start <= token < self._end])


def chosen_messages(messages: Sequence[Message], mode: Mode) -> list[Message]:
    """The messages of a prompt. For audio generation the assistant's messages are skipped, because they are
    what the model generates."""
    return [message for message in messages if mode != "text_audio" or message.role != "assistant"]


def build_prompt(
    config: SpeechLmConfig, coder: TextCoder, messages: Sequence[Message], feature_counts: Sequence[int]
) -> Prompt:
    """The prompt of these messages, up to the assistant's turn.

    `feature_counts`: the number of features of each audio message, in order. Source: the checkpoint's
    chat_template.jinja.
    """
    special = config.specials
    roles = {"system": special.system, "user": special.user, "assistant": special.assistant}
    ids = [special.bos]
    features = list[tuple[int, int]]()
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


#: Default maximum positions of a sequence, as in the published servers.
_CONTEXT = 16_384
#: vLLM's share of the GPU's memory. The tower and the codec have about 2 GB, and need memory to work.
_MEMORY_SHARE = 0.85


def model_spec(config: SpeechLmConfig, share_prefixes: bool | None = None) -> ModelSpec:
    """The description of the model for vLLM."""
    return ModelSpec(
        config.folder,
        own_keys(config.text_config),
        "SpeechLmForCausalLM",
        codes_per_step=config.streams,
        share_prefixes=share_prefixes,
        pairs=True,
        memory_share=_MEMORY_SHARE,
        context=_CONTEXT,
        max_positions=config.backbone.max_positions,
    )


class StreamSampling(NamedTuple):
    """The sampling of one modality. A temperature of 0 is greedy; a top_k of 0 does not limit."""

    temperature: float
    top_k: int
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Script:
    """One request to the model: a text and the audio after it. Each of the two is a sequence of the
    engine."""

    request_id: str
    prompt_ids: Sequence[int]
    #: Maximum steps of stream 0, for text and audio together and including markers, which are not drawn.
    max_tokens: int
    seed: int
    text: StreamSampling
    audio: StreamSampling
    #: Whether audio follows the text, and the scale of its guidance; 1 or less: no guidance.
    with_audio: bool = True
    cfg: float = 1.0
    #: Minimum rows of audio.
    min_rows: int = 0
    #: Maximum rows of audio.
    max_rows: int = 1 << 30
    #: (first position, features [n, hidden] on the host) of each recording.
    features: Sequence[tuple[int, Tensor]] = ()
    #: A digest of the recordings; None without recordings.
    salt: str | None = None

    def text_request(self, config: SpeechLmConfig) -> TokenRequest:
        """The request for the text after its marker. Its tokens have no codes, so that the audio after it,
        and other requests, may share its KV."""
        special = config.specials
        prompt = [*self.prompt_ids, special.text]
        ends = (special.eos, special.eot)
        extra = {"text": self.text, **self._extra(private=False)}
        return TokenRequest(
            self.request_id,
            TokenPrompt(prompt),
            self._sampling(max(self.max_tokens - 1, 1), ends),
            extra,
            codes=False,
            cache_salt=self.salt,
        )

    def audio_request(self, config: SpeechLmConfig, before: Sequence[int], pair: str) -> TokenRequest:
        """The request for the audio after the stream-0 ids `before`, which end with the marker of audio. With
        guidance it is a pair, whose unique name is `pair`.

        The null branch reads pads up to the marker of audio, then the same audio. So all null branches begin
        alike.
        """
        special = config.specials
        prompt = [*self.prompt_ids, *before]
        # The sampler ends a broken pair with the pad.
        sampling = self._sampling(self.max_tokens - len(before), (special.eos, special.pad))
        extra = {"audio": self.audio, "min_rows": self.min_rows, "max_rows": self.max_rows}
        extra |= self._extra(private=True)
        shadow = None
        if self.cfg > 1:
            null = [special.pad] * (len(prompt) - 1) + [special.audio]
            other = {key: value for key, value in extra.items() if key != "features"}
            extra["pair"], other["pair"] = Half(pair, "main", self.cfg), Half(pair, "null", self.cfg)
            shadow = TokenRequest(self.request_id, TokenPrompt(null), sampling, other, codes=False)
        whole = TokenPrompt(prompt)
        return TokenRequest(self.request_id, whole, sampling, extra, cache_salt=self.salt, shadow=shadow)

    def _sampling(self, max_tokens: int, stops: tuple[int, ...]) -> TokenSampling:
        return TokenSampling(max_tokens, seed=self.seed, stop_ids=stops, ignore_end=True)

    def _extra(self, private: bool) -> dict[str, Any]:
        features = [(position, rows.float().numpy().tobytes()) for position, rows in self.features]
        extra: dict[str, Any] = {"features": features} if features else {}
        return {**extra, "noise_origin": len(self.prompt_ids), PRIVATE: private}


#: First code of the row that ends the audio. It says what ended it, because the row's token is always eos.
ENDED_BY_EOT = 1
ENDED_BY_LIMIT = 2
End = Literal["eos", "eot", "length"]
_ENDS: tuple[End, ...] = ("eos", "eot", "length")


class ModelOutput(NamedTuple):
    """Stream-0 ids with the markers and the end, as the published model writes them, and the rows of
    audio."""

    ids: list[int]
    #: int64 [rows, streams]: 0 is a stream's pad, 1 + c its code c. There are no rows if no audio was
    #: requested.
    rows: IntArray
    end: End


def read_output(
    config: SpeechLmConfig, ids: Sequence[int], codes: IntArray | None, *, finished: bool
) -> ModelOutput:
    """Reads the ids of a request; `codes` [rows, streams] are those of its audio; `finished`: false if
    max_tokens ended it."""
    special = config.specials
    ids = list(ids)
    ends: dict[int, End] = {special.eos: "eos", special.eot: "eot"}
    end = ends.get(ids[-1], "length") if finished else "length"
    if codes is None:
        return ModelOutput(ids, np.zeros((0, config.streams), np.int64), end)
    rows = codes.copy()
    if end != "length":
        end = _ENDS[rows[-1, 1]]
        rows = rows[:-1]
        ids[-1] = special.eot if end == "eot" else special.eos
    rows[:, 0] -= config.codec_base_offset
    # Codes beside the token are 1 + their index in their stream's ids, where the pad has index 0.
    rows[:, 1:] -= 1
    return ModelOutput(ids, rows, end)


def deinterleave(rows: IntArray) -> IntArray:
    """Converts rows [n, streams], in which 0 is a pad and 1 + c the code c, to codes [max(n - streams + 1,
    0), streams]. In the rows each stream is one row later than the one before it. A pad becomes code 0."""
    streams = rows.shape[1]
    frames = max(len(rows) - streams + 1, 0)
    codes = np.stack([rows[stream : stream + frames, stream] for stream in range(streams)], axis=1)
    return np.maximum(codes - 1, 0)
