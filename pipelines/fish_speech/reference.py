"""Recordings to clone: read and resampled as the published model does, encoded on the codec's device, and kept by content."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv1d, pad

from pipelines.fish_speech.codec_encoder import CodecEncoder
from pipelines.nn.recordings import RecordingCache, check_recording, decode_recording

#: Zero crossings of the resampling filter on either side, and its cutoff as a share of the lower Nyquist frequency.
_ZEROS, _ROLLOFF = 6, 0.99
#: Filter banks that are kept, and the values of the largest one: rates that share next to nothing would need gigabytes.
_FILTERS, _MOST_VALUES = 16, 1 << 22


class ReferenceEncoder:
    """Recordings to codes, and the last ones kept by their content."""

    def __init__(self, encoder: CodecEncoder, capacity: int = 1024) -> None:
        self._encoder = encoder
        self._kept: RecordingCache[NDArray[np.int64]] = RecordingCache(capacity)

    def prepare(self, recording: bytes) -> NDArray[np.int64]:
        """The codes int64 [frames, codebooks] of an encoded audio file within the bounds of `pipelines.audio`.

        Raises `InputError`: `input.audio_unreadable`, `input.reference_length`, `input.reference_silent`;
        `SynthesisError` (`synth.oom`) when the device has no room for it.
        """
        return self._kept.get(recording, None, lambda: self._encoder.encode(self.read(recording)).cpu().numpy())

    def read(self, recording: bytes) -> Tensor:
        """float32 [samples] at the codec's rate: channels averaged, resampled on the device. Raises `InputError` as `prepare`."""
        samples, rate = decode_recording(recording)
        check_recording(samples, rate)
        wanted = self._encoder.config.sample_rate
        if (rate // math.gcd(rate, wanted)) * (wanted // math.gcd(rate, wanted)) > _MOST_VALUES:
            samples, rate = decode_recording(recording, wanted, quality="VHQ")
        return resample(torch.from_numpy(samples).to(self._encoder.device), rate, wanted)


def resample(samples: Tensor, rate: int, wanted: int) -> Tensor:
    """float32 [samples] at `rate` Hz -> at `wanted` Hz, by a windowed sinc (Hann), as torchaudio does by default (Smith, 1984)."""
    if rate == wanted:
        return samples
    shared = math.gcd(rate, wanted)
    old, new = rate // shared, wanted // shared
    filters, width = _filters(old, new)
    padded = pad(samples, (width, width + old))[None, None]
    out = conv1d(padded, filters.to(samples.device), stride=old)[0].T.reshape(-1)
    return out[: math.ceil(new * len(samples) / old)]


@lru_cache(maxsize=_FILTERS)
def _filters(old: int, new: int) -> tuple[Tensor, int]:
    """One filter for each phase of the output, float32 [new, 1, taps], and how many samples they look back."""
    cutoff = min(old, new) * _ROLLOFF
    width = math.ceil(_ZEROS * old / cutoff)
    taps = torch.arange(-width, width + old, dtype=torch.float64) / old
    phases = torch.arange(0, -new, -1, dtype=torch.float64) / new
    at = ((phases[:, None] + taps) * cutoff).clamp(-_ZEROS, _ZEROS)
    window = torch.cos(at * math.pi / _ZEROS / 2) ** 2
    filters = torch.sinc(at) * window * (cutoff / old)
    return filters[:, None].float(), width
