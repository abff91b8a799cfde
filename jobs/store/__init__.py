"""Where inputs, audio and manifests are kept: a folder or an S3 bucket behind one write-once protocol."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from jobs.store.base import ObjectInfo, ObjectStore, PutResult
from jobs.store.folder import FolderStore
from jobs.store.s3 import S3Settings, S3Store, split_s3_url
from pipelines.errors import ConfigError, ErrorCode

__all__ = ["FolderStore", "ObjectInfo", "ObjectStore", "PutResult", "S3Settings", "S3Store", "open_store"]


def open_store(url: str | Path, s3: S3Settings | None = None) -> ObjectStore:
    """Opens the store at `url`: a folder (a path or `file:///abs/dir`) or `s3://bucket/prefix`.

    Does no I/O, so a store that cannot be reached shows at its first use or in `check()`. Raises `config.invalid` for an
    address of another kind.
    """
    text = str(url)
    parts = urlsplit(text)
    if parts.scheme == "s3":
        bucket, prefix = split_s3_url(text)
        return S3Store(bucket, prefix, s3)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return FolderStore(Path(unquote(parts.path)))
    if text and "://" not in text:
        return FolderStore(Path(text))
    raise ConfigError(
        ErrorCode.CONFIG_INVALID, f"No store can be opened at {parts.scheme or text!r}.", "Use a folder, file:///DIR or s3://BUCKET/PREFIX."
    )
