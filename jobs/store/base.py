"""The interface of object stores: write-once keys, content hashes, and an identity."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from pipelines.errors import ErrorCode, StoreError

#: What is stored beside the content of an object.
Metadata = Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Facts of a stored object."""

    key: str
    bytes: int
    #: Hex SHA-256 of the content; empty in listings, because the store would have to read each object.
    sha256: str = ""
    #: Time of the write in UTC epoch seconds of the store's clock; only in listings.
    modified_at: float | None = None
    #: Whether this put created the object; False: it existed before and was kept.
    created: bool = field(default=False, compare=False)


class ObjectStore:
    """A bucket or a folder. Keys are relative POSIX paths; every method raises `StoreError` with a
    `store.*` code."""

    #: Whether requests use a network, so that concurrent requests are faster than sequential ones.
    remote: ClassVar[bool]
    url: str
    #: The local folder with each object as the file of its key; None for remote stores.
    root: Path | None = None
    #: The identity that was confirmed last; None: none was.
    _identity: str | None = None

    def establish(self, identity: str | None = None) -> str:
        """Returns the store's identity, and compares it from now on. A store without an identity gets
        `identity`, or a new one.

        Only a submit may call this, because it creates the folder of a store if it is missing.
        """
        own = (identity or secrets.token_hex(16)).encode()
        self.put(IDENTITY_KEY, own)
        found = read_identity(self.get(IDENTITY_KEY))
        if not _IDENTITY.fullmatch(found):
            # A power cut before the identity was recorded may leave a damaged object.
            self.delete(IDENTITY_KEY)
            self.put(IDENTITY_KEY, own)
            found = read_identity(self.get(IDENTITY_KEY))
        self.sync()
        self.confirm(found)
        return found

    def confirm(self, identity: str | None) -> None:
        """Checks that the store has this identity, and keeps it for later checks; None: the job has recorded
        none.

        Raises `store.unreachable` if the identity is missing or differs, for example because a folder is not
        mounted.
        """
        raise NotImplementedError

    def _compare(self, content: bytes | None, expected: str | None) -> None:
        """Compares the content of the identity's object, or None if that is missing, with the expected identity.
        Raises `store.unreachable`."""
        found = None if content is None else read_identity(content)
        if expected in (None, found):
            return
        reason = "is missing" if found is None else f"contains {found[:32]!a}"
        raise StoreError(
            ErrorCode.STORE_UNREACHABLE,
            f"The store {self.root or self.url} is not available: its file {IDENTITY_KEY} {reason}, but {expected} was expected.",
            f"Mount or restart it; the work then continues. If this is the right place, write the expected line into {IDENTITY_KEY} there.",
        )

    def put(self, key: str, data: bytes | BinaryIO, metadata: Metadata = None) -> ObjectInfo:
        """Writes once: an existing object is kept, and described with `created=False`. `data` may be an open
        file that is larger than memory; the maximum of S3 is 5 GiB.

        A bucket stores `metadata`, and a content type by the key's extension; a folder does not.
        """
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        """The whole object. Raises `store.missing`."""
        with self.open(key) as stream:
            return stream.read()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes of an object, from `offset`; fewer if it ends earlier. Raises
        `store.missing`."""
        raise NotImplementedError

    def open(self, key: str) -> BinaryIO:
        """The object as a readable stream, for large objects. Raises `store.missing`."""
        raise NotImplementedError

    def head(self, key: str) -> ObjectInfo | None:
        """The object's facts with its SHA-256, or None. If the store keeps no SHA-256, the object is
        read."""
        with missing_allowed():
            return self._facts(key)
        return None

    def _facts(self, key: str) -> ObjectInfo:
        """As `head`. Raises `store.missing`."""
        raise NotImplementedError

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order, streamed."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """Deletes an object; a missing one is not an error."""
        raise NotImplementedError

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes up to 1,000 objects, and the folders below `jobs/` that become empty; missing objects are
        not an error."""
        raise NotImplementedError

    def sync(self) -> None:
        """Returns when all objects that earlier puts wrote, or found existing, would survive a power cut.
        Must be called before the ledger refers to them."""
        raise NotImplementedError

    def uri(self, key: str) -> str:
        """The path or `s3://` address of the object, for people."""
        raise NotImplementedError

    def check(self) -> None:
        """Checks writes, reads and write-once: puts an object twice, reads it and deletes it.

        Also raises `store.conflict` if the second put replaced the object, because then a worker that lost
        its lease could overwrite good audio.
        """
        key = f"probe-{secrets.token_hex(8)}"
        first = key.encode()
        try:
            self.put(key, first)
            again = self.put(key, b"must not be kept")
            content = self.get(key)
            part = self.get_range(key, 2, 5)
            info = self.head(key)
        finally:
            self.delete(key)
        if again.created or content != first:
            wrong = "replaced an existing object"
            advice = (
                "Use a store that supports `If-None-Match: *`, such as AWS S3, SeaweedFS or a local folder."
            )
        elif part != first[2:7]:
            wrong = "returned other bytes than the requested range"
            advice = "Use a store that supports ranged reads (`Range`), or jobs without --pack."
        elif info is None or info.sha256 != sha256_of(first):
            wrong = "returned other bytes than were written"
            advice = "Check the store."
        else:
            return
        raise StoreError(ErrorCode.STORE_CONFLICT, f"The store {self.url} {wrong}.", advice)


