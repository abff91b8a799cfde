"""The object store in a folder: atomic write-once files, and no symbolic link below the folder is
followed."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, ClassVar, cast
from urllib.parse import unquote, urlsplit

from jobs.store.base import (
    BYTES,
    IDENTITY_KEY,
    ObjectInfo,
    ObjectStore,
    PutResult,
    missing_allowed,
    read_identity,
    split_key,
    split_prefix,
    store_away,
)
from pipelines.errors import ConfigError, ErrorCode, StoreError

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CLOEXEC
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Audio, texts and manifests of one job take turns.
_HANDLES_PER_THREAD = 4
_CHUNK_BYTES = 1 << 20
_system = ctypes.CDLL(None, use_errno=True)
#: errno of a file system without O_TMPFILE, and where there is no regular file.
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO}
#: What the system's errors mean, by their errno, and what a person does about it.
_UNREACHABLE = ErrorCode.STORE_UNREACHABLE, "Check the disk or the mount."
_MEANINGS: dict[tuple[int, ...], tuple[ErrorCode, str]] = {
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): (
        ErrorCode.STORE_FULL,
        "Free space on that disk; the work continues where it stopped.",
    ),
    (errno.EACCES, errno.EPERM, errno.EROFS): (
        ErrorCode.STORE_FORBIDDEN,
        "Give this user the right to write there, or choose another store.",
    ),
    (errno.ENOENT, errno.ENOTDIR): (
        ErrorCode.STORE_MISSING,
        "Check that the store's folder is the right one and is mounted.",
    ),
    (errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EILSEQ): (
        ErrorCode.STORE_BAD_KEY,
        "Symbolic links and special files inside the store are not followed.",
    ),
}


class FolderStore(ObjectStore):
    """Objects as files under `root`. A file appears under its name complete or not at all, and is never
    replaced.

    Data is left to the operating system until `sync`: a killed process loses nothing, a power cut what was
    not synced.
    """

    remote: ClassVar[bool] = False

    def __init__(self, root: Path) -> None:
        self.root = self._root = Path(os.path.abspath(root))
        self.url = self._root.as_uri()
        self._identity: str | None = None
        self._top: Handle | None = None
        self._handles = FolderHandles(self._root)
        #: Device -> a folder on it that was written to: other file systems may be mounted below the root.
        self._written: dict[int, Handle] = {}
        self._tmpfile = os.path.isdir("/proc/self/fd")

    @classmethod
    def at(cls, address: str) -> FolderStore:
        """The store at a path or `file:///DIR`. Raises `config.invalid`."""
        path = address
        if address.lower().startswith("file:"):
            parts = urlsplit(address)
            path = unquote(parts.path) if parts.netloc in ("", "localhost") else ""
        if not path:
            raise ConfigError(
                ErrorCode.CONFIG_INVALID,
                f"{address[:200]!r} is not a folder.",
                "Use a folder or file:///DIR.",
            )
        return cls(Path(path))

    def establish(self, identity: str | None = None) -> str:
        """As of every store; a missing folder is made."""
        with self._errors(""), suppress(FileExistsError):
            self._root.mkdir(parents=True)
        return super().establish(identity)

    def confirm(self, identity: str | None) -> None:
        """Proves that the folder has this identity, with which each later doubt is settled. Raises
        `store.unreachable`."""
        self._top = self._compared(identity)
        self._identity = identity or self._identity

    def put(
        self,
        key: str,
        data: bytes | BinaryIO,
        *,
        content_type: str = BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> PutResult:
        *folders, name = split_key(key)
        with self._errors(key, putting=True):
            folder = self._handles.open(folders, self._opened_top)
            self._written.setdefault(folder.device, folder)
            if isinstance(data, bytes):
                info = self._write(key, folder.fd, name, [data])
            elif _exists(folder.fd, name):
                info = None
            else:
                info = self._write(key, folder.fd, name, iter(partial(data.read, _CHUNK_BYTES), b""))
            return PutResult(info or _describe(key, folder.fd, name), created=info is not None)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes of an object from `offset` on; fewer where it ends before. Raises
        `store.missing`."""
        with self.open(key) as file, self._errors(key):
            file.seek(offset)
            return file.read(length)

    def open(self, key: str) -> BinaryIO:
        """The object as a readable stream. Raises `store.missing`."""
        *folders, name = split_key(key)
        with self._errors(key), self._folder(folders) as folder:
            return cast(BinaryIO, os.fdopen(_open_file(folder, name), "rb"))

    def _facts(self, key: str) -> ObjectInfo:
        *folders, name = split_key(key)
        with self._errors(key), self._folder(folders) as folder:
            return _describe(key, folder, name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order; one folder's names are in memory at a
        time."""
        yield from self._below(*split_prefix(prefix))

    def delete(self, key: str) -> None:
        """Removes an object; a missing one is no error."""
        *folders, name = split_key(key)
        with missing_allowed(), self._errors(key), self._folder(folders) as folder:
            os.unlink(name, dir_fd=folder)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes objects, and the folders that become empty but for those at the root, where others make
        theirs."""
        above: set[str] = set()
        for key in keys:
            self.delete(key)
            above.update(str(folder) for folder in list(PurePosixPath(key).parents)[:-2])
        for name in sorted(above, key=len, reverse=True):
            *folders, last = name.split("/")
            # A folder that is not empty, or is gone, is no error.
            with suppress(OSError), self._folder(folders) as parent:
                os.rmdir(last, dir_fd=parent)

    def sync(self) -> None:
        """Waits until what was put by now, or found there by a put, is on the disk with its name, and the
        store is there."""
        self._opened_top()
        for folder in list(self._written.values()):
            with self._errors(""):
                sync_file_system(folder.fd)

    def uri(self, key: str) -> str:
        """The absolute path of the object's file."""
        return str(self._root.joinpath(*split_key(key)))

    def _opened_top(self) -> Handle:
        """The root, open: everything is done below the folder whose identity was compared, whatever is
        mounted or renamed meanwhile."""
        top = self._top
        if top is None or not top.current:
            top = self._top = self._compared(self._identity)
        return top

    def _compared(self, identity: str | None) -> Handle:
        """The folder that the root's path leads to now. Raises `store.unreachable` where it is missing or
        has another identity."""
        with self._errors(""):
            try:
                top = Handle(os.open(self._root, FOLDER_FLAGS), os.path.join(self._root, "."))
            except (FileNotFoundError, NotADirectoryError) as error:
                message = f"The store {self._root} is away: there is no such folder."
                advice = "Mount it, or move it back; the work continues."
                raise StoreError(ErrorCode.STORE_UNREACHABLE, message, advice) from error
            found: str | None = None
            try:
                with os.fdopen(_open_file(top.fd, IDENTITY_KEY), "rb") as file:
                    found = read_identity(file.read(200))
            except OSError as error:
                # It has none, or something else than a file is in its place.
                if error.errno not in _NO_FILE:
                    raise
        if identity is not None and found != identity:
            raise store_away(str(self._root), found, identity)
        return top

    def _below(self, segments: list[str], stem: str = "") -> Iterator[ObjectInfo]:
        # Folders that others made may have names that no key has.
        for name, size, modified_at in self._entries(segments):
            if name.endswith("/") and name.startswith(stem):
                yield from self._below([*segments, name[:-1]])
            elif name.startswith(stem):
                yield ObjectInfo("/".join([*segments, name]), size, modified_at=modified_at)

    def _entries(self, segments: list[str]) -> list[tuple[str, int, float]]:
        """Names, sizes and times of change in a folder, nothing where it is gone; folders have a slash at
        their end, so that sorted names are keys in order."""
        found: list[tuple[str, int, float]] = []
        with (
            missing_allowed(),
            self._errors("/".join(segments)),
            self._folder(segments) as folder,
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.name + "/", 0, 0.0))
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((entry.name, status.st_size, status.st_mtime))
        return sorted(found)

    def _write(self, key: str, folder: int, name: str, chunks: Iterable[bytes]) -> ObjectInfo | None:
        """Writes a nameless file and links it to its name. None: another writer was first."""
        file, temporary, digest, size = -1, "", hashlib.sha256(), 0
        try:
            file, temporary = self._new_file(folder)
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[os.write(file, view) :]
            source, source_folder = (temporary, folder) if temporary else (f"/proc/self/fd/{file}", None)
            os.link(source, name, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=not temporary)
        except OSError:
            # What is there needs no room.
            if not _exists(folder, name):
                raise
            return None
        finally:
            if file >= 0:
                os.close(file)
            if temporary:
                os.unlink(temporary, dir_fd=folder)
        return ObjectInfo(key, size, digest.hexdigest())

    def _new_file(self, folder: int) -> tuple[int, str]:
        """A file without a name, or with a hidden one where the file system has no O_TMPFILE."""
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
    def _folder(self, segments: list[str]) -> Generator[int, None, None]:
        top = self._opened_top()
        folder = walk_down(top.fd, segments)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _errors(self, key: str, *, putting: bool = False) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            found = (meaning for numbers, meaning in _MEANINGS.items() if error.errno in numbers)
            code, advice = next(found, _UNREACHABLE)
            if putting and error.errno == errno.ENOENT:
                # The folder was removed while it was written to; the next try makes it again.
                code, advice = _UNREACHABLE
            reason = os.strerror(error.errno) if error.errno else type(error).__name__
            message = f"{reason}: {key[:200]!a} in the store {self._root}."
            raise StoreError(code, message, advice) from error


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _open_file(folder: int, name: str) -> int:
    file = os.open(name, _READ, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return file


def _describe(key: str, folder: int, name: str) -> ObjectInfo:
    with os.fdopen(_open_file(folder, name), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ObjectInfo(key, file.tell(), digest)


def sync_file_system(folder: int) -> None:
    """Waits until everything on the file system of an open folder is on its disk, names included. Raises
    `OSError`.

    One call for a few hundred new files takes a tenth of the time of an fsync for each (syncfs(2)).
    """
    if _system.syncfs(folder) != 0:
        number = ctypes.get_errno()
        if number != errno.ENOSYS:
            raise OSError(number, os.strerror(number))
        # On Linux this waits too (sync(2)).
        os.sync()


def walk_down(top: int, segments: list[str], create: bool = False) -> int:
    """A file descriptor of a folder below the open folder `top`, for the caller to close.

    Goes from descriptor to descriptor, so that no symbolic link on the way, not even one set meanwhile,
    leads out.
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
        return os.open(segment, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=folder)


class Handle:
    """An open folder; closed with its last reference."""

    __slots__ = ("_identity", "_path", "device", "fd")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self._path = path
        found = os.fstat(self.fd)
        #: Number of the file system it is on.
        self.device = found.st_dev
        self._identity = (found.st_dev, found.st_ino)

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
        """The handle of a folder, which is made where it is missing; `top` opens the root. Raises
        `OSError`, and as `top`."""
        name = tuple(segments)
        handle = self._handles.get(name)
        if handle is not None and handle.current:
            return handle
        self._handles.pop(name, None)
        while len(self._handles) >= _HANDLES_PER_THREAD:
            del self._handles[next(iter(self._handles))]
        # Held until its descriptor was used: another thread may open the root anew.
        root = top()
        handle = self._handles[name] = Handle(
            walk_down(root.fd, segments, create=True), os.path.join(self._root, *segments)
        )
        return handle
