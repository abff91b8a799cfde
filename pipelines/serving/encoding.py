"""Encoded audio: files from clients, and answers as whole files or streams."""

from __future__ import annotations

import base64
import binascii
import io
import re
from contextlib import suppress
from typing import Any, BinaryIO, Literal, cast

import msgspec
import numpy as np
import soundfile
import soxr

from pipelines.audio import (
    CONTAINERS,
    NO_SAMPLES,
    Samples,
    encode,
    read_header,
    resample,
    to_pcm,
    unreadable,
    wav_header,
)
from pipelines.audio_format import CONTENT_TYPES, RATES_OF, AudioFormat, holds_rate
from pipelines.errors import ErrorCode, InputError

SpeechFormat = Literal[AudioFormat, "pcm"]
MEDIA_TYPES = {**CONTENT_TYPES, "pcm": "audio/pcm"}
#: Bare samples, for voice agents and telephony.
Encoding = Literal["pcm_s16le", "pcm_f32le", "pcm_mulaw", "pcm_alaw"]
MIN_RATE = 8_000
MAX_RATE = 48_000
_LAWS = {"pcm_mulaw": "ULAW", "pcm_alaw": "ALAW"}
#: Format tag of a WAV header, and bytes per sample.
_TAGS = {
    "pcm_s16le": (1, 2),
    "pcm_f32le": (3, 4),
    "pcm_mulaw": (7, 1),
    "pcm_alaw": (6, 1),
}
#: Compression level of an MP3 stream: 80 kbit/s at 24 kHz.
_MP3_LEVEL = 0.5
#: Samples before the speech of an MP3 without its table, by encoder and decoder, and the rate from which on frames are
#: twice as long as `_MP3_FRAME`.
_MP3_DELAY = 1105
_MP3_FRAME = 576
_MP3_LONG_RATE = 32_000


def whole_file(samples: Samples, sample_rate: int, kind: SpeechFormat) -> bytes:
    """A file, or bare 16-bit PCM in little-endian order. Raises `SynthesisError` (`synth.nan`)."""
    if kind == "pcm":
        return encoded(samples)
    rate = _file_rate(sample_rate, kind)
    return encode(resample(samples, sample_rate, rate), rate, kind)


def _file_rate(sample_rate: int, kind: AudioFormat) -> int:
    """The sample rate of a file in Hz: that of the speech, or the format's highest if the format does not
    support it."""
    return sample_rate if holds_rate(kind, sample_rate) else RATES_OF[kind][-1]


def encoded(samples: Samples, encoding: Encoding = "pcm_s16le") -> bytes:
    """Mono samples [samples] as bytes in little-endian order. Raises `SynthesisError` (`synth.nan`)."""
    pcm = to_pcm(samples)
    if encoding == "pcm_s16le":
        return pcm.tobytes()
    if encoding == "pcm_f32le":
        return np.clip(samples, np.float32(-1), np.float32(1)).astype("<f4").tobytes()
    buffer = io.BytesIO()
    soundfile.write(buffer, pcm, MAX_RATE, format="RAW", subtype=_LAWS[encoding])
    return buffer.getvalue()


class PcmStream:
    """Encodes a stream as bare samples or as a WAV."""

    compresses = False
    #: Samples before the speech, and samples of a frame, if the stream consists of whole ones.
    _delay = 0
    _frame = 1

    def __init__(
        self,
        sample_rate: int,
        wanted_rate: int,
        encoding: Encoding = "pcm_s16le",
        *,
        with_header: bool = False,
    ) -> None:
        self._rates = sample_rate, wanted_rate
        self._encoding: Encoding = encoding
        self._header = wav_header(wanted_rate, None, *_TAGS[encoding]) if with_header else b""
        self._resampler: soxr.ResampleStream | None = None

    @property
    def delay_seconds(self) -> float:
        """The time in the decoded stream at which the speech begins."""
        return self._delay / self._rates[1]

    def length(self, seconds: float) -> float:
        """The length in seconds of the decoded stream with so much speech."""
        samples = round(seconds * self._rates[1]) + self._delay
        return -(-samples // self._frame) * self._frame / self._rates[1]

    def add(self, samples: Samples, last: bool = False) -> bytes:
        """Adds a chunk [samples] and returns the bytes that are ready. The `last` chunk of an utterance
        flushes the resampler."""
        sample_rate, wanted_rate = self._rates
        if sample_rate != wanted_rate:
            resampler = self._resampler or soxr.ResampleStream(*self._rates, 1, dtype="float32", quality="HQ")
            samples = resampler.resample_chunk(samples, last=last)
            self._resampler = None if last else resampler
        if not len(samples):
            return b""
        head = self._header
        self._header = b""
        return head + encoded(samples, self._encoding)

    def end(self) -> bytes:
        """The bytes after the last chunk."""
        return b""


class _Pipe(io.RawIOBase):
    """A file object for the encoder of a stream. It collects appended bytes, and drops rewrites of earlier
    bytes, because those are already sent.

    `without_first`: drops the first write too. An MP3 begins with a table that libsndfile fills in at the
    end; with an empty table players show a length of 0.
    """

    def __init__(self, *, without_first: bool) -> None:
        super().__init__()
        self._ready = bytearray()
        self._end = self._place = 0
        self._without_first = without_first

    def write(self, data: object, /) -> int:
        piece = bytes(data)  # pyright: ignore[reportArgumentType]
        if self._place == self._end:
            self._ready += b"" if self._without_first and not self._end else piece
            self._end += len(piece)
        self._place += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._end}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: object, /) -> int:
        return 0

    def take(self) -> bytes:
        """Returns the bytes that were written since the last call."""
        ready = bytes(self._ready)
        self._ready = bytearray()
        return ready


