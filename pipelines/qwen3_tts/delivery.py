"""The engine's codes as whole utterances and streams: `pipelines.engine.engine.Receiver` over what all families share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.delivery.speech import Order, Settled, Streamer, Uttered, Utterer, no_audio
from pipelines.engine.codec_stage import CodecStage
from pipelines.engine.core import Finish
from pipelines.errors import SynthesisError
from pipelines.qwen3_tts.codec import CodecState


@dataclass(frozen=True, slots=True)
class FrameOrder(Order):
    """An order and where the codec starts: after the reference's codes when cloning in context, else None."""

    start: CodecState | None = None

    def check(self, codes: NDArray[np.int64], finish: Finish) -> None:
        """Raises `SynthesisError` for codes [frames, codebooks] that are no whole speech: `synth.no_eos`, `synth.no_audio`."""
        self.check_end(finish, len(codes))
        if not len(codes):
            raise no_audio("The model ended the speech before its first frame.")


class FrameUtterer(Utterer[CodecState]):
    """Receives one whole utterance."""

    def __init__(self, order: FrameOrder, stage: CodecStage[CodecState], settled: Settled) -> None:
        super().__init__(order, stage, settled)
        self._frames = order

    def frames(self, codes: NDArray[np.int64]) -> None:
        """Whole utterances wait for their end."""

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        try:
            self._frames.check(codes, finish)
        except SynthesisError as error:
            self.failed(error)
        else:
            self.utter(Uttered(codes, finish, self._frames.start))


class FrameStreamer(Streamer[CodecState]):
    """Receives one utterance frame by frame."""

    def __init__(self, order: FrameOrder, stage: CodecStage[CodecState], settled: Settled) -> None:
        super().__init__(order, stage, settled, order.start.copy() if order.start else stage.new_state())
        self._frames = order

    def frames(self, codes: NDArray[np.int64]) -> None:
        self.push(codes)

    def finished(self, codes: NDArray[np.int64], finish: Finish) -> None:
        self.flush()
        try:
            self._frames.check(codes, finish)
        except SynthesisError as error:
            self.close(error)
        else:
            self.close(None)
