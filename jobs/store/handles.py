"""Open handles on the folders of a store, so that writing beside the last object costs no walk from the root."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_syncfs = ctypes.CDLL(None, use_errno=True).syncfs if sys.platform == "linux" else None

#: Whether a whole file system is synced at once; without it every file and folder is synced as it is written.
SYNCS_AT_ONCE = _syncfs is not None


def sync_file_system(folder: int) -> None:
    """Waits until everything on the file system of an open folder is on its disk, names included. Raises `OSError`.

    One call for a few hundred new files takes a tenth of the time of an fsync for each (syncfs(2)).
    """
    if _syncfs is not None and _syncfs(folder) != 0:
        number = ctypes.get_errno()
        if number != errno.ENOSYS:
            raise OSError(number, os.strerror(number))
        # On Linux this waits too (sync(2)).
        os.sync()


FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Audio, texts and manifests of one job take turns.
_HANDLES_PER_THREAD = 4


def walk_down(top: int, segments: list[str], create: bool = False) -> int:
    """A file descriptor of a folder below the open folder `top`, for the caller to close.

    Goes from descriptor to descriptor, so that no symbolic link on the way, not even one set meanwhile, leads out.
    """
    current = os.open(".", FOLDER_FLAGS, dir_fd=top)
    try:
        for segment in segments:
            below = _step(current, segment, create)
            os.close(current)
            current = below
    except BaseException:
        os.close(current)
        raise
    return current


def _step(folder: int, segment: str, create: bool) -> int:
    try:
        return os.open(segment, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):
            os.mkdir(segment, dir_fd=folder)
            if not SYNCS_AT_ONCE:
                os.fsync(folder)
        return os.open(segment, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)


class Handle:
    """An open folder; closed with its last reference."""

    __slots__ = ("_identity", "_path", "fd")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self._path = path
        found = os.fstat(self.fd)
        self._identity = (found.st_dev, found.st_ino)

    @property
    def device(self) -> int:
        """Number of the file system it is on."""
        return self._identity[0]

    @property
    def current(self) -> bool:
        """Whether the folder's path still leads to it: it may have been moved or removed."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def __del__(self) -> None:
        if (fd := getattr(self, "fd", None)) is not None:
            os.close(fd)


class FolderHandles(threading.local):
    """The folders that each thread wrote to last."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._handles: dict[tuple[str, ...], Handle] = {}

    def open(self, segments: list[str], top: Callable[[], Handle]) -> Handle:
        """The handle of a folder, which is made where it is missing; `top` opens the root. Raises `OSError`, and as `top`."""
        name = tuple(segments)
        handle = self._handles.get(name)
        if handle is not None and handle.current:
            return handle
        self._handles.pop(name, None)
        while len(self._handles) >= _HANDLES_PER_THREAD:
            del self._handles[next(iter(self._handles))]
        # Held until its descriptor was used: another thread may open the root anew.
        root = top()
        handle = self._handles[name] = Handle(walk_down(root.fd, segments, create=True), os.path.join(self._root, *segments))
        return handle
