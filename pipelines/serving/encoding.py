"""Speech as bytes: whole files, or pieces of a file whose length nobody knows yet."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol, cast

import numpy as np
import soundfile

from pipelines.audio import encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

SpeechFormat = Literal["wav", "flac", "pcm"]
MEDIA_TYPES: dict[SpeechFormat, str] = {"wav": "audio/wav", "flac": "audio/flac", "pcm": "audio/pcm"}
_HEADER_BYTES = 44
#: What a stream writes as a length: players read on to the end, as they do with OpenAI's own streams.
_UNKNOWN = 0xFFFFFFFF


def whole_file(samples: NDArray[np.float32], sample_rate: int, kind: SpeechFormat) -> bytes:
    """A file, or bare 16-bit PCM in little-endian order. Raises `SynthesisError` (`synth.nan`)."""
    return pcm(samples, sample_rate) if kind == "pcm" else encode(samples, sample_rate, kind)


def pcm(samples: NDArray[np.float32], sample_rate: int) -> bytes:
    """16-bit PCM in little-endian order of mono samples [samples]. Raises `SynthesisError` (`synth.nan`)."""
    return encode(samples, sample_rate, "wav")[_HEADER_BYTES:]


class StreamEncoder(Protocol):
    """Makes the bytes of a stream, piece by piece."""

    def add(self, samples: NDArray[np.float32]) -> bytes: ...

    def end(self) -> bytes: ...


def stream_encoder(sample_rate: int, kind: SpeechFormat) -> StreamEncoder:
    """An encoder for chunks [samples] of one stream."""
    return _FlacStream(sample_rate) if kind == "flac" else _PcmStream(sample_rate, with_header=kind == "wav")


class _PcmStream:
    def __init__(self, sample_rate: int, *, with_header: bool) -> None:
        self._rate = sample_rate
        self._header = wav_stream_header(sample_rate) if with_header else b""

    def add(self, samples: NDArray[np.float32]) -> bytes:
        head, self._header = self._header, b""
        return head + pcm(samples, self._rate)

    def end(self) -> bytes:
        return b""


def wav_stream_header(sample_rate: int) -> bytes:
    """The header of a WAV stream of unknown length."""
    header = bytearray(encode(np.zeros(0, np.float32), sample_rate, "wav"))
    header[4:8] = header[40:44] = struct.pack("<I", _UNKNOWN)
    return bytes(header)


class _Pipe(io.RawIOBase):
    """A file that hands on what is written at its end; what the encoder goes back to write at its start comes too late."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = bytearray()
        self._end = self._place = 0

    def write(self, data: object, /) -> int:
        piece = bytes(data)  # pyright: ignore[reportArgumentType]
        if self._place == self._end:
            self._ready += piece
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
        ready, self._ready = bytes(self._ready), bytearray()
        return ready


class _FlacStream:
    def __init__(self, sample_rate: int) -> None:
        self._pipe = _Pipe()
        self._rate = sample_rate
        self._file = soundfile.SoundFile(cast(BinaryIO, self._pipe), "w", sample_rate, 1, format="FLAC", subtype="PCM_16")

    def add(self, samples: NDArray[np.float32]) -> bytes:
        if len(samples):
            self._file.write(np.frombuffer(pcm(samples, self._rate), "<i2"))
        return self._pipe.take()

    def end(self) -> bytes:
        self._file.close()
        return self._pipe.take()
