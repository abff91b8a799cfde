"""A dataset of one file that is written again and again: written over only where it is still what was written there before.

Beside the file `NAME`, `.NAME.export.json` says which job's it is, with its hash.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from jobs.export.output import output, output_error
from pipelines.errors import ConfigError, ErrorCode


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
