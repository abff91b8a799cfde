"""Bare samples in the encodings and at the rates of voice agents and telephony."""

from __future__ import annotations

import io
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import soundfile
import soxr

from pipelines.serving.encoding import pcm

if TYPE_CHECKING:
    from numpy.typing import NDArray

Encoding = Literal["pcm_s16le", "pcm_f32le", "pcm_mulaw", "pcm_alaw"]
MIN_RATE, MAX_RATE = 8_000, 48_000
_LAWS: dict[Encoding, str] = {"pcm_mulaw": "ULAW", "pcm_alaw": "ALAW"}
#: Of a WAV header: its format tag, and bytes a sample.
_TAGS: dict[Encoding, tuple[int, int]] = {"pcm_s16le": (1, 2), "pcm_f32le": (3, 4), "pcm_mulaw": (7, 1), "pcm_alaw": (6, 1)}
#: What a stream writes as a length: players read on to the end.
_UNKNOWN = 0xFFFFFFFF
_WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")


class Resampler:
    """Chunks of one utterance at another rate; joined they are the whole utterance resampled at once."""

    def __init__(self, sample_rate: int, wanted: int) -> None:
        self._stream = None if sample_rate == wanted else soxr.ResampleStream(sample_rate, wanted, 1, dtype="float32", quality="HQ")

    def add(self, samples: NDArray[np.float32], *, last: bool = False) -> NDArray[np.float32]:
        """The samples that are ready with these [samples]; with the `last` ones all the rest."""
        return samples if self._stream is None else self._stream.resample_chunk(samples, last=last)


def encoded(samples: NDArray[np.float32], encoding: Encoding) -> bytes:
    """Mono samples [samples] in little-endian order. Raises `SynthesisError` (`synth.nan`)."""
    linear = pcm(samples, MAX_RATE)
    if encoding == "pcm_s16le":
        return linear
    if encoding == "pcm_f32le":
        return np.clip(samples, np.float32(-1), np.float32(1)).astype("<f4").tobytes()
    return _law(encoding)[np.frombuffer(linear, "<u2")].tobytes()


def stream_header(sample_rate: int, encoding: Encoding) -> bytes:
    """The header of a WAV stream of unknown length."""
    tag, width = _TAGS[encoding]
    facts = (16, tag, 1, sample_rate, width * sample_rate, width, 8 * width)
    return _WAV_HEADER.pack(b"RIFF", _UNKNOWN, b"WAVE", b"fmt ", *facts, b"data", _UNKNOWN)


@lru_cache(maxsize=2)
def _law(encoding: Encoding) -> NDArray[np.uint8]:
    """The companded byte of each 16-bit sample, by its bits without a sign [65536]."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.arange(1 << 16, dtype=np.uint16).view(np.int16), MAX_RATE, format="RAW", subtype=_LAWS[encoding])
    return np.frombuffer(buffer.getvalue(), np.uint8)
