"""The files of an export: a single file, or the files of a dataset in a folder or a bucket.

A file appears there complete or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import heapq
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, TypeVar, cast

import msgspec

from jobs.store import FolderStore, ObjectStore, is_remote, open_store
from jobs.store.base import missing_allowed, sha256_of, split_key
from jobs.store.folder import sync_file_system
from pipelines.errors import ConfigError, ErrorCode, StoreError, invalid

if TYPE_CHECKING:
    from jobs.export.audio import AudioNames
    from jobs.settings import S3Settings

Record = TypeVar("Record")
_BUFFER_BYTES = 1 << 20
#: Higher levels make manifests only a little smaller, but the export much slower.
_GZIP_LEVEL = 3
_SORT_BYTES = 32 << 20
AGAIN = "Move it away; the next export writes the dataset again."


@contextmanager
def output(
    to: str, may_replace: Callable[[Path, Path], bool] = lambda new, path: True
) -> Generator[IO[bytes], None, None]:
    """Opens the file `to` for writing; `-` is standard output. The file appears, complete, once the block
    ends without an error.

    `may_replace` is called with the finished file and its target path. The target stays unchanged if it
    returns False or raises. Raises `config.invalid` for a path that cannot be written, `store.full` if the
    disk is full.
    """
    if to == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(to).absolute()
    temporary: Path | None = None
    with path_errors(path):
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "Not a regular file")
            # A symbolic link is followed.
            path = Path(os.path.realpath(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
            temporary = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            if may_replace(temporary, path):
                temporary.chmod(0o644)
                temporary.replace(path)
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)


@contextmanager
def path_errors(path: Path) -> Generator[None, None, None]:
    """Raises `OSError` as `store.full`, or as `config.invalid` for a file that cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "Free space there, then export again."
            raise StoreError(ErrorCode.STORE_FULL, f"{reason}: {str(path)!r}.", advice) from error
        raise invalid(f"{reason}: {str(path)!r} cannot be written.", "Export to another path.") from error


def json_bytes(value: object) -> bytes:
    """Indented JSON, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


class _Stamp(msgspec.Struct, frozen=True):
    """`.NAME.export.json`, the record of the exported file NAME beside it."""

    job: str
    sha256: str
    #: SHA-256 of the file that this one replaces. A process that is killed before the replacement leaves that
    #: file.
    before: str | None = None
    schema: str = "nightjar.file/1"


def own_output(to: str, job_id: str, replaces: Collection[str]) -> AbstractContextManager[IO[bytes]]:
    """Like `output`, for a file of a job, which replaces only files of the jobs in `replaces`. A file with
    the same content is kept.

    Raises `config.invalid` for any other file at `to`, and for a file that was changed after its export.
    """
    return output(to, partial(_may_replace, job_id=job_id, replaces=replaces))


def _may_replace(new: Path, path: Path, job_id: str, replaces: Collection[str]) -> bool:
    """Whether `new` replaces `path`. Writes the stamp before the file."""
    beside = path.with_name(f".{path.name}.export.json")
    try:
        stamp = msgspec.json.decode(beside.read_bytes(), type=_Stamp)
    except (OSError, ValueError):
        stamp = None
    after, before = file_sha256(new), file_sha256(path) if os.path.lexists(path) else None
    own = stamp is not None and stamp.job in replaces and before in (stamp.sha256, stamp.before)
    if before not in (None, after) and not own:
        message = f"{str(path)!r} is another file, or was changed after it was exported."
        raise invalid(message, "Move it away; the next export writes it again.")
    if before != after or stamp is None or (stamp.job, stamp.sha256) != (job_id, after):
        with output(str(beside)) as file:
            file.write(msgspec.json.encode(_Stamp(job_id, after, before)) + b"\n")
    return before != after


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a local file. Raises `OSError`."""
    with path.open("rb") as file:
        return sha256_of(file)


class WrittenFile(msgspec.Struct, frozen=True):
    """A file of a dataset."""

    name: str
    bytes: int
    sha256: str


