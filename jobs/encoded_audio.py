"""Encodes the speech of an item: its audio as a file in the format and at the sample rate of the job's spec, also
speech that was made in parts, and the times of its words."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, Generic, TypeVar, cast

import msgspec
import numpy as np
import soundfile
from numpy.typing import NDArray

from jobs.ledger.records import JobSpec
from pipelines.audio import encode, encode_pcm, resample, to_pcm, trim_silence
from pipelines.audio_format import LOSSY, AudioFormat
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import Speech, Word

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


def words_file(speech: Speech) -> bytes:
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
        self._pauses, self._spec = [*pauses[:-1], 0.0], spec
        self._file = SpooledTemporaryFile(_SPOOLED_BYTES, prefix="nightjar-speech-")  # noqa: SIM115
        #: Number of a part -> place and size of its samples in the file, in bytes, and its speech without them.
        self._parts: dict[int, tuple[int, int, Speech]] = {}
        self._lock = threading.Lock()

    def add(self, number: int, speech: Speech) -> bool:
        """Adds the speech of a part; whether all parts are there."""
        rate = self._spec.sample_rate or speech.sample_rate
        trimmed = trim_silence(speech, KEPT_MS)
        samples = resample(trimmed.samples, speech.sample_rate, rate)
        steps = np.arange(len(samples), dtype=np.float32)
        fades = np.minimum(np.minimum(steps, steps[::-1]) / np.float32(FADE_MS * rate / 1000), 1)
        pause = max(0, round(self._pauses[number] * rate) - 2 * KEPT_MS * rate // 1000)
        pcm = np.pad(to_pcm(samples * fades), (0, pause))
        with self._lock:
            said = replace(trimmed, samples=samples[:0], sample_rate=rate)
            self._parts[number] = self._file.seek(0, io.SEEK_END), pcm.nbytes, said
            self._file.write(pcm.data)
            return len(self._parts) == len(self._pauses)

    def encoded(self) -> tuple[EncodedAudio[BinaryIO], bytes]:
        """The joined speech and its `words_file`, empty if the words are not known. Called once, after the last
        part."""
        audio_format, rate = cast("AudioFormat", self._spec.format), self._parts[0][2].sample_rate
        total, words, phonemes = 0, list[Word](), list[Word]()
        for number in range(len(self._pauses)):
            _, size, said = self._parts[number]
            words += [word.moved(total / rate) for word in said.words]
            phonemes += [word.moved(total / rate) for word in said.phonemes]
            total += size // 2
        file = cast("BinaryIO", SpooledTemporaryFile(_SPOOLED_BYTES, prefix="nightjar-speech-"))  # noqa: SIM115
        encode_pcm(self._blocks(), total, rate, audio_format, file)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        self._file.close()
        if audio_format in LOSSY:
            total = soundfile.info(file).frames
        said = replace(self._parts[0][2], words=tuple(words), phonemes=tuple(phonemes))
        audio = EncodedAudio(file, size, rate, total, round(total * 1000 / rate))
        return audio, words_file(said) if words else b""

    def _blocks(self) -> Iterator[NDArray[np.int16]]:
        for number in range(len(self._pauses)):
            place, size, _ = self._parts[number]
            self._file.seek(place)
            yield np.frombuffer(self._file.read(size), "<i2")


@cache
def encoder(audio_format: str) -> str | None:
    """The encoder of a lossy format, with versions; None for lossless formats."""
    if audio_format not in LOSSY:
        return None
    found = _ENCODERS.search(encode(np.zeros(4_800, np.float32), 48_000, cast("AudioFormat", audio_format)))
    return f"libsndfile {soundfile.__libsndfile_version__}" + (f", {found[0].decode()}" if found else "")
