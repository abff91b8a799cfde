"""The format `webdataset`: tar files in which the members of an item stand together under one name.

    train/shard-000000.tar: 000000000-utt1.wav  000000000-utt1.json  000000000-utt1.txt  000000001-utt2.wav  ...

Source: https://github.com/webdataset/webdataset: what comes before the first dot of a name is the key of an example.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO

import msgspec

from jobs.export.files import PartFiles
from jobs.export.items import MadeItem, facts
from jobs.export.plan import Part
from jobs.ledger.records import Job

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


def write_webdataset(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[MadeItem, bytes]]) -> None:
    """One tar file."""
    file = files.open(f"{part.split}/shard-{part.number:06d}.tar")
    for item, audio in items:
        known = facts(job, item)
        artifact = item.artifact
        about = {
            "example_id": item.example_id,
            "index": artifact.index,
            "text": known.text,
            "role": known.role,
            "message_index": known.message_index,
            "speaker": known.speaker,
            "language": known.language,
            "sample_rate": artifact.sample_rate,
            "samples": artifact.samples,
            "duration": round(item.seconds, 6),
            "seed": artifact.seed,
            "sha256": artifact.sha256,
            "spec_sha": job.spec_sha,
        }
        write_member(file, f"{item.name}.{item.extension}", audio)
        write_member(file, f"{item.name}.json", msgspec.json.encode(about))
        write_member(file, f"{item.name}.txt", known.text.encode())
    write_end(file)
