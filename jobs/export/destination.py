"""Where the files of a dataset go: a local folder or a bucket. A file appears there complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

import msgspec

from jobs.store import open_store
from jobs.store.base import ObjectStore, split_key
from jobs.store.s3 import S3Settings
from pipelines.errors import ConfigError, ErrorCode, NightjarError, StoreError


@contextmanager
def output(to: str, wanted: Callable[[Path, Path], bool] = lambda made, path: True) -> Generator[IO[bytes], None, None]:
    """Opens `to` for writing: what is written stands there once the block ends without an error; `-` is standard output.

    `wanted` is asked with the finished file and its place: False leaves the place as it is, and so does an error.
    Raises `config.invalid` where it cannot be written, `store.full` where the disk is full.
    """
    if to == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(to).absolute()
    try:
        path = _file_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    except OSError as error:
        raise output_error(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        if not wanted(Path(temporary), path):
            os.unlink(temporary)
            return
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise output_error(path, error) from error
    except BaseException:
        os.unlink(temporary)
        raise


def _file_of(path: Path) -> Path:
    """Where a file is written that is given as `path`: a link stays, and what it leads to is written. Raises `OSError` for what
    is no regular file, because a file would take its place."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def output_error(path: Path, error: OSError) -> NightjarError:
    """The error for a file of an export that cannot be written."""
    reason = error.strerror or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreError(ErrorCode.STORE_FULL, f"{reason}: {str(path)!r}.", "Free space there, then export again.")
    return ConfigError(ErrorCode.CONFIG_INVALID, f"{reason}: {str(path)!r} cannot be written.", "Choose another place for the export.")


#: Subfolder of what an export that is not complete knows of itself.
RECORDS = "_export"
#: What a complete export knows of itself.
END = "export.json"
#: The scratch file of an export's first record: until that is there, nothing tells whose the scratch folder is.
_FIRST = "record-000000"


class Place(Protocol):
    """A folder of files by relative name. Methods raise `config.invalid` or `store.*`."""

    #: Absolute path, or `s3://` address.
    address: str
    #: Local folder for files that are not finished.
    scratch: Path

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None."""
        ...

    def holds_files(self) -> bool:
        """Whether there are files that a new export could write over."""
        ...

    def stranger(self, own: Collection[str]) -> str | None:
        """A file that is none of these and that a new export could write over."""
        ...

    def sha256(self, name: str) -> str | None:
        """Hex SHA-256 of a file, or None."""
        ...

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """Bytes of those of these files that are there."""
        ...

    def records(self) -> list[str]:
        """The files of an export that is not complete: what it knows of itself."""
        ...

    def publish(self, name: str, path: Path, sha256: str) -> None:
        """Moves a finished local file there."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file; a missing one is no error."""
        ...


