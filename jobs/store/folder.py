"""The object store in a folder: atomic write-once files, and no symbolic link below the folder is followed."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, cast
from urllib.parse import unquote, urlsplit

import msgspec

from jobs.store.base import IDENTITY_KEY, ObjectInfo, PutResult, establish, probe, read_identity, split_key, split_prefix, store_away
from jobs.store.handles import FOLDER_FLAGS, SYNCS_AT_ONCE, FolderHandles, Handle, sync_file_system, walk_down
from pipelines.errors import ConfigError, ErrorCode, StoreError

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 20
_ATTRIBUTE = "user.nightjar"
_encode_metadata = msgspec.json.Encoder(order="sorted").encode
#: errno of a file system without O_TMPFILE, and of one without extended attributes.
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
_NO_ATTRIBUTES = {errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENOSPC, errno.E2BIG}
#: errno where there is no regular file.
_NO_FILE = {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO}
_CODES = {
    ErrorCode.STORE_FULL: {errno.ENOSPC, errno.EDQUOT, errno.EFBIG},
    ErrorCode.STORE_FORBIDDEN: {errno.EACCES, errno.EPERM, errno.EROFS},
    ErrorCode.STORE_MISSING: {errno.ENOENT, errno.ENOTDIR},
    ErrorCode.STORE_BAD_KEY: {errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EILSEQ},
}
_ADVICE = {
    ErrorCode.STORE_FULL: "Free space on that disk; the work continues where it stopped.",
    ErrorCode.STORE_FORBIDDEN: "Give this user the right to write there, or choose another store.",
    ErrorCode.STORE_MISSING: "Check that the store's folder is the right one and is mounted.",
    ErrorCode.STORE_BAD_KEY: "Symbolic links and special files inside the store are not followed.",
    ErrorCode.STORE_UNREACHABLE: "Check the disk or the mount.",
}


class FolderStore:
    """Objects as files under `root`. A file appears under its name complete or not at all, and is never replaced.

    Metadata is kept in the extended attribute `user.nightjar`; on file systems without such attributes it is dropped.
    Data is left to the operating system until `sync`: a killed process loses nothing, a power cut what was not synced.
    """

    remote: ClassVar[bool] = False

    def __init__(self, root: Path) -> None:
        self.root: Path = Path(os.path.abspath(root))
        self.url = self.root.as_uri()
        self._identity: str | None = None
        self._top: Handle | None = None
        self._handles = FolderHandles(self.root)
        #: Device -> a folder on it that was written to: other file systems may be mounted below the root.
        self._written: dict[int, Handle] = {}
        self._tmpfile = hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd")

    @classmethod
    def at(cls, address: str, _: object = None) -> FolderStore:
        """The store at a path or `file:///DIR`. Raises `config.invalid`."""
        path = address
        if address.lower().startswith("file:"):
            parts = urlsplit(address)
            path = unquote(parts.path) if parts.netloc in ("", "localhost") else ""
        if not path:
            raise ConfigError(ErrorCode.CONFIG_INVALID, f"{address[:200]!r} is not a folder.", "Use a folder or file:///DIR.")
        return cls(Path(path))

    def establish(self, identity: str | None = None) -> str:
        """The store's identity, which is compared from here on. A store without one gets `identity`, or a new one; a missing folder is
        made."""
        with self._errors(""), suppress(FileExistsError):
            self.root.mkdir(parents=True)
        return establish(self, identity)

    def confirm(self, identity: str | None) -> None:
        """Proves that the folder has this identity, with which each later doubt is settled. Raises `store.unreachable`."""
        self._top = self._compared(identity)
        self._identity = identity or self._identity

    def put(
        self, key: str, data: bytes, *, content_type: str = "application/octet-stream", metadata: Mapping[str, str] | None = None
    ) -> PutResult:
        """Writes once: if the key exists its object stays as it is and is described with `created=False`."""
        *folders, name = split_key(key)
        try:
            folder = self._opened(folders)
            if self._write(folder.fd, name, [data], metadata):
                return PutResult(ObjectInfo(key, len(data), hashlib.sha256(data).hexdigest(), dict(metadata or {})), created=True)
            return PutResult(_describe(key, folder.fd, name), created=False)
        except OSError as error:
            raise self._explained(error, key, putting=True) from error

    def put_file(
        self, key: str, path: Path, *, content_type: str = "application/octet-stream", metadata: Mapping[str, str] | None = None
    ) -> PutResult:
        """As `put`, with the content of a local file that may be larger than memory."""
        digest = hashlib.sha256()
        size = 0

        def chunks(file: BinaryIO) -> Iterator[bytes]:
            nonlocal size
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                yield chunk

        *folders, name = split_key(key)
        with self._errors(key, putting=True):
            folder = self._opened(folders)
            if not _exists(folder.fd, name):
                with path.open("rb") as file:
                    if self._write(folder.fd, name, chunks(file), metadata):
                        return PutResult(ObjectInfo(key, size, digest.hexdigest(), dict(metadata or {})), created=True)
            return PutResult(_describe(key, folder.fd, name), created=False)

    def get(self, key: str) -> bytes:
        """The whole object. Raises `store.missing`."""
        with self.open(key) as file:
            return file.read()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes of an object from `offset` on; fewer where it ends before. Raises `store.missing`."""
        with self.open(key) as file, self._errors(key):
            file.seek(offset)
            return file.read(length)

    def open(self, key: str) -> BinaryIO:
        """The object as a readable stream. Raises `store.missing`."""
        with self._errors(key), self._parent(key) as (folder, name):
            return cast(BinaryIO, os.fdopen(_open_file(folder, name), "rb"))

    def head(self, key: str) -> ObjectInfo | None:
        """The object's facts with its SHA-256 (which reads it), or None."""
        try:
            with self._errors(key), self._parent(key) as (folder, name):
                return _describe(key, folder, name)
        except StoreError as error:
            if error.code is ErrorCode.STORE_MISSING:
                return None
            raise

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order; one folder's names are in memory at a time."""
        segments, stem = split_prefix(prefix)
        below = self._entries(segments)
        yield from self._walk(segments, [entry for entry in below if entry[0].startswith(stem)])

    def delete(self, key: str) -> None:
        """Removes an object; a missing one is no error."""
        try:
            with self._errors(key), self._parent(key) as (folder, name):
                os.unlink(name, dir_fd=folder)
        except StoreError as error:
            if error.code is not ErrorCode.STORE_MISSING:
                raise

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes objects, and the folders that become empty but for those at the root, where others make theirs."""
        names: dict[tuple[str, ...], list[str]] = {}
        for key in keys:
            *folders, name = split_key(key)
            names.setdefault(tuple(folders), []).append(name)
        for folders, in_folder in names.items():
            self._delete_in(list(folders), in_folder)
        above = {folders[:depth] for folders in names for depth in range(2, len(folders) + 1)}
        for folders in sorted(above, key=len, reverse=True):
            # A folder that is not empty, or is gone, is no error.
            with suppress(OSError), self._folder(list(folders[:-1])) as parent:
                os.rmdir(folders[-1], dir_fd=parent)

    def _delete_in(self, folders: list[str], names: list[str]) -> None:
        """Removes objects of one folder; missing ones, and a missing folder, are no error."""
        try:
            with self._errors("/".join(folders)), self._folder(folders) as folder:
                for name in names:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
        except StoreError as error:
            if error.code is not ErrorCode.STORE_MISSING:
                raise

    def sync(self) -> None:
        """Waits until what was put by now, or found there by a put, is on the disk with its name, and the store is there."""
        self._opened_top()
        for folder in list(self._written.values()):
            with self._errors(""):
                sync_file_system(folder.fd)

    def uri(self, key: str) -> str:
        """The absolute path of the object's file."""
        return str(self.root.joinpath(*split_key(key)))

    def check(self) -> None:
        """Proves that the folder can be written, read and keeps what is there, with a probe object. Raises `StoreError`."""
        probe(self)

    def _opened_top(self) -> Handle:
        """The root, open: everything is done below the folder whose identity was compared, whatever is mounted or renamed meanwhile."""
        top = self._top
        if top is None or not top.current:
            top = self._top = self._compared(self._identity)
        return top

    def _compared(self, identity: str | None) -> Handle:
        """The folder that the root's path leads to now. Raises `store.unreachable` where it is missing or has another identity."""
        try:
            top = Handle(os.open(self.root, FOLDER_FLAGS), os.path.join(self.root, "."))
            found = None if identity is None else _identity_in(top.fd)
        except (FileNotFoundError, NotADirectoryError) as error:
            message = f"The store {self.root} is away: there is no such folder."
            raise StoreError(ErrorCode.STORE_UNREACHABLE, message, "Mount it, or move it back; the work continues.") from error
        except OSError as error:
            raise self._explained(error, "", putting=False) from error
        if identity is not None and found != identity:
            raise store_away(str(self.root), found, identity)
        return top

    def _opened(self, segments: list[str]) -> Handle:
        folder = self._handles.open(segments, self._opened_top)
        self._written.setdefault(folder.device, folder)
        return folder

    def _walk(self, folder: list[str], entries: list[tuple[str, int, float]]) -> Iterator[ObjectInfo]:
        for name, size, modified_at in entries:
            if name.endswith("/"):
                below = [*folder, name[:-1]]
                yield from self._walk(below, self._entries(below))
            else:
                yield ObjectInfo("/".join([*folder, name]), size, modified_at=modified_at)

    def _entries(self, segments: list[str]) -> list[tuple[str, int, float]]:
        """Names, sizes and times in a folder; nothing where it is gone."""
        try:
            with self._errors("/".join(segments)), self._folder(segments) as folder:
                return _entries(folder)
        except StoreError as error:
            if error.code is ErrorCode.STORE_MISSING:
                return []
            raise

    def _write(self, folder: int, name: str, chunks: Iterator[bytes] | list[bytes], metadata: Mapping[str, str] | None) -> bool:
        """Writes a nameless file and links it to its name. False: another writer was first."""
        file, temporary = -1, ""
        try:
            file, temporary = self._new_file(folder)
            for chunk in chunks:
                _write_all(file, chunk)
            if metadata:
                _set_metadata(file, metadata)
            if not SYNCS_AT_ONCE:
                os.fsync(file)
            source, source_folder = (temporary, folder) if temporary else (f"/proc/self/fd/{file}", None)
            os.link(source, name, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=not temporary)
            if not SYNCS_AT_ONCE:
                os.fsync(folder)
        except FileExistsError:
            return False
        except OSError:
            # What is there needs no room.
            if not _exists(folder, name):
                raise
            return False
        finally:
            if file >= 0:
                os.close(file)
            if temporary:
                os.unlink(temporary, dir_fd=folder)
        return True

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
    def _parent(self, key: str) -> Generator[tuple[int, str], None, None]:
        *folders, name = split_key(key)
        with self._folder(folders) as folder:
            yield folder, name

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
            raise self._explained(error, key, putting=putting) from error

    def _explained(self, error: OSError, key: str, *, putting: bool) -> StoreError:
        code = next((code for code, numbers in _CODES.items() if error.errno in numbers), ErrorCode.STORE_UNREACHABLE)
        if putting and error.errno == errno.ENOENT:
            # The folder was removed while it was written to; the next try makes it again.
            code = ErrorCode.STORE_UNREACHABLE
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        return StoreError(code, f"{reason}: {key[:200]!a} in the store {self.root}.", _ADVICE[code])


