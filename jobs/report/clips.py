"""The audio of the shown items: players and waveforms."""

from __future__ import annotations

import base64
import math
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from jobs.codes import EXTENSION
from jobs.ledger.records import Artifact
from jobs.packs import read_artifact
from jobs.store.base import ObjectStore
from pipelines.audio import decode, encode
from pipelines.errors import NightjarError

#: Size of a waveform in pixels. Coordinates of the SVG are also pixels.
WIDTH, HEIGHT = 220, 44
_STROKE = 2
#: The lowest level that is told: -100 dB of full scale.
_SILENCE = 1e-5
#: Maximum size of a file that is drawn or embedded.
MAX_BYTES = 32 << 20
#: Maximum length of an embedded clip, and maximum size of all clips together, in characters of base64.
CLIP_SECONDS = 10.0
MAX_EMBEDDED_BYTES = 12_000_000


@dataclass(frozen=True, slots=True)
class Picture:
    """The waveform of an item, with its length and levels."""

    #: `d` of an SVG path in a box of `WIDTH` x `HEIGHT`.
    wave: str
    seconds: float
    #: Peak and root mean square, in dB of full scale.
    peak_dbfs: float
    rms_dbfs: float


def picture(samples: NDArray[np.float32], sample_rate: int) -> Picture:
    """Draws a waveform. `samples`: float32 [samples], at least one."""
    middle = HEIGHT / 2
    parts = np.array_split(np.clip(samples, -1, 1), min(WIDTH // _STROKE, len(samples)))
    # A stroke from the lowest to the highest sample of each column.
    strokes = (
        f"M{_STROKE * at} {middle - middle * part.max():.1f}V{middle - middle * part.min() + 0.5:.1f}"
        for at, part in enumerate(parts)
    )
    levels = float(np.abs(samples).max()), math.sqrt(float(np.mean(np.square(samples, dtype=np.float64))))
    peak_dbfs, rms_dbfs = (20 * math.log10(max(_SILENCE, level)) for level in levels)
    return Picture("".join(strokes), len(samples) / sample_rate, peak_dbfs, rms_dbfs)


@dataclass(frozen=True, slots=True)
class Clip:
    """The audio of one item on a page."""

    #: Source of the player: a relative link or a `data:` address; None: no player.
    source: str | None
    picture: Picture | None
    #: A remark for the reader, or an empty text.
    note: str = ""


class Clips:
    """Makes the clips of the page at the path `page`."""

    def __init__(self, store: ObjectStore, page: Path, *, embed: bool) -> None:
        self._store = store
        self._root = None if embed else store.root
        self._folder = Path(os.path.abspath(page)).parent
        self._left = MAX_EMBEDDED_BYTES
        #: Whether players read the store's files and not data in the page.
        self.linked = self._root is not None

    def clip(self, artifact: Artifact) -> Clip:
        """Makes the clip of an artifact. If audio cannot be read, its clip has a note instead of a player."""
        link = None if self._root is None else quote(os.path.relpath(self._root / artifact.key, self._folder))
        if artifact.key.endswith(EXTENSION):
            return Clip(None, None, "codes")
        if artifact.bytes > MAX_BYTES:
            return Clip(link, None, f"too large to be {'drawn' if link else 'embedded'}")
        try:
            samples, rate = decode(read_artifact(self._store, artifact), max_seconds=3600)
        except NightjarError as error:
            return Clip(None, None, f"cannot be read: {error.code.value}")
        drawn = picture(samples, rate)
        if link is not None:
            return Clip(link, drawn)
        cut = samples[: int(CLIP_SECONDS * rate)]
        source = f"data:audio/flac;base64,{base64.b64encode(encode(cut, rate, 'flac')).decode()}"
        if len(source) > self._left:
            return Clip(None, drawn, "not embedded, because the page would be too large")
        self._left -= len(source)
        return Clip(source, drawn, f"the first {CLIP_SECONDS:g} s" if len(cut) < len(samples) else "")
