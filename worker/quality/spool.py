"""Samples that wait in temporary files."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, StoreError

#: A temporary file of so many bytes takes no more of them.
SPOOL_FILE_BYTES = 256 << 20
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class _SpoolFile:
    """A file without a name, which the system deletes with the process."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="nightjar-draws-")  # noqa: SIM115 - closed when it is full and nothing of it is held
        self.end = 0
        self.held = 0


@dataclass(frozen=True, slots=True)
class SpooledSamples:
    """Samples in a file."""

    file: _SpoolFile
    first_byte: int
    count: int


class Spool:
    """Samples in temporary files of `file_bytes`. A file's space is free again when nothing of it is held.

    Draws leave in nearly the order in which they came, so the disk holds those that wait and a file or two more.
    """

    def __init__(self, file_bytes: int = SPOOL_FILE_BYTES) -> None:
        self._file_bytes = file_bytes
        self._current: _SpoolFile | None = None
        self._files: set[_SpoolFile] = set()
        self._lock = threading.Lock()

    def put(self, samples: NDArray[np.float32]) -> SpooledSamples:
        """Takes samples [samples]. Raises `StoreError`: `store.full`, or `store.forbidden` where temporary files cannot be written."""
        try:
            with self._lock:
                return self._written(samples.astype(np.float32, copy=False).tobytes(), len(samples))
        except OSError as error:
            raise _disk_error(error) from error

    def take(self, spooled: SpooledSamples) -> NDArray[np.float32]:
        """The samples [samples]; once for each `put`. Raises `StoreError` as `put` does."""
        try:
            data = os.pread(spooled.file.file.fileno(), spooled.count * 4, spooled.first_byte)
        except OSError as error:
            raise _disk_error(error) from error
        finally:
            with self._lock:
                spooled.file.held -= 1
                if not spooled.file.held:
                    self._free(spooled.file)
        return np.frombuffer(data, np.float32)

    def close(self) -> None:
        """Closes the files, with what they hold."""
        with self._lock:
            self._current = None
            for one in self._files:
                one.file.close()
            self._files.clear()

    def _written(self, data: bytes, count: int) -> SpooledSamples:
        if self._current is None or self._current.end >= self._file_bytes:
            self._current = _SpoolFile()
            self._files.add(self._current)
        into, written = self._current, 0
        while written < len(data):
            written += os.pwrite(into.file.fileno(), data[written:], into.end + written)
        spooled = SpooledSamples(into, into.end, count)
        into.end += len(data)
        into.held += 1
        return spooled

    def _free(self, empty: _SpoolFile) -> None:
        if empty is self._current:
            empty.file.truncate(0)
            empty.end = 0
        else:
            empty.file.close()
            self._files.discard(empty)


def _disk_error(error: OSError) -> StoreError:
    code = ErrorCode.STORE_FORBIDDEN if error.errno in _FORBIDDEN else ErrorCode.STORE_FULL
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    return StoreError(
        code, f"Draws that wait for meters cannot be kept in a temporary file: {reason}.", "Free space there, or set TMPDIR elsewhere."
    )
