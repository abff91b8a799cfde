"""The meter `distillmos`: naturalness from 1 to 5 by DistillMOS (Stahl and Gamper, 2025), a small student of XLS-R."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from worker.quality.metrics import Readings, Utterance

SAMPLE_RATE = 16_000


class DistillMosMeter:
    """Score `distillmos`; one thread, float32."""

    def __init__(self, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._model: Any = _model_class()().eval()

    def measure(self, utterance: Utterance) -> Readings:
        audio = utterance.resampled(SAMPLE_RATE)
        with torch.inference_mode():
            score = self._model(torch.from_numpy(audio.copy())[None, :])
        return {"distillmos": (float(score.item()), "")}


def _model_class() -> Any:
    # Only its command line reads files with torchaudio, which has no build for every torch: an empty module stands in meanwhile,
    # and goes again, or others would take it for the real one.
    stands_in = "torchaudio" not in sys.modules
    if stands_in:
        sys.modules["torchaudio"] = types.ModuleType("torchaudio")
    try:
        from distillmos import ConvTransformerSQAModel
    finally:
        if stands_in:
            del sys.modules["torchaudio"]
    return ConvTransformerSQAModel


open_meter = DistillMosMeter
