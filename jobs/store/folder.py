"""The object store in a folder: atomic write-once files; symbolic links below the folder are not followed."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import stat
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from jobs.store.base import (
    IDENTITY_KEY,
    Metadata,
    ObjectInfo,
    ObjectStore,
    missing_allowed,
    sha256_of,
    split_key,
    split_prefix,
)
from pipelines.errors import ErrorCode, StoreError

_WRITE = os.O_WRONLY | os.O_CLOEXEC
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Number of folders kept open, enough for the audio, texts and manifests of one job.
_HANDLES_PER_THREAD = 4
_CHUNK_BYTES = 1 << 20
_system = ctypes.CDLL(None, use_errno=True)
#: errno values of a file system without O_TMPFILE, and of a missing or special file.
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO}
#: errno values -> error code and advice.
_UNREACHABLE = ErrorCode.STORE_UNREACHABLE, "Check the disk or the mount."
_MEANINGS = {
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): (
        ErrorCode.STORE_FULL,
        "Free space on that disk; the work then continues.",
    ),
    (errno.EACCES, errno.EPERM, errno.EROFS): (
        ErrorCode.STORE_FORBIDDEN,
        "Give this user write permission, or choose another store.",
    ),
    (errno.ENOENT, errno.ENOTDIR): (
        ErrorCode.STORE_MISSING,
        "Check that the store's folder is correct and mounted.",
    ),
    (errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EILSEQ): (
        ErrorCode.STORE_BAD_KEY,
        "Symbolic links and special files inside the store are not followed.",
    ),
}


class FolderStore(ObjectStore):
    """Objects as files under `root`. A file appears complete or not at all, and is never replaced.

    Data is not flushed to disk until `sync`: a killed process loses nothing, a power cut loses what was not
    synced.
    """

    remote = False

    def __init__(self, root: Path) -> None:
        self.root = self._root = Path(os.path.abspath(root))
        self.url = self._root.as_uri()
        self._top: Handle | None = None
        self._handles = FolderHandles()
        #: Device -> a folder on it that was written to. There may be several, because other file systems may
        #: be mounted below the root.
        self._written: dict[int, Handle] = {}
        self._tmpfile = os.path.isdir("/proc/self/fd")

    def establish(self, identity: str | None = None) -> str:
        """As `ObjectStore.establish`; creates a missing folder."""
        with self._errors(""), suppress(FileExistsError):
            self._root.mkdir(parents=True)
        return super().establish(identity)

    def confirm(self, identity: str | None) -> None:
        """Checks that the folder has this identity, and keeps it for later checks. Raises
        `store.unreachable`."""
        self._top = self._open_checked(identity)
        self._identity = identity or self._identity

    def put(self, key: str, data: bytes | BinaryIO, metadata: Metadata = None) -> ObjectInfo:
        *folders, name = split_key(key)
        with self._errors(key, putting=True):
            folder = self._made_folder(*folders)
            self._written.setdefault(folder.stat.st_dev, folder)
            if isinstance(data, bytes):
                info = self._write(key, folder.fd, name, [data])
            elif _exists(folder.fd, name):
                info = None
            else:
                info = self._write(key, folder.fd, name, iter(partial(data.read, _CHUNK_BYTES), b""))
            return info or _describe(key, folder.fd, name)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes of an object, from `offset`; fewer if it ends earlier. Raises
        `store.missing`."""
        with self.open(key) as file, self._errors(key):
            file.seek(offset)
            return file.read(length)

    def open(self, key: str) -> BinaryIO:
        """The object as a readable stream. Raises `store.missing`."""
        *folders, name = split_key(key)
        with self._folder(folders, key) as folder:
            return cast(BinaryIO, os.fdopen(open_file(folder, name), "rb"))

    def _facts(self, key: str) -> ObjectInfo:
        *folders, name = split_key(key)
        with self._folder(folders, key) as folder:
            return _describe(key, folder, name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order, with the names of one folder in memory."""
        yield from self._below(*split_prefix(prefix))

    def delete(self, key: str) -> None:
        """Deletes an object; a missing one is not an error."""
        *folders, name = split_key(key)
        with missing_allowed(), self._folder(folders, key) as folder:
            os.unlink(name, dir_fd=folder)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes objects, and folders that become empty, except those at the root, which are shared."""
        above = set[str]()
        for key in keys:
            self.delete(key)
            above.update(str(folder) for folder in list(PurePosixPath(key).parents)[:-2])
        for name in sorted(above, key=len, reverse=True):
            *folders, last = name.split("/")
            # It is not an error if the folder is missing or not empty.
            with suppress(StoreError), self._folder(folders, name) as parent:
                os.rmdir(last, dir_fd=parent)

    def sync(self) -> None:
        """Waits until all objects that earlier puts wrote, or found existing, are on the disk with their
        names. Raises `store.unreachable` if the store is not available."""
        self._opened_top()
        for folder in list(self._written.values()):
            with self._errors(""):
                sync_file_system(folder.fd)

    def uri(self, key: str) -> str:
        """The absolute path of the object's file."""
        return os.path.join(self._root, *split_key(key))

    def _opened_top(self) -> Handle:
        """The open root folder. All operations are relative to the folder whose identity was checked, even if
        something is mounted or renamed meanwhile."""
        top = self._top
        if top is None or not top.current:
            top = self._top = self._open_checked(self._identity)
        return top

    def _made_folder(self, *segments: str) -> Handle:
        """The handle of a folder, which is created if missing. Raises `OSError`, and `store.unreachable`."""
        opened = self._handles.opened
        handle = opened.pop(segments, None)
        if handle is None or not handle.current:
            # This variable keeps the descriptor open, because another thread may reopen the root.
            top = self._opened_top()
            folder = walk_down(top.fd, segments, create=True)
            handle = Handle(folder, os.path.join(self._root, *segments))
        if len(opened) >= _HANDLES_PER_THREAD:
            del opened[next(iter(opened))]
        opened[segments] = handle
        return handle

    def _open_checked(self, identity: str | None) -> Handle:
        """Opens the folder that is now at the root's path, and compares its identity. Raises
        `store.unreachable` if it is missing or has another identity."""
        with self._errors(""):
            try:
                top = Handle(os.open(self._root, FOLDER_FLAGS), os.path.join(self._root, "."))
            except (FileNotFoundError, NotADirectoryError) as error:
                raise StoreError(
                    ErrorCode.STORE_UNREACHABLE,
                    f"The store {self._root} is not available: there is no such folder.",
                    "Mount it, or move it back; the work then continues.",
                ) from error
            found: bytes | None = None
            try:
                with os.fdopen(open_file(top.fd, IDENTITY_KEY), "rb") as file:
                    found = file.read(200)
            except OSError as error:
                # The file is missing or not a regular file.
                if error.errno not in _NO_FILE:
                    raise
        self._compare(found, identity)
        return top

    def _below(self, segments: list[str], stem: str = "") -> Iterator[ObjectInfo]:
        """The objects in a folder, none if it is missing. Names are not checked, because folders of other
        programs may have names that are not valid in keys."""
        place = "/".join(segments)
        # Size and modification time; None for a folder, whose name ends with a slash here, so that sorted names
        # are in key order.
        found: dict[str, tuple[int, float] | None] = {}
        with missing_allowed(), self._folder(segments, place) as folder, os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.startswith(stem):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name + "/"] = None
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found[entry.name] = status.st_size, status.st_mtime
        for name in sorted(found):
            if (facts := found[name]) is None:
                yield from self._below([*segments, name[:-1]])
            else:
                yield ObjectInfo("/".join([*segments, name]), facts[0], modified_at=facts[1])

    def _write(self, key: str, folder: int, name: str, chunks: Iterable[bytes]) -> ObjectInfo | None:
        """Writes an unnamed file and links it to its name. None: the name exists already."""
        temporary = ""
        digest = hashlib.sha256()
        try:
            opened, temporary = self._new_file(folder)
            with os.fdopen(opened, "wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                source, place = (temporary, folder) if temporary else (f"/proc/self/fd/{opened}", None)
                os.link(source, name, src_dir_fd=place, dst_dir_fd=folder, follow_symlinks=not temporary)
                return ObjectInfo(key, file.tell(), digest.hexdigest(), created=True)
        except OSError:
            # An error such as a full disk does not matter if the object exists.
            if not _exists(folder, name):
                raise
            return None
        finally:
            if temporary:
                os.unlink(temporary, dir_fd=folder)

    def _new_file(self, folder: int) -> tuple[int, str]:
        """An unnamed file, or one with a hidden name if the file system has no O_TMPFILE."""
        if self._tmpfile:
            try:
                return os.open(".", _WRITE | os.O_TMPFILE, 0o644, dir_fd=folder), ""
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
                self._tmpfile = False
        name = f".{secrets.token_hex(8)}.tmp"
        return os.open(name, _WRITE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder), name

    @contextmanager
    def _folder(self, segments: list[str], key: str) -> Generator[int]:
        """Opens a folder, with errors that name `key`."""
        with self._errors(key):
            top = self._opened_top()
            folder = walk_down(top.fd, segments)
            try:
                yield folder
            finally:
                os.close(folder)

    @contextmanager
    def _errors(self, key: str, *, putting: bool = False) -> Generator[None]:
        try:
            yield
        except OSError as error:
            found = (meaning for numbers, meaning in _MEANINGS.items() if error.errno in numbers)
            code, advice = next(found, _UNREACHABLE)
            if putting and error.errno == errno.ENOENT:
                # The folder was removed meanwhile; the next try creates it again.
                code, advice = _UNREACHABLE
            reason = os.strerror(error.errno) if error.errno else type(error).__name__
            raise StoreError(code, f"{reason}: {key[:200]!a} in the store {self._root}.", advice) from error


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def open_file(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """A file descriptor of a regular file in an open folder; no link is followed. Raises `OSError`."""
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return file


def _describe(key: str, folder: int, name: str) -> ObjectInfo:
    with os.fdopen(open_file(folder, name), "rb") as file:
        digest = sha256_of(file)
        return ObjectInfo(key, file.tell(), digest)


def sync_file_system(folder: int) -> None:
    """Waits until all files of the file system of an open folder are on its disk, with their names
    (syncfs(2)). Raises `OSError`.

    For a few hundred new files this takes a tenth of the time of one fsync each.
    """
    if _system.syncfs(folder) != 0:
        number = ctypes.get_errno()
        if number != errno.ENOSYS:
            raise OSError(number, os.strerror(number))
        # On Linux this also waits (sync(2)).
        os.sync()


def walk_down(top: int | None, segments: Sequence[str], create: bool = False, start: str | Path = ".") -> int:
    """A file descriptor of a folder below the open folder `top`, or below the path `start`; the caller closes
    it.

    Each folder is opened relative to the one before, so that symbolic links are never followed, not even
    ones created meanwhile.
    """
    current = os.open(start, FOLDER_FLAGS, dir_fd=top)
    try:
        for segment in segments:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(segment, dir_fd=current)
            below = os.open(segment, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = below
    except BaseException:
        os.close(current)
        raise
    return current


class Handle:
    """An open folder, which is closed when no reference to it is left."""

    __slots__ = ("_path", "fd", "stat")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self._path = path
        self.stat = os.fstat(fd)

    @property
    def current(self) -> bool:
        """Whether the folder is still at its path; it may have been moved or removed."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), self.stat)
        except OSError:
            return False

    def __del__(self) -> None:
        os.close(self.fd)


class FolderHandles(threading.local):
    """The folders that each thread wrote to most recently: their segments -> the handle."""

    def __init__(self) -> None:
        self.opened: dict[tuple[str, ...], Handle] = {}
