"""Recordings to clone: read as the published model reads them, turned into tokens, and kept by content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.nn.recordings import RecordingCache, read_recording
from pipelines.spark_tts.bicodec import Tokenizer
from pipelines.spark_tts.config import SparkConfig
from pipelines.spark_tts.features import SemanticFeatures

#: Of the published volume normalisation (utils/audio.py, `audio_volume_normalize`).
_QUIET_PEAK, _PEAK_FLOOR, _HEARD, _LEAST_HEARD, _LOUDNESS, _GAINS = 0.1, 1e-3, 0.01, 10, 0.2, (0.1, 10.0)


@dataclass(frozen=True, slots=True)
class Reference:
    """A recording as the model hears it."""

    #: Global tokens.
    voice: tuple[int, ...]
    #: Semantic tokens, 50 a second; empty where they were not asked for.
    semantic: tuple[int, ...]


class ReferenceEncoder:
    """Recordings to tokens, and the last ones kept by their content."""

    def __init__(self, config: SparkConfig, tokenizer: Tokenizer, features: SemanticFeatures, capacity: int = 1024) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._features = features
        self._kept: RecordingCache[Reference] = RecordingCache(capacity)

    def prepare(self, recording: bytes, with_semantic: bool) -> Reference:
        """The tokens of an encoded audio file within the bounds of `pipelines.audio`; semantic tokens only where they are needed.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) when the device has no room for it.
        """
        return self._kept.get(recording, with_semantic, lambda: self.encode([self.read(recording)], with_semantic)[0])

    def read(self, recording: bytes) -> NDArray[np.float32]:
        """Samples [n] at the model's rate: the first channel, resampled at very high quality, at the published volume."""
        samples = read_recording(recording, self._config.sample_rate, channel=0, quality="VHQ")
        return normalize_volume(samples).astype(np.float32) if self._config.volume_normalize else samples

    def encode(self, recordings: Sequence[NDArray[np.float32]], with_semantic: bool = True) -> list[Reference]:
        """The tokens of recordings [samples] of one length, at the model's rate and volume, as one batch."""
        device = self._features.device
        clips = np.stack([reference_clip(samples, self._config.clip_samples) for samples in recordings])
        voices = self._tokenizer.global_tokens(torch.from_numpy(clips).to(device)).tolist()
        if not with_semantic:
            return [Reference(tuple(voice), ()) for voice in voices]
        values = np.stack([self._features.values(samples) for samples in recordings])
        semantic = self._tokenizer.semantic_tokens(self._features(torch.from_numpy(values))).tolist()
        return [Reference(tuple(voice), tuple(tokens)) for voice, tokens in zip(voices, semantic)]


def normalize_volume(samples: NDArray[np.floating]) -> NDArray[np.floating]:
    """Samples [n] scaled so that their loud part, the 90th to the 99th hundredth of what is heard, is at 0.2; peak at most 1."""
    levels = np.sort(np.abs(samples))
    if levels[-1] < _QUIET_PEAK:
        samples = samples / max(levels[-1], _PEAK_FLOOR) * _QUIET_PEAK
    levels = levels[levels > _HEARD]
    if len(levels) <= _LEAST_HEARD:
        return samples
    loud = np.mean(levels[int(0.9 * len(levels)) : int(0.99 * len(levels))])
    samples = samples * np.clip(_LOUDNESS / loud, *_GAINS)
    peak = np.max(np.abs(samples))
    return samples / peak if peak > 1 else samples


def reference_clip(samples: NDArray[np.float32], length: int) -> NDArray[np.float32]:
    """The first `length` samples; what is shorter is repeated."""
    return np.tile(samples, -(-length // len(samples)))[:length]
