"""A file that appears complete or not at all."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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