class FileStream(PcmStream):
    """Encodes a stream as a compressed file."""

    compresses = True

    def __init__(self, sample_rate: int, kind: AudioFormat) -> None:
        rate = _file_rate(sample_rate, kind)
        is_mp3 = kind == "mp3"
        super().__init__(sample_rate, rate)
        self._pipe = _Pipe(without_first=is_mp3)
        container, subtype = CONTAINERS[kind]
        # Without the table, players compute the length from the bit rate, so it must be constant.
        steady = dict[str, Any]()
        if is_mp3:
            steady = {"bitrate_mode": "CONSTANT", "compression_level": _MP3_LEVEL}
            self._delay = _MP3_DELAY
            self._frame = _MP3_FRAME << (rate >= _MP3_LONG_RATE)
        self._file = soundfile.SoundFile(
            cast(BinaryIO, self._pipe), "w", rate, 1, format=container, subtype=subtype, **steady
        )

    def add(self, samples: Samples, last: bool = False) -> bytes:
        """As `PcmStream.add`. The file continues over all utterances, so the end of one does not flush the
        resampler."""
        self._file.buffer_write(super().add(samples), "int16")
        return self._pipe.take()

    def end(self) -> bytes:
        self._file.buffer_write(super().add(NO_SAMPLES, last=True), "int16")
        self._file.close()
        return self._pipe.take()


def stream_encoder(sample_rate: int, kind: SpeechFormat) -> PcmStream:
    """The encoder of one stream."""
    if kind in ("wav", "pcm"):
        return PcmStream(sample_rate, sample_rate, with_header=kind == "wav")
    return FileStream(sample_rate, kind)


#: Accepted formats of clients' files, as libsndfile names them.
_KNOWN = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})
_DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w.+-]+=[\w.+-]*)*;base64,", re.ASCII)
#: Maximum length of a data URL up to its comma.
_HEAD_CHARACTERS = 256
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")


def read_audio(text: str, max_seconds: float) -> bytes:
    """Decodes an audio file from base64 or a data URL. Nothing is fetched or opened by name.

    Raises `InputError`: `input.audio_forbidden` for any other URL, `input.audio_unreadable` for text that is
    not base64 or not audio; and as `pipelines.audio.read_header`.
    """
    data = _decoded(text)
    header = read_header(data, max_seconds)
    if header.format not in _KNOWN or header.frames <= 0:
        raise unreadable(
            f"The audio is {header.format} with {header.frames} samples.",
            "Give a WAV, FLAC, OGG or MP3 file with sound.",
        )
    return data


def _decoded(text: str) -> bytes:
    payload = text
    if _SCHEME.match(text[:64]):
        found = _DATA_URL.match(text[:_HEAD_CHARACTERS])
        if found is None:
            if text[:5].lower() == "data:":
                raise unreadable("The data URL is not base64.", "Write it as data:audio/wav;base64,...")
            raise InputError(
                ErrorCode.INPUT_AUDIO_FORBIDDEN,
                f"The audio is the address {text[:80]!r}; addresses are not fetched.",
                "Send the file itself, as base64 or in a data URL.",
            )
        payload = text[found.end() :]
    payload = "".join(payload.split()) if "\n" in payload else payload
    try:
        # Holds the GIL for a fifth of the time of the `base64` module, which also takes excess padding.
        with suppress(msgspec.ValidationError):
            return msgspec.convert(payload, bytes)
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise unreadable(
            "The audio is not base64.", "Send the bytes of the file as base64, with its padding."
        ) from error