def sha256_of(data: bytes | BinaryIO) -> str:
    """Hex SHA-256 of bytes, or of the rest of a stream."""
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    return hashlib.file_digest(cast("Any", data), "sha256").hexdigest()


@contextmanager
def missing_allowed() -> Generator[None]:
    """Ignores the error of a missing object in its block."""
    try:
        yield
    except StoreError as error:
        if error.code is not ErrorCode.STORE_MISSING:
            raise


#: S3 refuses longer keys.
MAX_KEY_BYTES = 1024
#: Most file systems refuse longer names.
MAX_SEGMENT_BYTES = 255
#: Matches nearly all valid keys, and no key that exceeds a limit.
_PLAIN = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*", re.ASCII)


def split_key(key: str) -> list[str]:
    """The segments of `key`, which is a relative POSIX path.

    Raises `store.bad_key` for empty segments (and so absolute paths), segments that begin with a dot (`..`,
    and temporary files of a folder store), backslashes, control characters, lone surrogates, and long keys.
    """
    segments = key.split("/")
    if _PLAIN.fullmatch(key):
        return segments
    # A lone surrogate is not printable either.
    if not key.isprintable() or "\\" in key:
        why = "contains a backslash or a control character"
    elif any(not segment or segment[0] == "." for segment in segments):
        why = "has an empty part or one that begins with a dot"
    elif len(key.encode()) > MAX_KEY_BYTES or any(len(one.encode()) > MAX_SEGMENT_BYTES for one in segments):
        why = f"is longer than {MAX_KEY_BYTES} bytes, or has a part longer than {MAX_SEGMENT_BYTES}"
    else:
        return segments
    raise StoreError(
        ErrorCode.STORE_BAD_KEY,
        f"The key {key[:80]!a} {why}.",
        "Keys are relative paths such as jobs/ID/audio/00000/NAME.wav.",
    )


def split_prefix(prefix: str) -> tuple[list[str], str]:
    """The folders of a listing's prefix, and the beginning of a name after the last slash."""
    folder, slash, stem = prefix.rpartition("/")
    return (split_key(folder) if slash else []), (split_key(stem)[0] if stem else "")


#: Key of the store's identity: a random line, written once, that distinguishes the store from an empty folder
#: or bucket in its place.
IDENTITY_KEY = "nightjar-store"
_IDENTITY = re.compile(r"[0-9a-f]{32}")


def read_identity(data: bytes) -> str:
    """Reads the identity from the content of its object."""
    return data[:200].decode(errors="replace").strip()
