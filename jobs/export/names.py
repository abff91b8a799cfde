"""How the files of an export name audio that stays in a store's folder: by its path as seen from themselves, so that both can be moved."""

from __future__ import annotations

import os
from pathlib import Path

from jobs.store.base import ObjectStore
from jobs.store.folder import FolderStore


class AudioNames:
    """The names of audio for the files of one export to `folder`; with None, on standard output or in a bucket, paths are absolute."""

    def __init__(self, store: ObjectStore, folder: Path | None) -> None:
        self._root = store.root if isinstance(store, FolderStore) and folder is not None else None
        self._folder = folder
        self._prefixes: dict[str, str] = {}

    @property
    def base(self) -> str | None:
        """The store as seen from the export's folder; None where audio is named by what it is everywhere."""
        return None if self._root is None else self._prefix("")

    def of(self, file: str, where: str) -> str:
        """What `file`, a name in the folder of the export, calls the audio at `where`: a path of the store, or an address."""
        if self._root is None or not where.startswith(f"{self._root}/"):
            return where
        return os.path.normpath(f"{self._prefix(os.path.dirname(file))}/{where[len(str(self._root)) + 1 :]}")

    def _prefix(self, below: str) -> str:
        prefix = self._prefixes.get(below)
        if prefix is None:
            # `..` leads out of what a link leads to.
            folder = os.path.realpath(os.path.join(self._folder or "", below))
            prefix = self._prefixes[below] = os.path.relpath(os.path.realpath(self._root or ""), folder)
        return prefix
