"""The files that a home keeps for itself: no link on the way to them is followed, and a disk without room
for them is noticed.

Who may write into a home must not choose which other file is written, or what is waited for.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelines.errors import ErrorCode, StoreError

#: What the kernel says of a link, a folder, a pipe or a socket in the place of a file, and of a link or a
#: file in that of a folder.
_REFUSED = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)


#: A disk with less room counts as full: there may be enough for a row, and not for what was made.
ROOM_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


def open_own(path: Path, flags: int, depth: int = 2, *, make_folders: bool = False) -> int:
    """A file descriptor of a file that is ours, as are the folders that its last `depth` names go through:
    `.nightjar/lock`. With `os.O_CREAT` the file is made where it is missing; with `make_folders` also its
    folders, which may have been moved meanwhile.

    Raises `store.forbidden` for a link, or for anything that is no folder or no regular file, and `OSError`.
    """
    # Which a command that only looks need not pay for.
    from jobs.store.folder import FOLDER_FLAGS, walk_down

    *folders, name = path.parts[-depth:]
    above = path.parents[depth - 1]
    try:
        if make_folders:
            above.mkdir(parents=True, exist_ok=True)
        top = os.open(above, FOLDER_FLAGS)
        try:
            folder = walk_down(top, folders, create=make_folders)
        finally:
            os.close(top)
        try:
            file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise _no_plain_file(path) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _no_plain_file(path)
    return file


def read_own(path: Path, depth: int = 2) -> str:
    """The text of such a file. Raises as `open_own` does."""
    with os.fdopen(open_own(path, os.O_RDONLY, depth), errors="replace") as file:
        return file.read()


def own_path(path: Path, depth: int = 2) -> Path:
    """`path`, for libraries that open files by name. Raises `store.forbidden` as `open_own` does; what is
    missing is no error."""
    for place in (*reversed(path.parents[: depth - 1]), path):
        # What cannot be looked at cannot be opened either, and that says why.
        with suppress(OSError):
            mode = os.lstat(place).st_mode
            if not (stat.S_ISREG(mode) if place == path else stat.S_ISDIR(mode)):
                raise _no_plain_file(place)
    return path


def has_room(folder: Path) -> bool:
    """Whether a disk has room for some work; also where it cannot be written for another reason."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        return error.errno not in _FULL
    return True


def disk_full(what: object) -> StoreError:
    """The error of a full disk; `what` could not be written there."""
    return StoreError(
        ErrorCode.STORE_FULL,
        f"No space left on the disk of {what}.",
        "Free space on that disk; the work continues where it stopped.",
    )


@contextmanager
def full_disk_explained(home: Path) -> Generator[None]:
    """Turns the system's word for a full disk into `store.full`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise disk_full(error.filename or home) from error


def _no_plain_file(path: Path) -> StoreError:
    message = f"{path} is a link, or not a regular file or folder, or lies behind a link, and is not opened."
    return StoreError(
        ErrorCode.STORE_FORBIDDEN, message, "Find out who created it, remove it, and run the command again."
    )
