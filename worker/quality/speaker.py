"""The meter `speaker`: likeness of the voice to the reference that was cloned, by resemblyzer's d-vectors (Wan et al., 2018)."""

# resemblyzer is in no extra: its import is checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from resemblyzer import VoiceEncoder, preprocess_wav

from pipelines.audio import decode
from worker.quality.metrics import Readings, Utterance


class SpeakerMeter:
    """Score `similarity` (cosine, about 0.85 within a voice and 0.45 to 0.78 between voices); none for items without a reference."""

    def __init__(self) -> None:
        self._encoder: Any = VoiceEncoder("cpu", verbose=False)
        self._last: tuple[bytes, NDArray[np.float32]] | None = None

    def measure(self, utterance: Utterance) -> Readings:
        if utterance.reference is None:
            return {}
        digest = hashlib.sha256(utterance.reference).digest()
        if self._last is None or self._last[0] != digest:
            self._last = digest, self._embedding(*decode(utterance.reference))
        voice = self._embedding(utterance.samples, utterance.sample_rate)
        return {"similarity": (float(np.dot(voice, self._last[1])), "")}

    def _embedding(self, samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
        return self._encoder.embed_utterance(preprocess_wav(samples, source_sr=sample_rate))


open_meter = SpeakerMeter