class PartFiles:
    """The files of one part of a dataset, written to the scratch folder and moved to the destination
    together; a context manager.

    Unpublished files stay in the scratch folder until it is removed. `OSError` becomes `store.full` or
    `config.invalid`.
    """

    def __init__(self, destination: Destination, names: AudioNames) -> None:
        self.destination = destination
        self._names = names
        #: Name -> path in the scratch folder, for all files; name -> file, for the open ones.
        self._paths: dict[str, Path] = {}
        self._open: dict[str, BufferedWriter[FileIO]] = {}

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for file in self._open.values():
            # Not flushed: unpublished files are not needed, and a full disk would raise again.
            file.raw.close()
        if isinstance(error, OSError):
            with path_errors(Path(error.filename or self.destination.scratch)):
                raise error

    def audio_name(self, file: str, where: str) -> str:
        """The name by which the file `file` of the dataset refers to the audio at `where`."""
        return self._names.of(file, where)

    def sibling_name(self, name: str) -> str:
        """The name by which a file of the dataset refers to the file or folder `name` beside it."""
        return name.rpartition("/")[2] if self._names.relative else f"{self.destination.address}/{name}"

    def open(self, name: str) -> IO[bytes]:
        """Opens a new file; its name is relative to the destination. Raises `OSError`, also when the file is
        written."""
        file = self._open[name] = BufferedWriter(FileIO(self._scratch_path(name), "w"), _BUFFER_BYTES)
        return file

    def add(self, name: str, data: bytes) -> None:
        """Writes a small file and closes it: a part can have more files than a process can open. Raises
        `OSError`."""
        self._scratch_path(name).write_bytes(data)

    def _scratch_path(self, name: str) -> Path:
        path = self._paths[name] = self.destination.scratch / f"{len(self._paths):06d}"
        return path

    @contextmanager
    def gzip(self, name: str) -> Generator[IO[bytes], None, None]:
        """Opens a new gzip file; equal content gives equal bytes."""
        with gzip.GzipFile(
            filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=self.open(name), mtime=0
        ) as file:
            yield cast("IO[bytes]", file)

    def sorted_lines(self) -> SortedLines:
        """Makes a `SortedLines` in the scratch folder."""
        return SortedLines(self.destination.scratch)

    def publish(self, record: str) -> list[WrittenFile]:
        """Syncs every file to the disk, writes their list to `record`, and moves them to the destination.

        Raises `OSError` and the errors of `Destination.publish`.
        """
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if len(self._paths) > len(self._open):
            # One call for all added files.
            folder = os.open(self.destination.scratch, os.O_RDONLY | os.O_DIRECTORY)
            try:
                sync_file_system(folder)
            finally:
                os.close(folder)
        written = [
            WrittenFile(name, path.stat().st_size, file_sha256(path)) for name, path in self._paths.items()
        ]
        self.destination.write_record(record, written)
        for file in written:
            self.destination.publish(file.name, self._paths[file.name], file.sha256)
        return written


