"""The audio of the shown items: where a page finds it, and how it looks."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jobs.ledger.records import Artifact
from jobs.report.pictures import Picture, picture
from jobs.store.base import ObjectStore
from jobs.store.folder import FolderStore
from pipelines.audio import decode, encode
from pipelines.errors import NightjarError

#: Larger files are neither drawn nor embedded.
MOST_BYTES = 32 << 20
#: Of an embedded clip, and of all of them as they stand in the page.
CLIP_SECONDS = 10.0
MOST_EMBEDDED_BYTES = 12_000_000


@dataclass(frozen=True, slots=True)
class Clip:
    """The audio of one item, as far as a page has it."""

    #: Of a player: a relative link or a `data:` address; None: there is none.
    source: str | None
    picture: Picture | None
    #: What a person should know of it; empty: nothing.
    note: str = ""


class Clips:
    """Makes clips, one after the other, for a page that will stand at `page`."""

    def __init__(self, store: ObjectStore, page: Path, *, embed: bool) -> None:
        self._store = store
        self._root = store.root if isinstance(store, FolderStore) and not embed else None
        self._folder = Path(os.path.abspath(page)).parent
        self._left = MOST_EMBEDDED_BYTES

    @property
    def linked(self) -> bool:
        """Whether players read the store's files, rather than what is in the page."""
        return self._root is not None

    def clip(self, artifact: Artifact) -> Clip:
        """The clip of an artifact. What cannot be read has no player and a note that says why."""
        link = None if self._root is None else _relative(self._root / artifact.key, self._folder)
        if artifact.bytes > MOST_BYTES:
            return Clip(link, None, "too large to be drawn" if link else "too large to be embedded")
        try:
            samples, rate = decode(self._store.get(artifact.key), max_seconds=3600)
        except NightjarError as error:
            return Clip(None, None, f"cannot be read: {error.code.value}")
        drawn = picture(samples, rate)
        if link is not None:
            return Clip(link, drawn)
        cut = samples[: int(CLIP_SECONDS * rate)]
        source = "data:audio/flac;base64," + base64.b64encode(encode(cut, rate, "flac")).decode()
        if len(source) > self._left:
            return Clip(None, drawn, "no room for more embedded audio")
        self._left -= len(source)
        return Clip(source, drawn, f"the first {CLIP_SECONDS:g} s" if len(cut) < len(samples) else "")


def _relative(path: Path, folder: Path) -> str:
    return quote(os.path.relpath(path, folder))
