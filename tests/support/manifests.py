"""Manifests in a store, read back."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from jobs.export.manifest import ManifestEntry
from jobs.layout import job_manifest_key, numbered_key
from jobs.store import ObjectStore


def newest_job_manifest(store: ObjectStore, job_id: str) -> str | None:
    """Key of the manifest that was written last, or None."""
    number = 0
    while store.head(numbered_key(job_manifest_key(job_id), number + 1)) is not None:
        number += 1
    return numbered_key(job_manifest_key(job_id), number) if number else None


def read_manifest(store: ObjectStore, key: str) -> Iterator[ManifestEntry]:
    """The lines of a manifest."""
    return (msgspec.json.decode(line, type=ManifestEntry) for line in store.get(key).splitlines())
