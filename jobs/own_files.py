"""Internal files of a home: access that follows no links, the place of the ledger, store addresses that
stay valid if the home is moved, and detection of a full disk.

A user who can write into a home must not be able to redirect writes to other files, or to block a process.
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

#: errno values for a link, folder, pipe or socket in place of a file, and a link or file in place of a folder.
_REFUSED = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOTDIR)


#: A disk with less free space counts as full: a ledger row might still fit, but not the audio.
ROOM_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)

#: Folder of a home that holds its ledger.
STATE_FOLDER = ".nightjar"
LEDGER_FILE = "ledger.sqlite"
_RELATIVE = "home:"


def open_own(path: Path, flags: int, depth: int = 2, *, make_folders: bool = False) -> int:
    """Opens an internal file such as `.nightjar/lock`; links in the last `depth` parts of the path are
    refused. With `os.O_CREAT` a missing file is created; with `make_folders` also its folders.

    Raises `store.forbidden` for a link, for a file that is not regular, and for a path through something
    that is not a folder. Raises `OSError` for other faults.
    """
    # Imported here, because read-only commands do not need it.
    from jobs.store.folder import open_file, walk_down

    *folders, name = path.parts[-depth:]
    above = path.parents[depth - 1]
    try:
        if make_folders:
            above.mkdir(parents=True, exist_ok=True)
        folder = walk_down(None, folders, make_folders, above)
        try:
            return open_file(folder, name, flags)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise _no_plain_file(path) from error


def read_own(path: Path) -> str:
    """The text of an internal file. Raises the errors of `open_own`."""
    with os.fdopen(open_own(path, os.O_RDONLY), errors="replace") as file:
        return file.read()


def own_path(path: Path) -> Path:
    """Checks `path` and returns it, for libraries that open files by name. Raises `store.forbidden` in the
    same cases as `open_own`; a missing file is not an error."""
    for place in (path.parent, path):
        # A file that cannot be inspected cannot be opened either, and opening it raises the reason.
        with suppress(OSError):
            mode = os.lstat(place).st_mode
            if not (stat.S_ISREG(mode) if place == path else stat.S_ISDIR(mode)):
                raise _no_plain_file(place)
    return path


def has_room(folder: Path) -> bool:
    """Whether the disk of a folder has free space. Also True if the folder cannot be written for another
    reason."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        return error.errno not in _FULL
    return True


def disk_full(what: object) -> StoreError:
    """The error of a full disk, on which `what` could not be written."""
    return StoreError(
        ErrorCode.STORE_FULL,
        f"No space left on the disk of {what}.",
        "Free space on that disk; the work then continues.",
    )


@contextmanager
def full_disk_explained(home: Path) -> Generator[None]:
    """Converts the system's error for a full disk into `store.full`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise disk_full(error.filename or home) from error


def _no_plain_file(path: Path) -> StoreError:
    return StoreError(
        ErrorCode.STORE_FORBIDDEN,
        f"{path} is not opened, because it is not a regular file or folder, or its path contains a link.",
        "Find out who created it, remove it, and run the command again.",
    )


def place_of(ledger: Path | None) -> Path | None:
    """The folder to which a SQLite ledger's store addresses are relative: the ledger's home, or its own
    folder if it is outside a home."""
    if ledger is None:
        return None
    folder = ledger.absolute().parent
    return folder.parent if folder.name == STATE_FOLDER else folder


def home_of(ledger: Path | None) -> Path | None:
    """The home of an embedded SQLite ledger; None for another ledger."""
    if ledger is None or ledger.absolute().parts[-2:] != (STATE_FOLDER, LEDGER_FILE):
        return None
    return place_of(ledger)


def embedded_broker_url(state_folder: Path) -> str | None:
    """The address of the running broker of a home, or None. It is found by a connection to its socket,
    because process ids are reused."""
    try:
        url = str(json.loads(read_own(state_folder / "broker.json"))["url"])
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(unquote(urlsplit(url).path))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return url


def was_killed(place: Path | None) -> bool:
    """Whether the last run in a home was killed, and so its workers too: the record of its broker exists, but
    no broker answers."""
    if place is None or not (place / STATE_FOLDER / "broker.json").exists():
        return False
    return embedded_broker_url(place / STATE_FOLDER) is None


def own_ledger(ledger: Path) -> Path:
    """The path of a SQLite ledger. Raises `store.forbidden` if a file of an embedded ledger is a link."""
    if home_of(ledger) is not None:
        for ending in ("", "-wal", "-shm", "-journal", ".migrate"):
            own_path(ledger.absolute().with_name(ledger.name + ending))
    return ledger


def recorded(store_url: str, place: Path | None) -> str:
    """The address that the ledger records for a store: `home:` with a relative path for a folder in `place`,
    otherwise the URL itself."""
    parts = urlsplit(store_url)
    folder = Path(unquote(parts.path))
    if place is None or parts.scheme != "file" or not folder.is_relative_to(place):
        return store_url
    relative = folder.relative_to(place).as_posix()
    return _RELATIVE + ("" if relative == "." else quote(relative))


def located(address: str, place: Path | None) -> str:
    """The URL of the store that has this recorded address."""
    if place is None or not address.startswith(_RELATIVE):
        return address
    return (place / unquote(address[len(_RELATIVE) :])).as_uri()
