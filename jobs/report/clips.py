"""The audio of the shown items: where a page finds it, and how it looks."""

from __future__ import annotations

import base64
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from jobs.ledger.records import Artifact
from jobs.packs import read_artifact
from jobs.store.base import ObjectStore
from pipelines.audio import decode, encode
from pipelines.errors import NightjarError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Of both pictures, in pixels; the waveform is drawn in these units too.
WIDTH, WAVE_HEIGHT, SPECTROGRAM_HEIGHT = 220, 44, 64
_WINDOW_SECONDS = 0.032
_FLOOR_DB = -75.0
#: Few, so that the picture is small.
_LEVELS = 64
_SILENCE_DBFS = -100.0


@dataclass(frozen=True, slots=True)
class Picture:
    """The pictures of some speech, and the same in numbers."""

    #: `d` of an SVG path in a box of `WIDTH` x `WAVE_HEIGHT`.
    wave: str
    #: A grey PNG as a `data:` address, black where it is silent; the page colours it.
    spectrogram: str
    seconds: float
    #: Highest sample and root mean square, in dB of full scale.
    peak_dbfs: float
    rms_dbfs: float


def picture(samples: NDArray[np.float32], sample_rate: int) -> Picture:
    """The pictures of some speech. `samples`: float32 [samples], at least one."""
    return Picture(
        wave=_wave(samples),
        spectrogram=_data_address("image/png", _png(_spectrogram(samples, sample_rate))),
        seconds=len(samples) / sample_rate,
        peak_dbfs=_dbfs(float(np.abs(samples).max())),
        rms_dbfs=_dbfs(math.sqrt(float(np.mean(np.square(samples, dtype=np.float64))))),
    )


def _wave(samples: NDArray[np.float32]) -> str:
    """A band from the lowest to the highest sample of each column, as one closed path."""
    columns = np.arange(WIDTH // 2)
    starts = np.minimum(columns * len(samples) // len(columns), len(samples) - 1)
    highs = np.minimum(np.maximum.reduceat(samples, starts), 1.0)
    lows = np.maximum(np.minimum.reduceat(samples, starts), -1.0)
    middle = WAVE_HEIGHT / 2
    across = 2 * np.concatenate([columns, columns[::-1]])
    down = np.concatenate([middle - middle * highs, (middle - middle * lows + 0.5)[::-1]])
    return "M" + "L".join(f"{x} {y:.1f}" for x, y in zip(across, down, strict=True)) + "Z"


def _spectrogram(samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.uint8]:
    """Brightness, uint8 [SPECTROGRAM_HEIGHT, columns]: low frequencies at the bottom, in equal steps on the
    mel scale (O'Shaughnessy, 1987) up to 8 kHz."""
    size = max(16, round(_WINDOW_SECONDS * sample_rate))
    padded = np.pad(samples, (0, max(0, size - len(samples))))
    columns = min(WIDTH, max(1, len(padded) - size + 1))
    starts = np.linspace(0, len(padded) - size, columns).astype(np.int64)
    frames = padded[starts[:, None] + np.arange(size)] * np.hanning(size).astype(np.float32)
    power = np.abs(np.fft.rfft(frames, axis=1)) / (size / 4)
    mels = np.linspace(0, math.log10(1 + min(sample_rate / 2, 8000) / 700), SPECTROGRAM_HEIGHT + 1)
    bins = (700 * (10**mels - 1) * size / sample_rate).astype(np.int64)
    # The loudest bin of each row, so that a lone harmonic is not averaged away.
    banded = np.maximum.reduceat(power[:, : bins[-1] + 1], bins[:-1], axis=1).T[::-1]
    share = np.clip(1 - 20 * np.log10(np.maximum(banded, 1e-9)) / _FLOOR_DB, 0, 1)
    return (share * (_LEVELS - 1) + 0.5).astype(np.uint8) * np.uint8(256 // _LEVELS)


def _png(levels: NDArray[np.uint8]) -> bytes:
    """A PNG (ISO 15948): 8 bits of grey a pixel, no filter. `levels`: uint8 [height, width]."""
    height, width = levels.shape
    rows = np.pad(levels, ((0, 0), (1, 0)))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _dbfs(value: float) -> float:
    return max(_SILENCE_DBFS, 20 * math.log10(value)) if value > 0 else _SILENCE_DBFS


#: Maximum of a file that is drawn or embedded.
MAX_BYTES = 32 << 20
#: Of an embedded clip, and of all of them as they stand in the page.
CLIP_SECONDS = 10.0
MAX_EMBEDDED_BYTES = 12_000_000


@dataclass(frozen=True, slots=True)
class Clip:
    """The audio of one item on a page."""

    #: Source of the player: a relative link or a `data:` address; None: no player.
    source: str | None
    picture: Picture | None
    #: A remark for the reader; may be empty.
    note: str = ""


class Clips:
    """Makes clips, one after the other, for the page at the path `page`."""

    def __init__(self, store: ObjectStore, page: Path, *, embed: bool) -> None:
        self._store = store
        self._root = None if embed else store.root
        self._folder = Path(os.path.abspath(page)).parent
        self._left = MAX_EMBEDDED_BYTES
        #: Whether players read the store's files and not data in the page.
        self.linked = self._root is not None

    def clip(self, artifact: Artifact) -> Clip:
        """The clip of an artifact. Audio that cannot be read has no player, and a note with the reason."""
        link = None if self._root is None else quote(os.path.relpath(self._root / artifact.key, self._folder))
        if artifact.bytes > MAX_BYTES:
            return Clip(link, None, "too large to be drawn" if link else "too large to be embedded")
        try:
            samples, rate = decode(read_artifact(self._store, artifact), max_seconds=3600)
        except NightjarError as error:
            return Clip(None, None, f"cannot be read: {error.code.value}")
        drawn = picture(samples, rate)
        if link is not None:
            return Clip(link, drawn)
        cut = samples[: int(CLIP_SECONDS * rate)]
        source = _data_address("audio/flac", encode(cut, rate, "flac"))
        if len(source) > self._left:
            return Clip(None, drawn, "no room for more embedded audio")
        self._left -= len(source)
        return Clip(source, drawn, f"the first {CLIP_SECONDS:g} s" if len(cut) < len(samples) else "")


def _data_address(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
