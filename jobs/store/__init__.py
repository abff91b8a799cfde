"""Stores of inputs, audio and manifests: a folder or an S3 bucket with one write-once protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from jobs.formatting import redact
from jobs.ledger.records import Job
from jobs.settings import S3Settings
from jobs.store.base import ObjectInfo, ObjectStore
from jobs.store.folder import FolderStore
from jobs.store.s3 import S3Store, split_s3_url
from pipelines.errors import invalid

if TYPE_CHECKING:
    from jobs.ledger import Ledger

__all__ = [
    "FolderStore",
    "ObjectInfo",
    "ObjectStore",
    "S3Store",
    "StoredJob",
    "is_remote",
    "open_store",
    "store_of",
]


class StoredJob(NamedTuple):
    """A job with the ledger and the store that have it."""

    ledger: Ledger
    store: ObjectStore
    job: Job


def is_remote(address: str) -> bool:
    """Whether an address is that of a remote store, such as `s3://bucket/prefix`, and not of a local file or
    folder."""
    return address.lower().startswith("s3://")


def open_store(url: str | Path, s3: S3Settings | None = None) -> ObjectStore:
    """Opens the store at `url`: a folder (a path or `file:///abs/dir`) or `s3://bucket/prefix`.

    Does no I/O, so an unreachable store causes an error only at its first use or in `check()`. Raises
    `config.invalid` for any other address.
    """
    address = str(url)
    if is_remote(address):
        return S3Store(*split_s3_url(address), s3)
    path = "" if "://" in address else address
    if address.lower().startswith("file:"):
        parts = urlsplit(address)
        path = unquote(parts.path) if parts.netloc in ("", "localhost") else ""
    if not path:
        raise invalid(
            f"No store can be opened at {redact(address)[:200]!r}.",
            "Use a folder, file:///DIR or s3://BUCKET/PREFIX.",
        )
    return FolderStore(Path(path))


def store_of(job: Job, s3: S3Settings) -> ObjectStore:
    """The store of a job, with its identity confirmed. Raises `store.unreachable` if it is missing or another
    store is in its place, and the errors of `open_store`."""
    store = open_store(job.store_url, s3)
    store.confirm(job.store_identity)
    return store