def _identity_in(folder: int) -> str | None:
    """The identity in a store's open root; None: it has none, or something else than a file is in its place."""
    try:
        file = _open_file(folder, IDENTITY_KEY)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return None
    with os.fdopen(file, "rb") as stream:
        return read_identity(stream.read(200))


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
        return ObjectInfo(key, os.fstat(file.fileno()).st_size, digest, _get_metadata(file.fileno()))


def _entries(folder: int) -> list[tuple[str, int, float]]:
    """Names, sizes and times of change, folders with a slash at their end, so that sorted names are keys in order."""
    found: list[tuple[str, int, float]] = []
    with os.scandir(folder) as entries:
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


def _write_all(file: int, data: bytes) -> None:
    written = os.write(file, data)
    if written < len(data):
        view = memoryview(data)[written:]
        while view:
            view = view[os.write(file, view) :]


def _set_metadata(file: int, metadata: Mapping[str, str]) -> None:
    if not hasattr(os, "setxattr"):
        return
    try:
        os.setxattr(file, _ATTRIBUTE, _encode_metadata(dict(metadata)))
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise


def _get_metadata(file: int) -> dict[str, str]:
    if not hasattr(os, "getxattr"):
        return {}
    try:
        return msgspec.json.decode(os.getxattr(file, _ATTRIBUTE))
    except OSError:
        return {}
