"""Where inputs, audio and manifests are kept: a folder or an S3 bucket behind one write-once protocol."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jobs.store.base import ObjectInfo, ObjectStore, PutResult
from jobs.store.folder import FolderStore
from jobs.store.s3 import S3Store, split_s3_url
from pipelines.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from jobs.ledger.records import Job
    from jobs.settings import S3Settings

__all__ = [
    "FolderStore",
    "ObjectInfo",
    "ObjectStore",
    "PutResult",
    "S3Store",
    "is_remote",
    "open_store",
    "store_of",
]


def _scheme(address: str) -> str:
    return address.partition("://")[0].lower() if "://" in address else "file"


def is_remote(address: str) -> bool:
    """Whether an address leads to a remote store, such as `s3://bucket/prefix`, rather than to a file or
    folder of this host."""
    return _scheme(address) == "s3"


def open_store(url: str | Path, s3: S3Settings | None = None) -> ObjectStore:
    """Opens the store at `url`: a folder (a path or `file:///abs/dir`) or `s3://bucket/prefix`.

    Does no I/O, so a store that cannot be reached shows at its first use or in `check()`. Raises
    `config.invalid` for an address of another kind.
    """
    address = str(url)
    if is_remote(address):
        return S3Store(*split_s3_url(address), s3)
    if _scheme(address) == "file":
        return FolderStore.at(address)
    raise ConfigError(
        ErrorCode.CONFIG_INVALID,
        f"No store can be opened at {_scheme(address)!r}.",
        "Use a folder, file:///DIR or s3://BUCKET/PREFIX.",
    )


def store_of(job: Job, s3: S3Settings | None = None) -> ObjectStore:
    """The store of a job, which is there. Raises `store.unreachable` where another or none is in its
    place, and as `open_store`."""
    store = open_store(job.store_url, s3)
    store.confirm(job.store_identity)
    return store
