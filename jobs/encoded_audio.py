"""Encodes the speech of an item: its audio as a file in the format and at the sample rate of the job's spec, also
speech that was made in parts, and the times of its words."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
import soundfile
from numpy.typing import NDArray

from jobs.codes import StoredCodes
from jobs.ledger.records import WORDS, JobSpec
from pipelines.audio import Samples, encode, encode_pcm, resample, to_pcm, trim_silence
from pipelines.audio_format import LOSSY, AudioFormat
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import CodecIdentity, Speech, Word

#: Silence that a part of joined speech keeps at each end, and the length of its fades, both part of the pauses.
KEPT_MS, FADE_MS = 50, 5
#: Joined speech of more bytes lies in a temporary file.
_SPOOLED_BYTES = 32 << 20

#: The names and versions that libopus and LAME write into a file.
_ENCODERS = re.compile(rb"libopus [0-9A-Za-z.-]+|LAME[0-9.]+")


Data = TypeVar("Data", bytes, BinaryIO)


class EncodedAudio(NamedTuple, Generic[Data]):
    """An audio file, with its properties after decoding."""

    data: Data
    #: In bytes.
    size: int
    #: In Hz.
    sample_rate: int
    samples: int

    @property
    def facts(self) -> dict[str, Any]:
        """The fields that an artifact has too."""
        duration_ms = round(self.samples * 1000 / self.sample_rate)
        return {"duration_ms": duration_ms, "sample_rate": self.sample_rate, "samples": self.samples}


def encoded_audio(
    samples: Samples, sample_rate: int, audio_format: str, wanted: int | msgspec.UnsetType | None = None
) -> EncodedAudio[bytes]:
    """Encodes samples, [samples] or [samples, channels], that have this rate in Hz. `wanted`: the rate to which they
    are resampled first, if any.

    Raises `SynthesisError` for invalid audio, and for samples of which none is left at that rate.
    """
    rate = wanted or sample_rate
    audio_format = cast("AudioFormat", audio_format)
    samples = resample(samples, sample_rate, rate)
    if not len(samples):
        raise SynthesisError(
            ErrorCode.SYNTH_NO_AUDIO,
            f"The speech has no sample at {rate} Hz.",
            "Check the text, or try again.",
        )
    data = encode(samples, rate, audio_format)
    # MP3 and Opus decode to another number of samples.
    decoded = soundfile.info(io.BytesIO(data)).frames if audio_format in LOSSY else len(samples)
    return EncodedAudio(data, len(data), rate, decoded)


def words_file(*said: Sequence[Word]) -> bytes:
    """The content of the artifact `words`: a line with the words, and one with the phonemes if there are any."""
    return msgspec.json.Encoder().encode_lines([line for line in said if line])


def stored_files(
    speech: Speech, spec: JobSpec, codec: CodecIdentity | None
) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Yields (kind, content, other columns of the artifact) of each file that a job stores of a speech. The first one is
    its audio or, without samples, its codes; the others have no columns. `codec`: None in a job without codes."""
    if len(speech.samples):
        audio = encoded_audio(speech.samples, speech.sample_rate, spec.format, spec.sample_rate)
        yield "audio", audio.data, {**audio.facts, "meta": speech.meta}
    if speech.codes is not None and codec is not None:
        length = {"duration_ms": speech.duration_ms, "samples": speech.sample_count}
        facts = {**length, "sample_rate": speech.sample_rate, "meta": speech.meta}
        content = StoredCodes(speech.codes, speech.voice_codes, codec).encoded()
        yield "codes", content, {} if len(speech.samples) else facts
    if speech.text_out is not None:
        yield "text", speech.text_out.encode(), {}
    if speech.words:
        yield WORDS, words_file(speech.words, speech.phonemes), {}


class JoinedSpeech:
    """The speech of the parts of a text, which come in any order, as one audio file. Thread-safe.

    Each part begins and ends in silence, so that there is no click between them. The samples lie in a
    temporary file that has no name, since 200,000 characters are hours of speech.
    """

    def __init__(self, pauses: Sequence[float], spec: JobSpec) -> None:
        """`pauses`: seconds of silence after each part; the last one is not used."""
        self._pauses = [*pauses[:-1], 0.0]
        self._spec = spec
        self._file = SpooledTemporaryFile(_SPOOLED_BYTES, prefix="nightjar-speech-")  # noqa: SIM115
        #: Number of a part -> place and size of its samples in the file, in bytes; their rate; its words and phonemes.
        self._parts: dict[int, tuple[int, int, int, tuple[Sequence[Word], Sequence[Word]]]] = {}
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
            place = self._file.seek(0, io.SEEK_END)
            self._parts[number] = place, pcm.nbytes, rate, (trimmed.words, trimmed.phonemes)
            self._file.write(pcm.data)
            return len(self._parts) == len(self._pauses)

    def encoded(self) -> tuple[EncodedAudio[BinaryIO], bytes]:
        """The joined speech and its `words_file`, empty if the words are not known. Called once, after the last
        part."""
        audio_format = cast("AudioFormat", self._spec.format)
        rate = self._parts[0][2]
        total = 0
        whole = (list[Word](), list[Word]())
        for number in range(len(self._pauses)):
            _, size, _, said = self._parts[number]
            for joined, words in zip(whole, said, strict=True):
                joined += [word.moved(total / rate) for word in words]
            total += size // 2
        file = cast("BinaryIO", SpooledTemporaryFile(_SPOOLED_BYTES, prefix="nightjar-speech-"))  # noqa: SIM115
        encode_pcm(self._blocks(), total, rate, audio_format, file)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        self._file.close()
        if audio_format in LOSSY:
            total = soundfile.info(file).frames
        return EncodedAudio(file, size, rate, total), words_file(*whole)

    def _blocks(self) -> Iterator[NDArray[np.int16]]:
        for number in range(len(self._pauses)):
            place, size, *_ = self._parts[number]
            self._file.seek(place)
            yield np.frombuffer(self._file.read(size), "<i2")


@cache
def encoder(audio_format: str) -> str | None:
    """The encoder of a lossy format, with versions; None for lossless formats."""
    if audio_format not in LOSSY:
        return None
    found = _ENCODERS.search(encode(np.zeros(4_800, np.float32), 48_000, cast("AudioFormat", audio_format)))
    return f"libsndfile {soundfile.__libsndfile_version__}" + (f", {found[0].decode()}" if found else "")
