"""Encodes the speech of an item: its audio as a file in the format and at the sample rate of the job's spec, also
speech that was made in parts, and the times of its words."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, BinaryIO, Generic, TypeVar, cast

import msgspec
import numpy as np
import soundfile

from jobs.ledger.records import JobSpec
from pipelines.audio import encode, encode_pcm, resample, to_pcm, trim_silence
from pipelines.audio_format import LOSSY, AudioFormat
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import Speech, Word

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Silence that a part of joined speech keeps at each end, and the length of its fades, both part of the pauses.
KEPT_MS, FADE_MS = 50, 5
#: Joined speech of more bytes lies in a temporary file.
_SPOOLED_BYTES = 32 << 20

#: The names and versions that libopus and LAME write into a file.
_ENCODERS = re.compile(rb"libopus [0-9A-Za-z.-]+|LAME[0-9.]+")


Data = TypeVar("Data", bytes, BinaryIO)


@dataclass(frozen=True)
class EncodedAudio(Generic[Data]):
    """An audio file, with its properties after decoding."""

    data: Data
    #: In bytes.
    size: int
    #: In Hz.
    sample_rate: int
    samples: int
    duration_ms: int


def encoded_audio(speech: Speech, spec: JobSpec) -> EncodedAudio[bytes]:
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


def words_file(speech: Speech | JoinedSpeech) -> bytes:
    """The content of the artifact `words`: a line with the words, and one with the phonemes if there are any."""
    return msgspec.json.Encoder().encode_lines([said for said in (speech.words, speech.phonemes) if said])


def encoded(samples: np.ndarray, rate: int, audio_format: AudioFormat) -> EncodedAudio[bytes]:
    """Encodes samples at this rate."""
    data = encode(samples, rate, audio_format)
    # MP3 and Opus decode to another number of samples.
    decoded = soundfile.info(io.BytesIO(data)).frames if audio_format in LOSSY else len(samples)
    return EncodedAudio(data, len(data), rate, decoded, round(decoded * 1000 / rate))


class JoinedSpeech:
    """The speech of the parts of a text, which come in any order, as one audio file. Thread-safe.

    Each part begins and ends in silence, so that there is no click between them. The samples lie in a
    temporary file that has no name, since 200,000 characters are hours of speech.
    """

    def __init__(self, pauses: Sequence[float], spec: JobSpec) -> None:
        """`pauses`: seconds of silence after each part; the last one is not used."""
        self._pauses, self._spec = pauses, spec
        self._file = SpooledTemporaryFile(_SPOOLED_BYTES, prefix="nightjar-speech-")  # noqa: SIM115
        #: Number of a part -> place and size of its samples in the file, in bytes.
        self._places: dict[int, tuple[int, int]] = {}
        self._said: dict[int, tuple[tuple[Word, ...], tuple[Word, ...]]] = {}
        self._rate = 0
        self._lock = threading.Lock()
        #: Set by `encoded`.
        self.words: tuple[Word, ...] = ()
        self.phonemes: tuple[Word, ...] = ()

    def add(self, number: int, speech: Speech) -> bool:
        """Adds the speech of a part; whether all parts are there."""
        rate = self._spec.sample_rate or speech.sample_rate
        trimmed = trim_silence(speech, KEPT_MS)
        pcm = to_pcm(_faded(resample(trimmed.samples, speech.sample_rate, rate), rate))
        with self._lock:
            self._rate = rate
            self._said[number] = trimmed.words, trimmed.phonemes
            self._places[number] = self._file.seek(0, io.SEEK_END), pcm.nbytes
            self._file.write(pcm.data)
            return len(self._places) == len(self._pauses)

    def encoded(self) -> EncodedAudio[BinaryIO]:
        """The joined speech, after the last part."""
        audio_format = cast("AudioFormat", self._spec.format)
        gaps = [max(0, round(pause * self._rate) - 2 * _kept(self._rate)) for pause in self._pauses[:-1]]
        sizes = [self._places[number][1] // 2 + gap for number, gap in enumerate([*gaps, 0])]
        total = sum(sizes)
        starts = [start / self._rate for start in accumulate(sizes, initial=0)]
        self.words, self.phonemes = (
            tuple(
                [
                    word.moved(starts[number])
                    for number in range(len(sizes))
                    for word in self._said[number][kind]
                ]
            )
            for kind in (0, 1)
        )
        file = cast("BinaryIO", SpooledTemporaryFile(_SPOOLED_BYTES, prefix="nightjar-speech-"))  # noqa: SIM115
        encode_pcm(self._blocks([*gaps, 0]), total, self._rate, audio_format, file)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        self._file.close()
        if audio_format in LOSSY:
            total = soundfile.info(file).frames
        return EncodedAudio(file, size, self._rate, total, round(total * 1000 / self._rate))

    def _blocks(self, gaps: Sequence[int]) -> Iterator[NDArray[np.int16]]:
        for number, gap in enumerate(gaps):
            place, size = self._places[number]
            self._file.seek(place)
            yield np.frombuffer(self._file.read(size), "<i2")
            yield np.zeros(gap, np.int16)


def _kept(rate: int) -> int:
    return KEPT_MS * rate // 1000


def _faded(samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """The samples [samples], which rise from zero and fall to zero."""
    ramp = np.linspace(0, 1, min(FADE_MS * rate // 1000, len(samples) // 2), endpoint=False, dtype=np.float32)
    ends = np.ones_like(samples)
    ends[: len(ramp)] = ramp
    ends[len(samples) - len(ramp) :] = ramp[::-1]
    return samples * ends


@cache
def encoder(audio_format: str) -> str | None:
    """The encoder of a lossy format, with versions; None for lossless formats."""
    if audio_format not in LOSSY:
        return None
    found = _ENCODERS.search(encode(np.zeros(4_800, np.float32), 48_000, cast("AudioFormat", audio_format)))
    return f"libsndfile {soundfile.__libsndfile_version__}" + (f", {found[0].decode()}" if found else "")
