"""What the frames of an item mean: whole utterances and exact streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.delivery.speech import Uttered, no_audio
from pipelines.delivery.tokens import TokenOrder, TokenStreamer
from pipelines.fish_speech.codec import CodecDecoder, CodecState
from pipelines.vllm_engine.options import Tokens


@dataclass(frozen=True, slots=True)
class FishOrder(TokenOrder[CodecState]):
    """An order, and the codec that its streams start in."""

    decoder: CodecDecoder

    def read(self, tokens: Tokens) -> Uttered[CodecState]:
        """The frames of all turns. Raises `SynthesisError`: `synth.no_eos`, `synth.no_audio` when a turn has none."""
        assert tokens.codes is not None
        self.check_end(tokens.finish, len(tokens.codes))
        if not len(tokens.codes):
            raise no_audio("The model ended a turn before its first frame.")
        return Uttered(tokens.codes, tokens.finish)

    def reader(self) -> FishReader:
        return FishReader(self.decoder)


class FishReader:
    """A `pipelines.delivery.tokens.TokenReader` of frames that are whole as they come."""

    def __init__(self, decoder: CodecDecoder) -> None:
        self._decoder = decoder

    def read(self, ids: list[int], codes: NDArray[np.int64] | None) -> NDArray[np.int64]:
        assert codes is not None
        return codes

    def start(self) -> CodecState:
        return self._decoder.new_state()


class FishStreamer(TokenStreamer[CodecState]):
    """A stream of frames, 21.5 a second: the first chunk is the first frame."""

    chunk_frames = (1, 2, 4, 8, 12)
