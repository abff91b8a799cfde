"""Members of tar files with nothing in them that changes from one run to the next."""

from __future__ import annotations

import tarfile
from typing import IO

_EMPTY = tarfile.TarInfo("").tobuf(tarfile.GNU_FORMAT)
# Source: POSIX ustar header; the checksum counts its own field as spaces.
_BEFORE_SIZE, _BEFORE_CHECKSUM, _REST = _EMPTY[100:124], _EMPTY[136:148], _EMPTY[156:]
_REST_SUM = sum(_REST)


def write_member(file: IO[bytes], name: str, data: bytes) -> None:
    """Appends a member of user 0, dated 1970. `name` is ASCII."""
    file.write(_header(name, len(data)))
    file.write(data)
    file.write(bytes(-len(data) % tarfile.BLOCKSIZE))


def write_end(file: IO[bytes]) -> None:
    """Ends an archive: two empty blocks, filled up to a whole record."""
    end = 2 * tarfile.BLOCKSIZE
    file.write(bytes(end + -(file.tell() + end) % tarfile.RECORDSIZE))


def _header(name: str, size: int) -> bytes:
    """What `tarfile` makes, in a fraction of its time."""
    if len(name) > 100 or size >= 8**11:
        info = tarfile.TarInfo(name)
        info.size = size
        return info.tobuf(tarfile.GNU_FORMAT)
    start = name.encode("ascii").ljust(100, b"\0") + _BEFORE_SIZE + b"%011o\0" % size + _BEFORE_CHECKSUM
    checksum = sum(start) + 8 * ord(" ") + _REST_SUM
    return b"%b%06o\0 %b" % (start, checksum, _REST)