class FolderPlace:
    """A local folder; unfinished files are in its subfolder `_export/scratch`, so that moving them costs nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = str(folder)
        self.scratch = folder / RECORDS / "scratch"

    def begin(self) -> None:
        """Makes an empty scratch folder in place of what a stopped export left. Raises `config.invalid` where no export is known."""
        try:
            left = {path.name for path in self.scratch.glob("*")}
            if left - {_FIRST} and not self.records() and not (self._folder / END).exists():
                message = f"{str(self.scratch)!r} holds files that are no export's."
                raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Choose an empty place.")
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir(parents=True)
        except OSError as error:
            raise output_error(self.scratch, error) from error

    def end(self) -> None:
        """Removes the scratch folder."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        with suppress(OSError):
            # Not empty where the export was stopped.
            self.scratch.parent.rmdir()

    def read(self, name: str) -> bytes | None:
        path = self._path(name)
        try:
            return path.read_bytes() if path.exists() else None
        except OSError as error:
            raise output_error(path, error) from error

    def _path(self, name: str) -> Path:
        """Raises `store.bad_key` for a name that leads out of the folder: names also come from records that lie in it."""
        return self._folder.joinpath(*split_key(name))

    def holds_files(self) -> bool:
        try:
            return any(entry.name != RECORDS for entry in self._folder.iterdir())
        except OSError as error:
            raise output_error(self._folder, error) from error

    def stranger(self, own: Collection[str]) -> str | None:
        try:
            return next((name for name in self._names() if name not in own), None)
        except OSError as error:
            raise output_error(self._folder, error) from error

    def _names(self) -> Iterator[str]:
        """All but the export's own records. A link is a file, wherever it leads."""
        for folder, folders, files in os.walk(self._folder, onerror=_raise):
            here = Path(folder)
            if here == self._folder and RECORDS in folders:
                folders.remove(RECORDS)
            for name in (*files, *(name for name in folders if (here / name).is_symlink())):
                yield str((here / name).relative_to(self._folder))

    def sha256(self, name: str) -> str | None:
        path = self._path(name)
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise output_error(path, error) from error

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        try:
            return {name: path.stat().st_size for name in names if (path := self._path(name)).is_file()}
        except OSError as error:
            raise output_error(self._folder, error) from error

    def records(self) -> list[str]:
        return [f"{RECORDS}/{path.name}" for path in sorted((self._folder / RECORDS).glob("*.json"))]

    def publish(self, name: str, path: Path, sha256: str) -> None:
        target = self._path(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.chmod(path, 0o644)
            os.replace(path, target)
        except OSError as error:
            raise output_error(target, error) from error

    def remove(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise output_error(path, error) from error
        with suppress(OSError):
            # Not empty, most of the time.
            for folder in [folder for folder in path.parents if folder.is_relative_to(self._folder) and folder != self._folder]:
                folder.rmdir()


class BucketPlace:
    """A prefix of a bucket. Its objects are write-once: an export with other content needs another prefix."""

    def __init__(self, store: ObjectStore, scratch: Path) -> None:
        self._store = store
        self.address = store.url
        self.scratch = scratch

    def read(self, name: str) -> bytes | None:
        return self._store.get(name) if self._store.head(name) is not None else None

    def holds_files(self) -> bool:
        # Objects are written once: whatever stands there is never written over.
        return False

    def stranger(self, own: Collection[str]) -> str | None:
        return None

    def sha256(self, name: str) -> str | None:
        info = self._store.head(name)
        return None if info is None else info.sha256

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        return {info.key: info.bytes for info in self._store.list("") if info.key in names}

    def records(self) -> list[str]:
        return [info.key for info in self._store.list(f"{RECORDS}/") if info.key.endswith(".json")]

    def publish(self, name: str, path: Path, sha256: str) -> None:
        result = self._store.put_file(name, path)
        if not result.created and result.info.sha256 != sha256:
            raise StoreError(ErrorCode.STORE_CONFLICT, f"{self._store.uri(name)} holds something else.", "Choose an empty prefix.")
        path.unlink()

    def remove(self, name: str) -> None:
        self._store.delete(name)


@contextmanager
def open_place(to: str, s3: S3Settings | None) -> Generator[Place, None, None]:
    """The place of a path or an `s3://` address, held by one export at a time where it is a folder."""
    if to.startswith("s3://"):
        with tempfile.TemporaryDirectory(prefix="nightjar-export-") as scratch:
            yield BucketPlace(open_store(to, s3), Path(scratch))
        return
    folder = Path(to).absolute()
    place = FolderPlace(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise output_error(folder, error) from error
    try:
        _lock(handle, folder)
        place.begin()
        try:
            yield place
        finally:
            place.end()
    finally:
        os.close(handle)


def _raise(error: OSError) -> None:
    raise error


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"Another export writes to {str(folder)!r} now."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Wait for it, or choose another place.") from None
    except OSError as error:
        # A file system without locks.
        raise output_error(folder, error) from error


class _Stamp(msgspec.Struct, frozen=True):
    """What stands beside the file."""

    job: str
    sha256: str
    #: Of the file that this one took the place of: it is still there where the writing was stopped just then.
    before: str | None = None
    schema: str = "nightjar.file/1"


@contextmanager
def own_output(to: str, job_id: str, replaces: Collection[str]) -> Generator[IO[bytes], None, None]:
    """As `output`, for a file of a job. One that stands there with the same content is left as it is, and one of a job in
    `replaces` makes room.

    Raises `config.invalid` also for a file that is another's, or that was changed after it was written.
    """
    with output(to, lambda made, path: _make_room(made, path, job_id, replaces)) as file:
        yield file


def _make_room(made: Path, path: Path, job_id: str, replaces: Collection[str]) -> bool:
    """Whether `path` is to be written over by `made`."""
    beside = path.with_name(f".{path.name}.export.json")
    new, old = _sha256(made), _sha256(path)
    stamp = _read(beside)
    if old is not None and old != new and (stamp is None or stamp.job not in replaces or old not in (stamp.sha256, stamp.before)):
        raise ConfigError(
            ErrorCode.CONFIG_INVALID,
            f"{str(path)!r} is not what was exported there: it is another file, or was changed since.",
            "Move it away; the export is then written anew.",
        )
    if old != new or stamp is None or (stamp.job, stamp.sha256) != (job_id, new):
        with output(str(beside)) as file:
            file.write(msgspec.json.encode(_Stamp(job_id, new or "", old)) + b"\n")
    return old != new


def _sha256(path: Path) -> str | None:
    """Hex SHA-256 of a file; None where there is none."""
    try:
        if not os.path.lexists(path):
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise output_error(path, error) from error


def _read(path: Path) -> _Stamp | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Stamp)
    except (OSError, ValueError):
        return None
