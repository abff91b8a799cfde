"""The format `webdataset`: tar files in which the members of an item stand together under one name.

    train/shard-000000.tar: 000000000-utt1.wav  000000000-utt1.json  000000000-utt1.txt  000000001-utt2.wav  ...

Source: https://github.com/webdataset/webdataset: what comes before the first dot of a name is the key of an example.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import IO

import msgspec

from jobs.export.files import PartFiles
from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, item_metadata, origin
from jobs.export.plan import Part
from jobs.ledger.records import Job


@contextmanager
def tar_file(file: IO[bytes]) -> Generator[Callable[[str, bytes], None], None, None]:
    """A tar archive in `file`; yields the function that adds a member. Equal members give equal bytes: user 0, dated 1970."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
            # The archive would keep every member in memory.
            archive.members = []  # type: ignore[attr-defined]

        yield add


def write_webdataset(part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, bytes]]) -> None:
    """One tar file."""
    with tar_file(files.open(f"{part.split}/shard-{part.number:06d}.tar")) as add:
        for item, audio in items:
            known = item_metadata(job, item)
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
                "sha256": artifact.sha256,
                "spec_sha": job.spec_sha,
                **origin(job, item, known),
            }
            add(f"{item.name}.{item.extension}", audio)
            add(f"{item.name}.json", msgspec.json.encode(about))
            add(f"{item.name}.txt", known.text.encode())


WEBDATASET = ExportFormat(name="webdataset", summary="tar files of audio, JSON and text", write_part=write_webdataset, embeds_audio=True)
