"""The files of one part: written aside with their hashes, then published together."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import msgspec

from jobs.export.destination import Place
from jobs.export.items import AudioNames

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER_BYTES = 1 << 20
#: Text of manifests shrinks little more at higher levels, and these take most of an export's time.
_GZIP_LEVEL = 3


class WrittenFile(msgspec.Struct, frozen=True):
    """A file of a dataset."""

    name: str
    bytes: int
    sha256: str


class HashedFile(io.RawIOBase):
    """A file that is written from its beginning to its end and knows its hash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self._bytes = 0
        # Hash and file let other threads run: with a call for each piece they would wait for their turn each time.
        self._pending = bytearray()

    def write(self, data: Buffer, /) -> int:
        before = len(self._pending)
        self._pending += data
        size = len(self._pending) - before
        self._bytes += size
        if len(self._pending) >= _BUFFER_BYTES:
            self.flush()
        return size

    def tell(self) -> int:
        return self._bytes

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._digest.update(pending)
            view = memoryview(pending)
            while view:
                view = view[self._file.write(view) :]

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._file.close()

    def abandon(self) -> None:
        """Closes the file as it is; does nothing to one that is finished."""
        self._pending.clear()
        self.close()

    def finish(self, name: str) -> WrittenFile:
        """Brings the file to the disk and closes it."""
        if not self.closed:
            self.flush()
            os.fsync(self._file.fileno())
            self.close()
        return WrittenFile(name, self._bytes, self._digest.hexdigest())


class PartFiles:
    """Opens the files of one part; `publish` moves them to their place once all are complete."""

    def __init__(self, place: Place, label: str = "", names: AudioNames | None = None) -> None:
        """`label` keeps the unfinished files of two that are open at once apart; `names`: how they name audio."""
        self.place = place
        self._names = names
        self._label = label
        self._open: dict[str, HashedFile] = {}

    def named(self, file: str, where: str) -> str:
        """What the file with this name calls the audio at `where`."""
        return where if self._names is None else self._names.of(file, where)

    def named_file(self, name: str) -> str:
        """What a file of the export in the same folder calls the one with this name."""
        relative = self._names is not None and self._names.base is not None
        return name.rpartition("/")[2] if relative else f"{self.place.address}/{name}"

    def open(self, name: str) -> IO[bytes]:
        """A new file under a relative name. Raises `OSError`, as the file does."""
        file = self._open[name] = HashedFile(self.place.scratch / f"{self._label}{len(self._open):06d}")
        return cast(IO[bytes], file)

    @contextmanager
    def gzip(self, name: str) -> Generator[IO[bytes], None, None]:
        """A new file that is compressed; equal content gives equal bytes."""
        with gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=self.open(name), mtime=0) as file:
            yield cast(IO[bytes], file)

    def scratch(self, name: str) -> Path:
        """A folder for working files."""
        path = self.place.scratch / f"work-{name}"
        path.mkdir(exist_ok=True)
        return path

    def finish(self) -> list[WrittenFile]:
        """Brings every file to the disk; none has its name yet. Raises `OSError` where the last bytes cannot be written."""
        return [file.finish(name) for name, file in self._open.items()]

    def publish(self) -> list[WrittenFile]:
        """Moves every file to its name. Raises as `Place`, and as `finish`."""
        finished = self.finish()
        for file, written in zip(self._open.values(), finished, strict=True):
            self.place.publish(written.name, file.path, written.sha256)
        return finished

    def discard(self) -> None:
        """Closes what is open; the scratch folder goes with the export."""
        for file in self._open.values():
            file.abandon()
