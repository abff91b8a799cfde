"""The format `manifest`: the lines of `jobs.manifest`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from jobs.export.made import MadeItem, MadeItems, facts
from jobs.ledger.records import Job
from jobs.manifest import ManifestEntry, entry, put_job_manifest
from jobs.store.base import ObjectInfo, ObjectStore

if TYPE_CHECKING:
    from jobs.ledger import Ledger


def manifest_entry(job: Job, item: MadeItem) -> ManifestEntry:
    """The manifest's line of an item."""
    return entry(item.example_id, item.artifact, job.spec_sha, facts(job, item).text)


def manifest_line(job: Job, item: MadeItem, where: str) -> bytes:
    """One line of JSON, as in the store's manifests; `where` does not matter, since `key` names the audio in the store."""
    return msgspec.json.encode(manifest_entry(job, item)) + b"\n"


def put_manifest(ledger: Ledger, store: ObjectStore, job_id: str) -> ObjectInfo:
    """Writes the manifest of a job into its store, see `jobs.manifest.put_job_manifest`."""
    job = ledger.job(job_id)
    return put_job_manifest(store, job, (manifest_entry(job, item) for item in MadeItems(ledger, store, job_id)))
