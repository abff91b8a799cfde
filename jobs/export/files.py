"""Files that an export writes: one file by itself, the files of one part of a dataset, and lines sorted on disk."""

from __future__ import annotations

import errno
import gzip
import hashlib
import heapq
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import msgspec

from jobs.export.items import AudioNames
from jobs.store.handles import sync_file_system
from pipelines.errors import ConfigError, ErrorCode, NightjarError, StoreError

if TYPE_CHECKING:
    from jobs.export.destination import Destination

_BUFFER_BYTES = 1 << 20
#: Text of manifests shrinks little more at higher levels, and these take most of an export's time.
_GZIP_LEVEL = 3
_SORT_BYTES = 32 << 20


@contextmanager
def output(to: str, wanted: Callable[[Path, Path], bool] = lambda new, path: True) -> Generator[IO[bytes], None, None]:
    """Opens the file `to` for writing; `-` is standard output. The file appears, complete, once the block ends without an error.

    `wanted` is called with the finished file and its target path. The target stays as it is where it returns False or raises.
    Raises `config.invalid` for a path that cannot be written, `store.full` where the disk is full.
    """
    if to == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(to).absolute()
    temporary: Path | None = None
    try:
        path = _resolved(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        if wanted(temporary, path):
            temporary.chmod(0o644)
            temporary.replace(path)
    except OSError as error:
        raise output_error(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _resolved(path: Path) -> Path:
    """The path that is written: a symbolic link stays, and its target is written. Raises `OSError` for anything that exists and is
    no regular file."""
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
    return ConfigError(ErrorCode.CONFIG_INVALID, f"{reason}: {str(path)!r} cannot be written.", "Export to another path.")


class _Stamp(msgspec.Struct, frozen=True):
    """`.NAME.export.json`, which stands beside the file NAME of a job."""

    job: str
    sha256: str
    #: Of the file that this one replaces. That file is still there where a process was killed before the replacement.
    before: str | None = None
    schema: str = "nightjar.file/1"


@contextmanager
def own_output(to: str, job_id: str, replaces: Collection[str]) -> Generator[IO[bytes], None, None]:
    """As `output`, for a file of a job. It replaces a file of a job in `replaces`; a file with the same content stays as it is.

    Raises `config.invalid` also for any other file at `to`, and for a file that was changed after it was exported.
    """
    with output(to, lambda new, path: _may_replace(new, path, job_id, replaces)) as file:
        yield file


def _may_replace(new: Path, path: Path, job_id: str, replaces: Collection[str]) -> bool:
    """Whether `path` has to be replaced by `new`. Writes the stamp before the file."""
    beside = path.with_name(f".{path.name}.export.json")
    try:
        stamp = msgspec.json.decode(beside.read_bytes(), type=_Stamp)
    except (OSError, ValueError):
        stamp = None
    after, before = sha256_of(new), sha256_of(path) if os.path.lexists(path) else None
    own = stamp is not None and stamp.job in replaces and before in (stamp.sha256, stamp.before)
    if before not in (None, after) and not own:
        raise ConfigError(
            ErrorCode.CONFIG_INVALID,
            f"{str(path)!r} is another file, or was changed after it was exported.",
            "Move it away; the next export writes it again.",
        )
    if before != after or stamp is None or (stamp.job, stamp.sha256) != (job_id, after):
        with output(str(beside)) as file:
            file.write(msgspec.json.encode(_Stamp(job_id, after, before)) + b"\n")
    return before != after


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a local file. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class WrittenFile(msgspec.Struct, frozen=True):
    """A file of a dataset."""

    name: str
    bytes: int
    sha256: str


class PartFiles:
    """The files of one part of a dataset: written in the scratch folder, then moved to the destination together.

    A context manager. Files that were not published are left to the scratch folder, which is removed with the export.
    `OSError` becomes `store.full` or `config.invalid`.
    """

    def __init__(self, destination: Destination, names: AudioNames | None = None) -> None:
        self.destination = destination
        self._names = names
        self._open: dict[str, tuple[Path, BufferedWriter[FileIO]]] = {}
        self._whole: dict[str, tuple[Path, WrittenFile]] = {}

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for _, file in self._open.values():
            # Closed below its buffer: what is not published need not be written, and a full disk would raise again.
            file.raw.close()
        if isinstance(error, OSError):
            raise output_error(Path(error.filename or self.destination.scratch), error) from error

    def audio_name(self, file: str, where: str) -> str:
        """What the file with the name `file` calls the audio at `where`."""
        return where if self._names is None else self._names.of(file, where)

    def sibling_name(self, name: str) -> str:
        """What another file in the same folder of the dataset calls the file or folder `name`."""
        relative = self._names is not None and self._names.base is not None
        return name.rpartition("/")[2] if relative else f"{self.destination.address}/{name}"

    def open(self, name: str) -> IO[bytes]:
        """A new file with a name relative to the destination. Raises `OSError`, as the file does."""
        path = self._scratch_path()
        file = BufferedWriter(FileIO(path, "w"), _BUFFER_BYTES)
        self._open[name] = path, file
        return file

    def add(self, name: str, data: bytes) -> None:
        """A whole small file, which is closed at once: a part can have more of them than a process can open. Raises `OSError`."""
        path = self._scratch_path()
        path.write_bytes(data)
        self._whole[name] = path, WrittenFile(name, len(data), hashlib.sha256(data).hexdigest())

    def _scratch_path(self) -> Path:
        return self.destination.scratch / f"{len(self._open) + len(self._whole):06d}"

    @contextmanager
    def gzip(self, name: str) -> Generator[IO[bytes], None, None]:
        """A new gzip file; equal content gives equal bytes."""
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=self.open(name), mtime=0) as file:
            yield cast("IO[bytes]", file)

    def sorted_lines(self, name: str) -> SortedLines:
        """An empty `SortedLines` with a folder of its own, called `name`."""
        path = self.destination.scratch / f"sort-{name}"
        path.mkdir(exist_ok=True)
        return SortedLines(path)

    def finish(self) -> list[WrittenFile]:
        """Writes every file to the disk, with its hash, and closes it. None has its name yet. Raises `OSError`."""
        written = [file for _, file in self._whole.values()]
        if written:
            self._sync_whole()
        for name, (path, file) in self._open.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            written.append(WrittenFile(name, path.stat().st_size, sha256_of(path)))
        return written

    def publish(self, written: list[WrittenFile]) -> None:
        """Moves the finished files to their names. Raises as `Destination.publish`."""
        for file in written:
            path = (self._whole if file.name in self._whole else self._open)[file.name][0]
            self.destination.publish(file.name, path, file.sha256)

    def _sync_whole(self) -> None:
        """Writes the files of `add` to the disk, with one call for all of them."""
        folder = os.open(self.destination.scratch, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_file_system(folder)
        finally:
            os.close(folder)


class SortedLines:
    """Takes lines in any order and iterates over them in the order of their bytes (the C locale's); sorted runs lie in `folder`."""

    def __init__(self, folder: Path, run_bytes: int = _SORT_BYTES) -> None:
        self._folder = folder
        self._run_bytes = run_bytes
        self._lines: list[bytes] = []
        self._bytes = 0
        self._runs: list[Path] = []

    def add(self, line: bytes) -> None:
        """`line` ends with its only newline."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= self._run_bytes:
            self._spill()

    def __iter__(self) -> Iterator[bytes]:
        self._lines.sort()
        with ExitStack() as stack:
            yield from heapq.merge(self._lines, *(stack.enter_context(path.open("rb")) for path in self._runs))

    def _spill(self) -> None:
        self._lines.sort()
        path = self._folder / f"run-{len(self._runs):06d}"
        with path.open("wb") as file:
            file.writelines(self._lines)
        self._runs.append(path)
        self._lines, self._bytes = [], 0
