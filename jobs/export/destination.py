"""Where the files of a dataset go: a local folder or a prefix of a bucket. A file appears there complete or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from jobs.export.files import output_error, sha256_of
from jobs.store import ObjectStore, S3Settings, is_remote, open_store
from jobs.store.base import split_key
from pipelines.errors import ConfigError, ErrorCode, StoreError

#: Subfolder of the records of an export that is not complete.
RECORDS = "_export"
#: In there: what the export is. It is the first record written, and the last removed.
PLAN = f"{RECORDS}/plan.json"
#: Written last: what the complete export is.
END = "export.json"
#: In the scratch folder: a record that is being written. Before the first record nothing else is there.
RECORD = "record"


class Destination(Protocol):
    """The files of a dataset by their relative names. Methods raise `config.invalid` or `store.*`."""

    #: Absolute path, or `s3://` address.
    address: str
    #: Local folder for unfinished files.
    scratch: Path
    #: Whether everything there has to belong to the export: a folder, where files can be overwritten.
    exclusive: bool

    def sizes(self, below: str = "") -> dict[str, int]:
        """Name -> bytes of all files, records included; with `below`, such as `_export/`, of those in that subfolder."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None."""
        ...

    def sha256(self, name: str) -> str | None:
        """Hex SHA-256 of a file, or None."""
        ...

    def publish(self, name: str, path: Path, sha256: str) -> None:
        """Moves a finished local file there."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file; a missing one is no error."""
        ...


class FolderDestination:
    """A local folder. Unfinished files are in its subfolder `_export/scratch`, so that publishing them is a rename."""

    exclusive = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = str(folder)
        self.scratch = folder / RECORDS / "scratch"

    def begin(self) -> None:
        """Empties the scratch folder of a stopped export. Raises `config.invalid` for a folder that belongs to no export."""
        with self._errors(self.scratch):
            left = {path.name for path in self.scratch.glob("*")}
            if any(not name.startswith(RECORD) for name in left) and not any((self._folder / name).exists() for name in (PLAN, END)):
                message = f"{str(self.scratch)!r} holds files that no export wrote."
                raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Export to an empty folder.")
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir(parents=True)

    def end(self) -> None:
        """Removes the scratch folder."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        with suppress(OSError):
            # Not empty where the export was stopped.
            self.scratch.parent.rmdir()

    def sizes(self, below: str = "") -> dict[str, int]:
        """A symbolic link counts as a file, wherever it points."""
        found: dict[str, int] = {}
        with self._errors(self._folder):
            for folder, folders, files in os.walk(self._folder / below, onerror=_raise):
                here = Path(folder)
                links = [name for name in folders if (here / name).is_symlink()]
                folders[:] = [name for name in folders if here / name != self.scratch]
                found |= {str((here / name).relative_to(self._folder)): (here / name).lstat().st_size for name in (*files, *links)}
        return found

    def read(self, name: str) -> bytes | None:
        path = self._path(name)
        with self._errors(path):
            return path.read_bytes() if path.exists() else None

    def sha256(self, name: str) -> str | None:
        path = self._path(name)
        with self._errors(path):
            return sha256_of(path) if path.exists() else None

    def publish(self, name: str, path: Path, sha256: str) -> None:
        target = self._path(name)
        with self._errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.chmod(0o644)
            path.replace(target)

    def remove(self, name: str) -> None:
        path = self._path(name)
        with self._errors(path):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            # Usually not empty.
            for folder in [folder for folder in path.parents if folder.is_relative_to(self._folder) and folder != self._folder]:
                folder.rmdir()

    def _path(self, name: str) -> Path:
        """Raises `store.bad_key` for a name that leads out of the folder: names also come from records in the folder."""
        return self._folder.joinpath(*split_key(name))

    @contextmanager
    def _errors(self, path: Path) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise output_error(path, error) from error


class BucketDestination:
    """A prefix of a bucket. Its objects are written once, so another export needs another prefix; other objects do not matter."""

    exclusive = False

    def __init__(self, store: ObjectStore, scratch: Path) -> None:
        self._store = store
        self.address = store.url
        self.scratch = scratch

    def sizes(self, below: str = "") -> dict[str, int]:
        return {info.key: info.bytes for info in self._store.list(below)}

    def read(self, name: str) -> bytes | None:
        return self._store.get(name) if self._store.head(name) is not None else None

    def sha256(self, name: str) -> str | None:
        info = self._store.head(name)
        return None if info is None else info.sha256

    def publish(self, name: str, path: Path, sha256: str) -> None:
        result = self._store.put_file(name, path)
        if not result.created and result.info.sha256 != sha256:
            message = f"{self._store.uri(name)} exists with other content."
            raise StoreError(ErrorCode.STORE_CONFLICT, message, "Export to an empty prefix.")
        path.unlink()

    def remove(self, name: str) -> None:
        self._store.delete(name)


@contextmanager
def open_destination(to: str, s3: S3Settings | None) -> Generator[Destination, None, None]:
    """The destination at a path or an `s3://` address. A folder is locked: one export at a time writes to it."""
    if is_remote(to):
        with tempfile.TemporaryDirectory(prefix="nightjar-export-") as scratch:
            yield BucketDestination(open_store(to, s3), Path(scratch))
        return
    folder = Path(to).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise output_error(folder, error) from error
    destination = FolderDestination(folder)
    try:
        _lock(handle, folder)
        destination.begin()
        try:
            yield destination
        finally:
            destination.end()
    finally:
        os.close(handle)


def _raise(error: OSError) -> None:
    raise error


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"Another export is writing to {str(folder)!r}."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Wait until it ends, or export to another folder.") from None
    except OSError as error:
        # A file system without locks.
        raise output_error(folder, error) from error
