"""The object store as the rest of the house sees it: write-once keys, content hashes, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store knows of an object."""

    key: str
    bytes: int
    #: Hex SHA-256 of the content; empty where the store would have to read the object to know it (listings).
    sha256: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    #: When it was written, UTC epoch seconds of the store's clock; known of what a listing finds.
    modified_at: float | None = None


@dataclass(frozen=True, slots=True)
class PutResult:
    """The object that now stands under the key; `created` is False when it was there before and was kept."""

    info: ObjectInfo
    created: bool


class ObjectStore(Protocol):
    """A bucket or a folder. Keys are relative POSIX paths; every method raises `StoreError` with a `store.*` code."""

    url: str

    def put(
        self, key: str, data: bytes, *, content_type: str = "application/octet-stream", metadata: Mapping[str, str] | None = None
    ) -> PutResult:
        """Writes once: if the key exists its object stays as it is and is described with `created=False`."""
        ...

    def put_file(
        self, key: str, path: Path, *, content_type: str = "application/octet-stream", metadata: Mapping[str, str] | None = None
    ) -> PutResult:
        """As `put`, with the content of a local file that may be larger than memory."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises `store.missing`."""
        ...

    def open(self, key: str) -> BinaryIO:
        """The object as a readable stream, for what may be large. Raises `store.missing`."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """The object's facts with its SHA-256, or None."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order, streamed."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; a missing one is no error."""
        ...

    def sync(self) -> None:
        """What was put by now, or found there by a put, survives a power cut; to be called before the ledger names it."""
        ...

    def uri(self, key: str) -> str:
        """Where a person finds the object: a path or an `s3://` address."""
        ...

    def check(self) -> None:
        """Proves that the store can be written, read and honours write-once, with a probe object. Raises `StoreError`."""
        ...
