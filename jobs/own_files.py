"""A home: where its ledger is, how that records the stores in it so that it can be moved, and the files that
it keeps for itself: no link on the way to them is followed, and a disk without room for them is noticed.

Who may write into a home must not choose which other file is written, or what is waited for.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from pipelines.errors import ErrorCode, StoreError

#: What the kernel says of a link, a folder, a pipe or a socket in the place of a file, and of a link or a
#: file in that of a folder.
_REFUSED = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)


#: A disk with less room counts as full: there may be enough for a row, and not for what was made.
ROOM_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)

#: Folder of a home that holds its ledger.
STATE_FOLDER = ".nightjar"
LEDGER_FILE = "ledger.sqlite"
_RELATIVE = "home:"


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


def place_of(ledger: Path | None) -> Path | None:
    """The folder that a SQLite ledger's stores are recorded relative to: its home, or the folder of a file
    that is in no home."""
    if ledger is None:
        return None
    folder = ledger.absolute().parent
    return folder.parent if folder.name == STATE_FOLDER else folder


def home_of(ledger: Path | None) -> Path | None:
    """The home that a SQLite ledger is the embedded one of; None for another ledger."""
    if ledger is None or ledger.absolute().parts[-2:] != (STATE_FOLDER, LEDGER_FILE):
        return None
    return place_of(ledger)


def embedded_broker_url(state_folder: Path) -> str | None:
    """Address of the broker that runs in a home, or None when none runs: its socket is asked, since
    another process may have its id by now, and one that was killed keeps it until somebody takes note."""
    try:
        url = str(json.loads(read_own(state_folder / "broker.json"))["url"])
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(unquote(urlsplit(url).path))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url


def was_killed(place: Path | None) -> bool:
    """Whether the last run in a home was killed: its broker's record is left, and no broker answers. Its
    workers are dead then, whatever the ledger heard of them lately."""
    if place is None or not (place / STATE_FOLDER / "broker.json").exists():
        return False
    return embedded_broker_url(place / STATE_FOLDER) is None


def own_ledger(ledger: Path) -> Path:
    """The path of a SQLite ledger. Raises `store.forbidden` where a file of an embedded one, which its
    home names, is a link."""
    if home_of(ledger) is not None:
        for ending in ("", "-wal", "-shm", "-journal", ".migrate"):
            own_path(ledger.absolute().with_name(ledger.name + ending))
    return ledger


def recorded(store_url: str, place: Path | None) -> str:
    """The address of a store as the ledger keeps it: `home:` and a relative path for a folder in `place`,
    else as it is."""
    folder = _folder(store_url)
    if place is None or folder is None or not folder.is_relative_to(place):
        return store_url
    relative = folder.relative_to(place).as_posix()
    return _RELATIVE + ("" if relative == "." else quote(relative))


def located(address: str, place: Path | None) -> str:
    """The URL of the store that is recorded as `address`."""
    if place is None or not address.startswith(_RELATIVE):
        return address
    return (place / unquote(address[len(_RELATIVE) :])).as_uri()


def _folder(url: str) -> Path | None:
    """The folder of a `file://` URL; None for another store."""
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.path.startswith("/") else None
