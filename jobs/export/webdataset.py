"""The format `webdataset`: tar files in which the members of an item stand together under one name.

    train/shard-000000.tar: 000000000-utt1.wav  000000000-utt1.json  000000000-utt1.txt  000000001-utt2.wav  ...

Source: https://github.com/webdataset/webdataset: what comes before the first dot of a name is the key of an example.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from jobs.export.files import PartFiles
from jobs.export.made import MadeItem, facts
from jobs.export.plan import Part
from jobs.export.tars import write_end, write_member
from jobs.ledger.records import Job


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
