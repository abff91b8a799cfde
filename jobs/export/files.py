"""Local files of an export: a file appears complete or not at all, and lines that need sorting are sorted on disk."""

from __future__ import annotations

import errno
import heapq
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise, starmap
from pathlib import Path
from typing import IO

import msgspec

from jobs.store.base import sha256_of
from pipelines.errors import ErrorCode, StoreError, invalid

_encode = msgspec.json.Encoder().encode
#: Size of the lines that are sorted in memory, where they need a few times as much, and of those of a run that are read at once.
SORT_BYTES, _READ_BYTES = 4 << 20, 16 << 10


@contextmanager
def output(
    to: str, may_replace: Callable[[Path, Path], bool] = lambda new, path: True
) -> Generator[IO[bytes]]:
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
def path_errors(path: Path | str) -> Generator[None]:
    """Raises `OSError` as `store.full`, or as `config.invalid` for a file that cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreError(
                ErrorCode.STORE_FULL, f"{reason}: {str(path)!r}.", "Free space there, then export again."
            ) from error
        raise invalid(f"{reason}: {str(path)!r} cannot be written.", "Export to another path.") from error


def json_line(value: object) -> bytes:
    """JSON on one line, with a newline at its end."""
    return _encode(value) + b"\n"


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

    def may_replace(new: Path, path: Path) -> bool:
        """Writes the stamp before the file."""
        beside = path.with_name(f".{path.name}.export.json")
        try:
            stamp = msgspec.json.decode(beside.read_bytes(), type=_Stamp)
        except (OSError, ValueError):
            stamp = None
        after = file_sha256(new)
        before = file_sha256(path) if os.path.lexists(path) else None
        own = stamp is not None and stamp.job in replaces and before in (stamp.sha256, stamp.before)
        if before not in (None, after) and not own:
            raise invalid(
                f"{str(path)!r} is another file, or was changed after it was exported.",
                "Move it away; the next export writes it again.",
            )
        if before != after or stamp is None or (stamp.job, stamp.sha256) != (job_id, after):
            with output(str(beside)) as file:
                file.write(json_line(_Stamp(job_id, after, before)))
        return before != after

    return output(to, may_replace)


def file_sha256(path: Path | str) -> str:
    """Hex SHA-256 of a local file. Raises `OSError`."""
    with open(path, "rb") as file:
        return sha256_of(file)


class SortedLines:
    """Takes lines in any order and yields them sorted by their bytes (the C locale); sorted runs are in a
    temporary file in `folder`; None: in the system's."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lines: list[bytes] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        #: The ends of the runs, after their beginning.
        self._ends = [0]

    def add(self, line: bytes) -> None:
        """Adds a line, which ends with its only newline."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= SORT_BYTES:
            # The system deletes a file without a name when it is closed.
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._file.seek(0, os.SEEK_END)
            self._file.writelines(sorted(self._lines))
            self._ends.append(self._file.tell())
            self._lines = []
            self._bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        return heapq.merge(sorted(self._lines), *starmap(self._run, pairwise(self._ends)))

    def _run(self, start: int, end: int) -> Iterator[bytes]:
        """The lines of a run; a few are in memory."""
        while self._file is not None and start < end:
            self._file.seek(start)
            for line in self._file.readlines(_READ_BYTES):
                if start < end:
                    start += len(line)
                    yield line
