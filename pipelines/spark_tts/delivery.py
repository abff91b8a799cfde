"""What the LM's tokens mean: whole utterances and streams of semantic tokens, in a voice that was cloned or comes with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.delivery.speech import Uttered, no_audio
from pipelines.delivery.tokens import TokenOrder, TokenStreamer
from pipelines.spark_tts.stage import Voice
from pipelines.spark_tts.vocabulary import SparkCodes, Vocabulary
from pipelines.vllm_engine.options import Tokens


@dataclass(frozen=True, slots=True)
class SparkOrder(TokenOrder[Voice]):
    """An order and how its tokens are read."""

    vocabulary: Vocabulary
    #: The global tokens of a cloned voice; None where the LM makes them itself.
    voice: tuple[int, ...] | None
    #: How many global tokens a voice has.
    voice_tokens: int

    def codes(self, tokens: Tokens) -> SparkCodes:
        """The tokens of BiCodec in a finished sequence.

        Raises `SynthesisError`: `synth.no_eos` when it did not end, `synth.no_audio` when it holds no speech or no whole voice.
        """
        self.check_end(tokens.finish, len(tokens.ids), "tokens")
        found = self.vocabulary.parse(tokens.ids)
        voice = found.voice if self.voice is None else self.voice
        if not found.semantic:
            raise no_audio("The model wrote no speech tokens.")
        if len(voice) != self.voice_tokens:
            raise no_audio(f"The model wrote {len(voice)} tokens of a voice instead of {self.voice_tokens}.")
        return SparkCodes(found.semantic, voice)

    def read(self, tokens: Tokens) -> Uttered[Voice]:
        codes = self.codes(tokens)
        return Uttered(column(codes.semantic), tokens.finish, Voice(torch.tensor(codes.voice)))

    def reader(self) -> SparkReader:
        return SparkReader(self)


class SparkReader:
    """A `pipelines.delivery.tokens.TokenReader` of semantic tokens and the voice before them."""

    def __init__(self, order: SparkOrder) -> None:
        self._order = order
        self._ids: list[int] = []

    def read(self, ids: list[int], codes: NDArray[np.int64] | None) -> NDArray[np.int64]:
        self._ids += ids
        return column(self._order.vocabulary.parse(ids).semantic)

    def start(self) -> Voice | None:
        """The voice, whose tokens all stand before the first semantic one; None when it is not whole."""
        order = self._order
        voice = order.vocabulary.parse(self._ids).voice if order.voice is None else order.voice
        return Voice(torch.tensor(voice)) if len(voice) == order.voice_tokens else None


class SparkStreamer(TokenStreamer[Voice]):
    """A stream of semantic tokens, 50 a second."""

    chunk_frames = (20, 25, 50, 100)
    looks_ahead = True


def column(semantic: tuple[int, ...] | list[int]) -> NDArray[np.int64]:
    """Semantic tokens as codes of one codebook, int64 [steps, 1]."""
    return np.array(semantic, dtype=np.int64).reshape(-1, 1)
