"""Encodes the speech of an item: its audio as a file in the format and at the sample rate of the job's spec, and
the times of its words."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import cache
from typing import cast

import msgspec
import numpy as np
import soundfile

from jobs.ledger.records import JobSpec
from pipelines.audio import encode, resample
from pipelines.audio_format import LOSSY, AudioFormat
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import Speech

#: The names and versions that libopus and LAME write into a file.
_ENCODERS = re.compile(rb"libopus [0-9A-Za-z.-]+|LAME[0-9.]+")


@dataclass(frozen=True, slots=True)
class EncodedAudio:
    """An audio file, with its properties after decoding."""

    data: bytes
    #: In Hz.
    sample_rate: int
    samples: int
    duration_ms: int


def encoded_audio(speech: Speech, spec: JobSpec) -> EncodedAudio:
    """Encodes speech in the job's format and at its sample rate; if it has none, at the rate of the speech.

    Raises `SynthesisError` for invalid audio, and for speech that has no sample at that rate.
    """
    audio_format = cast("AudioFormat", spec.format)
    rate = spec.sample_rate or speech.sample_rate
    samples = resample(speech.samples, speech.sample_rate, rate)
    if not len(samples):
        raise SynthesisError(
            ErrorCode.SYNTH_NO_AUDIO,
            f"The speech has no sample at {rate} Hz.",
            "Check the text, or try again.",
        )
    return encoded(samples, rate, audio_format)


def words_file(speech: Speech) -> bytes:
    """The content of the artifact `words`: a line with the words, and one with the phonemes if there are any."""
    return msgspec.json.Encoder().encode_lines([said for said in (speech.words, speech.phonemes) if said])


def encoded(samples: np.ndarray, rate: int, audio_format: AudioFormat) -> EncodedAudio:
    """Encodes samples at this rate."""
    data = encode(samples, rate, audio_format)
    # MP3 and Opus decode to another number of samples.
    decoded = soundfile.info(io.BytesIO(data)).frames if audio_format in LOSSY else len(samples)
    return EncodedAudio(data, rate, decoded, round(decoded * 1000 / rate))


@cache
def encoder(audio_format: str) -> str | None:
    """The encoder of a lossy format, with versions; None for lossless formats."""
    if audio_format not in LOSSY:
        return None
    found = _ENCODERS.search(encode(np.zeros(4_800, np.float32), 48_000, cast("AudioFormat", audio_format)))
    return f"libsndfile {soundfile.__libsndfile_version__}" + (f", {found[0].decode()}" if found else "")
