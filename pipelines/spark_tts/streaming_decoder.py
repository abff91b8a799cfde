"""BiCodec behind the codec stage: whole utterances in masked batches, streams window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipelines.codec.batches import longest_first
from pipelines.codec.stage import Decoder
from pipelines.spark_tts.bicodec import BiCodec

#: Tokens of one batch of the decoder on a GPU, padding included; the widest tensor has 61 kB a token in bfloat16.
BATCH_TOKENS = 8192
#: Lengths are rounded up to multiples of this, so that convolutions meet few shapes.
LENGTH_STEP = 32
#: A stream's window: tokens before what is new, and tokens behind it that must be there before it is heard.
LEFT_TOKENS, RIGHT_TOKENS = 64, 12
#: Samples over which a window fades into the next; they lie in the tokens behind.
FADE_SAMPLES = 320


@dataclass(slots=True, eq=False)
class Voice:
    """Where an utterance starts: its global tokens, int64 [tokens]; and for a stream what was sent so far."""

    tokens: Tensor
    #: All semantic tokens that came.
    semantic: list[int] = field(default_factory=list[int])
    #: Tokens whose audio was handed out.
    heard: int = 0
    #: The last window's samples behind what was handed out, to fade from.
    tail: Tensor | None = None


class BiCodecDecoder(Decoder[Voice]):
    """Its states are voices. Codes are semantic tokens, int64 [steps, 1].

    Empty codes end a stream. On the CPU, and with `alone`, every utterance is decoded by itself: the rounding of a batch differs, and on a
    CPU it is no faster.
    """

    def __init__(self, codec: BiCodec, *, left: int = LEFT_TOKENS, right: int = RIGHT_TOKENS, alone: bool = False) -> None:
        self.codec = codec
        self._alone = alone or codec.device.type == "cpu"
        self._left = left
        self._right = right
        self._samples = codec.config.samples_per_token

    def new_state(self) -> Voice:
        """The place of a voice for codes that come without one; no request of ours does."""
        return Voice(torch.zeros(self.codec.config.speaker.tokens, dtype=torch.long))

    def decode(self, codes: Sequence[Tensor], states: Sequence[Voice] | None = None) -> list[Tensor]:
        """Whole utterances in the voices of `states` -> float32 samples each."""
        assert states is not None
        return self._decode([one[:, 0] for one in codes], [state.tokens for state in states])

    def decode_chunk(self, states: Sequence[Voice], codes: Sequence[Tensor]) -> list[Tensor]:
        """The next tokens of streams -> the samples that are settled with them."""
        for state, new in zip(states, codes):
            state.semantic += new[:, 0].tolist()
        ends = [len(state.semantic) - (self._right if len(new) else 0) for state, new in zip(states, codes)]
        ready = [(state, end) for state, end in zip(states, ends) if end > state.heard]
        starts = [max(0, state.heard - self._left) for state, _ in ready]
        windows = [torch.tensor(state.semantic[start:]) for (state, _), start in zip(ready, starts)]
        waves = self._decode(windows, [state.tokens for state, _ in ready]) if ready else []
        settled = {id(state): self._settle(state, end, start, wave) for (state, end), start, wave in zip(ready, starts, waves)}
        return [settled.get(id(state), torch.zeros(0)) for state in states]

    def _settle(self, state: Voice, end: int, start: int, wave: Tensor) -> Tensor:
        """Cuts what is new out of a window that starts at token `start`, and fades into it from the window before."""
        first, last = (state.heard - start) * self._samples, (end - start) * self._samples
        new = wave[first:last].clone()
        if state.tail is not None:
            size = min(len(state.tail), len(new))
            rise = torch.linspace(0, 1, size, device=new.device)
            new[:size] = new[:size] * rise + state.tail[:size] * (1 - rise)
        tail = wave[last : last + FADE_SAMPLES]
        state.tail = tail.clone() if len(tail) else None
        state.heard = end
        return new

    def _decode(self, semantic: list[Tensor], voices: list[Tensor]) -> list[Tensor]:
        if self._alone:
            return [self.codec.decode([row], [voice])[0] for row, voice in zip(semantic, voices)]
        waves: dict[int, Tensor] = {}
        for batch in longest_first([len(row) for row in semantic], BATCH_TOKENS):
            longest = -(-max(len(semantic[index]) for index in batch) // LENGTH_STEP) * LENGTH_STEP
            made = self.codec.decode([semantic[index] for index in batch], [voices[index] for index in batch], pad_to=longest)
            waves.update(zip(batch, made))
        return [waves[index] for index in range(len(semantic))]
