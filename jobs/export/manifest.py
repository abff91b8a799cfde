"""The format `manifest`: the lines of `jobs.manifest`, with what was measured of each item. The store's manifests are without that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from jobs.export.formats import ExportFormat
from jobs.export.items import AudioItem, AudioItems, ItemMetadata, item_metadata, origin
from jobs.ledger.records import Job
from jobs.manifest import ManifestEntry, Spoken, entry, put_job_manifest
from jobs.store.base import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from jobs.ledger import Ledger


def manifest_entry(job: Job, item: AudioItem, known: ItemMetadata) -> ManifestEntry:
    """The line of an item in the store's manifest."""
    return entry(item.example_id, item.artifact, job.spec_sha, Spoken(known.text, known.role, known.message_index))


def manifest_line(job: Job, item: AudioItem, where: str) -> bytes:
    """One line of JSON; `key` names the audio in the store, so `where` is not used."""
    known = item_metadata(job, item)
    line: dict[str, Any] = msgspec.to_builtins(manifest_entry(job, item, known))
    return msgspec.json.encode(line | origin(job, item, known)) + b"\n"


MANIFEST = ExportFormat(name="manifest", summary="our own manifest", item_line=manifest_line, names_audio=False)


def put_manifest(ledger: Ledger, store: ObjectStore, job_id: str) -> ObjectInfo:
    """Writes the manifest of a job into its store, see `jobs.manifest.put_job_manifest`; the ledger notes it if the job has ended."""
    job = ledger.job(job_id)
    info = put_job_manifest(store, job, (manifest_entry(job, item, item_metadata(job, item)) for item in AudioItems(ledger, store, job_id)))
    if job.state.final:
        ledger.note_manifest(job)
    return info