class SortedLines:
    """Takes lines in any order and yields them sorted by their bytes (the C locale); sorted runs are
    temporary files in `folder`; None: in the system's."""

    def __init__(self, folder: Path | None = None, run_bytes: int = _SORT_BYTES) -> None:
        self._folder = folder
        self._run_bytes = run_bytes
        self._lines: list[bytes] = []
        self._bytes = 0
        self._runs: list[IO[bytes]] = []

    def add(self, line: bytes) -> None:
        """Adds a line, which ends with its only newline."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= self._run_bytes:
            # The system deletes a file without a name when it is closed.
            self._runs.append(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
            self._runs[-1].writelines(sorted(self._lines))
            self._lines, self._bytes = [], 0

    def __iter__(self) -> Iterator[bytes]:
        for run in self._runs:
            run.seek(0)
        return heapq.merge(sorted(self._lines), *self._runs)


#: Subfolder for the records of an incomplete export.
RECORDS = "_export"
#: The identity of the export: the first record written, and the last removed.
PLAN = f"{RECORDS}/plan.json"
#: The summary of a complete export, written last.
END = "export.json"
#: Name of a record in the scratch folder while it is written. Before the plan is written, the folder contains
#: no other file.
RECORD = "record"


class Destination:
    """The files of a dataset, by their relative names, under a prefix of a bucket. Its objects are written
    once, so another export needs another prefix. Methods raise `config.invalid` or `store.*`."""

    #: Whether all files there must belong to the export. True for a folder, because its files can be
    #: overwritten.
    exclusive: ClassVar[bool] = False

    def __init__(self, store: ObjectStore, address: str, scratch: Path) -> None:
        self._store = store
        #: Absolute path, or `s3://` address.
        self.address = address
        #: Local folder for unfinished files.
        self.scratch = scratch

    def sizes(self, below: str = "") -> dict[str, int]:
        """Name of each file, including records -> its size in bytes. `below`: only files in that subfolder,
        such as `_export/`."""
        return {info.key: info.bytes for info in self._store.list(below)}

    def sha256(self, name: str) -> str | None:
        """Hex SHA-256 of a file, or None."""
        info = self._store.head(name)
        return None if info is None else info.sha256

    def publish(self, name: str, path: Path, sha256: str) -> None:
        """Moves a finished local file to the destination."""
        with path.open("rb") as file:
            result = self._store.put(name, file)
        if not result.created and result.sha256 != sha256:
            message = f"{self._store.uri(name)} exists with other content."
            raise StoreError(ErrorCode.STORE_CONFLICT, message, "Export to an empty prefix.")
        path.unlink()

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        self._store.delete(name)

    def write_record(self, name: str, value: object) -> None:
        """Writes a small JSON file."""
        path, data = self.scratch / RECORD, json_bytes(value)
        with path_errors(path), path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.publish(name, path, sha256_of(data))

    def record(self, name: str, kind: type[Record]) -> Record | None:
        """Reads a record, or returns None. Raises `config.invalid` for a file that is no record of an
        export."""
        with missing_allowed():
            try:
                return msgspec.json.decode(self._store.get(name), type=kind)
            except ValueError:
                raise foreign_file(self.address, name) from None
        return None

    def lists(self) -> list[str]:
        """The names of the records that list files."""
        return [name for name in self.sizes(f"{RECORDS}/") if name.endswith(".json") and name != PLAN]

    def remove_records(self) -> None:
        """Removes the records of an export, the plan last."""
        for name in (*self.lists(), PLAN):
            self.remove(name)


class FolderDestination(Destination):
    """A local folder. Unfinished files are in its subfolder `_export/scratch`, so that they are published by
    a rename."""

    exclusive = True

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderStore(folder), str(folder), folder / RECORDS / "scratch")
        self._folder = folder

    def empty_scratch(self) -> None:
        """Empties the scratch folder. Raises `config.invalid` if it has files that are not from a stopped
        export."""
        left = [path for path in self.scratch.glob("*") if not path.name.startswith(RECORD)]
        if left and not any((self._folder / name).exists() for name in (PLAN, END)):
            message = f"{str(self.scratch)!r} contains files that no export wrote."
            raise invalid(message, "Export to an empty folder.")
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)

    def sizes(self, below: str = "") -> dict[str, int]:
        """As `Destination.sizes`. A symbolic link counts as a file, even if it points to a folder."""
        found: dict[str, int] = {}
        with path_errors(self._folder):
            for folder, folders, files in os.walk(self._folder / below, onerror=_raise):
                for path in [Path(folder, name) for name in (*files, *folders)]:
                    status = path.lstat()
                    if path == self.scratch:
                        folders.remove(path.name)
                    elif not stat.S_ISDIR(status.st_mode):
                        found[str(path.relative_to(self._folder))] = status.st_size
        return found

    def publish(self, name: str, path: Path, sha256: str) -> None:
        with self._at(name) as target:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.chmod(0o644)
            path.replace(target)

    def remove(self, name: str) -> None:
        with self._at(name) as path:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            # Empty folders are removed too; the folder of the records is not empty.
            os.removedirs(path.parent)

    @contextmanager
    def _at(self, name: str) -> Generator[Path, None, None]:
        """The path of a file. Raises `store.bad_key` for a name outside the folder, which a record could
        contain."""
        path = self._folder.joinpath(*split_key(name))
        with path_errors(path):
            yield path


@contextmanager
def open_destination(to: str, s3: S3Settings | None) -> Generator[Destination, None, None]:
    """Opens the destination at a path or an `s3://` address. A folder is locked, so that one export at a time
    writes to it."""
    if is_remote(to):
        store = open_store(to, s3)
        with tempfile.TemporaryDirectory(prefix="nightjar-export-") as scratch:
            yield Destination(store, store.url, Path(scratch))
        return
    folder = Path(to).absolute()
    destination = FolderDestination(folder)
    with ExitStack() as ended:
        with path_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            ended.callback(os.close, handle)
            try:
                # A file system without locks fails here too.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"Another export is writing to {str(folder)!r}."
                raise invalid(message, "Wait until it ends, or export to another folder.") from None
            destination.empty_scratch()
        try:
            yield destination
        finally:
            shutil.rmtree(destination.scratch, ignore_errors=True)
            with suppress(OSError):
                # Not empty if the export was stopped.
                destination.scratch.parent.rmdir()


def foreign_file(address: str, name: str) -> ConfigError:
    """The error for a file in a destination that does not belong to an export."""
    return invalid(f"{address!r} contains {name!r}, which no export wrote.", AGAIN)


def _raise(error: OSError) -> None:
    raise error
