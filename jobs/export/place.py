"""Where the files of a dataset go: a local folder or a bucket. A file appears there complete or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from jobs.export.output import output_error
from jobs.store import open_store
from jobs.store.base import ObjectStore
from jobs.store.s3 import S3Settings
from pipelines.errors import ConfigError, ErrorCode, StoreError


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
        self.scratch = folder / "_export" / "scratch"

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        try:
            return path.read_bytes() if path.exists() else None
        except OSError as error:
            raise output_error(path, error) from error

    def holds_files(self) -> bool:
        try:
            return any(entry.name != self.scratch.parent.name for entry in self._folder.iterdir())
        except OSError as error:
            raise output_error(self._folder, error) from error

    def publish(self, name: str, path: Path, sha256: str) -> None:
        target = self._folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.chmod(path, 0o644)
            os.replace(path, target)
        except OSError as error:
            raise output_error(target, error) from error

    def remove(self, name: str) -> None:
        path = self._folder / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise output_error(path, error) from error


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
        shutil.rmtree(place.scratch, ignore_errors=True)
        try:
            place.scratch.mkdir(parents=True)
        except OSError as error:
            raise output_error(place.scratch, error) from error
        yield place
    finally:
        shutil.rmtree(place.scratch, ignore_errors=True)
        with suppress(OSError):
            # Not empty where the export was stopped.
            place.scratch.parent.rmdir()
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"Another export writes to {str(folder)!r} now."
        raise ConfigError(ErrorCode.CONFIG_INVALID, message, "Wait for it, or choose another place.") from None
