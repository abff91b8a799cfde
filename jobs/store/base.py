"""What every object store is: write-once keys, content hashes, an identity, nothing else."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from pipelines.errors import ErrorCode, StoreError

#: The type of an object that says nothing else.
BYTES = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store knows of an object."""

    key: str
    bytes: int
    #: Hex SHA-256 of the content; empty where the store would have to read the object to know it (listings).
    sha256: str = ""
    #: When it was written, UTC epoch seconds of the store's clock; known of what a listing finds.
    modified_at: float | None = None


@dataclass(frozen=True, slots=True)
class PutResult:
    """The object that now stands under the key; `created` is False when it was there before and was kept."""

    info: ObjectInfo
    created: bool


class ObjectStore:
    """A bucket or a folder. Keys are relative POSIX paths; every method raises `StoreError` with a
    `store.*` code."""

    #: Whether each request goes over a network, so that several at once are faster than one after the other.
    remote: ClassVar[bool]
    url: str
    #: The local folder in which every object is the file of its key; None where there is none.
    root: Path | None

    def establish(self, identity: str | None = None) -> str:
        """The store's identity, which is compared from here on. A store without one gets `identity`, or a
        new one.

        For a submit. Nothing else makes the folder of a store that is not there.
        """
        own = (identity or secrets.token_hex(16)).encode()
        self.put(IDENTITY_KEY, own)
        found = read_identity(self.get(IDENTITY_KEY))
        if not _IDENTITY.fullmatch(found):
            # What a power cut leaves of it before it is recorded anywhere.
            self.delete(IDENTITY_KEY)
            self.put(IDENTITY_KEY, own)
            found = read_identity(self.get(IDENTITY_KEY))
        self.sync()
        self.confirm(found)
        return found

    def confirm(self, identity: str | None) -> None:
        """Proves that the store has this identity, with which each later doubt is settled; None: its job
        has recorded none.

        Raises `store.unreachable` where it is missing or another one: the store is away.
        """
        raise NotImplementedError

    def put(
        self,
        key: str,
        data: bytes | BinaryIO,
        *,
        content_type: str = BYTES,
        metadata: Mapping[str, str] | None = None,
    ) -> PutResult:
        """Writes once: if the key exists its object stays as it is and is described with `created=False`.
        `data` may be an open file that is larger than memory; S3 takes a maximum of 5 GiB.

        A bucket shows `content_type` and `metadata` beside the object; a folder has no place for them.
        """
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        """The whole object. Raises `store.missing`."""
        with self.open(key) as stream:
            return stream.read()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes of an object from `offset` on; fewer where it ends before. Raises
        `store.missing`."""
        raise NotImplementedError

    def open(self, key: str) -> BinaryIO:
        """The object as a readable stream, for what may be large. Raises `store.missing`."""
        raise NotImplementedError

    def head(self, key: str) -> ObjectInfo | None:
        """The object's facts with its SHA-256, or None. Where the store keeps no SHA-256 the object is
        read to know it."""
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
        """Removes an object; a missing one is no error."""
        raise NotImplementedError

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes up to 1,000 objects, and in a folder the folders below `jobs/` that become empty;
        missing ones are no error."""
        raise NotImplementedError

    def sync(self) -> None:
        """What was put by now, or found there by a put, survives a power cut; to be called before the
        ledger names it."""
        raise NotImplementedError

    def uri(self, key: str) -> str:
        """Where a person finds the object: a path or an `s3://` address."""
        raise NotImplementedError

    def check(self) -> None:
        """Proves that the store can be written, read and honours write-once: puts an object twice, reads
        it and removes it.

        Raises also `store.conflict` when the second put replaced the first: on such a store a worker that
        lost its lease could overwrite good audio.
        """
        key = f"probe-{secrets.token_hex(8)}"
        first = key.encode()
        try:
            self.put(key, first)
            again = self.put(key, b"must not be kept")
            content, part, info = self.get(key), self.get_range(key, 2, 5), self.head(key)
        finally:
            self.delete(key)
        wrong = advice = ""
        if again.created or content != first:
            wrong = "replaced an object that was there"
            advice = (
                "Use a store that honours `If-None-Match: *`, such as AWS S3, SeaweedFS or a local folder."
            )
        elif part != first[2:7]:
            wrong = "gave other bytes than the range that was asked for"
            advice = "Use a store that honours ranged reads (`Range`), or jobs without --pack."
        elif info is None or info.sha256 != hashlib.sha256(first).hexdigest():
            wrong, advice = "gave back other bytes than were put", "Check the store."
        if wrong:
            raise StoreError(ErrorCode.STORE_CONFLICT, f"The store {self.url} {wrong}.", advice)


def sha256_of(data: bytes | BinaryIO) -> str:
    """Hex SHA-256 of bytes, or of what is left of a stream."""
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    return hashlib.file_digest(cast("Any", data), "sha256").hexdigest()


@contextmanager
def missing_allowed() -> Generator[None, None, None]:
    """Ends its block at an object that is missing."""
    try:
        yield
    except StoreError as error:
        if error.code is not ErrorCode.STORE_MISSING:
            raise


#: S3 refuses longer keys.
MAX_KEY_BYTES = 1024
#: Most file systems refuse longer names.
MAX_SEGMENT_BYTES = 255
#: What nearly every key looks like; short enough for both limits.
_PLAIN = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*", re.ASCII)


def split_key(key: str) -> list[str]:
    """The segments of `key`, which is a relative POSIX path.

    Refused with `store.bad_key`: empty segments (and so absolute paths), segments that begin with a dot
    (`..`, and the names a folder store keeps for itself), backslashes, control characters, lone surrogates
    and what is too long.
    """
    segments = key.split("/")
    if _PLAIN.fullmatch(key):
        return segments
    # A lone surrogate cannot be printed either.
    if not key.isprintable() or "\\" in key:
        why = "holds a backslash or a control character"
    elif any(not segment or segment[0] == "." for segment in segments):
        why = "has an empty part or one that begins with a dot"
    elif (
        max(len(key.encode()) - MAX_KEY_BYTES, *(len(one.encode()) - MAX_SEGMENT_BYTES for one in segments))
        > 0
    ):
        why = f"is longer than {MAX_KEY_BYTES} bytes, or has a part longer than {MAX_SEGMENT_BYTES}"
    else:
        return segments
    advice = "Keys are relative paths such as jobs/ID/audio/00000/NAME.wav."
    raise StoreError(ErrorCode.STORE_BAD_KEY, f"The key {key[:80]!a} {why}.", advice)


def split_prefix(prefix: str) -> tuple[list[str], str]:
    """The whole segments of a listing's prefix, and the beginning of a name after the last slash."""
    folder, slash, stem = prefix.rpartition("/")
    return (split_key(folder) if slash else []), (split_key(stem)[0] if stem else "")


#: Key of a store's identity: a random line, written once, by which a store is told from an empty folder or
#: bucket in its place.
IDENTITY_KEY = "nightjar-store"
_IDENTITY = re.compile(r"[0-9a-f]{32}")


def read_identity(data: bytes) -> str:
    """The identity that an object holds."""
    return data[:200].decode(errors="replace").strip()


def store_away(where: str, found: str | None, expected: str) -> StoreError:
    """The error of a place that has not the identity of the store that should be there."""
    reason = "is not there" if found is None else f"says {found[:32]!a}"
    return StoreError(
        ErrorCode.STORE_UNREACHABLE,
        f"The store {where} is away: its file {IDENTITY_KEY} {reason}, and {expected} is expected.",
        f"Mount it or start it again; the work continues. If it is the right place, write that line into {IDENTITY_KEY} there.",
    )
