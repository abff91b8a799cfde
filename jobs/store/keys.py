"""What a key of the object store may look like, checked before any store sees it."""

from __future__ import annotations

import re

from pipelines.errors import ErrorCode, StoreError

#: S3 refuses longer keys.
MAX_KEY_BYTES = 1024
#: Most file systems refuse longer names.
MAX_SEGMENT_BYTES = 255
#: What nearly every key looks like; short enough for both limits.
_PLAIN = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_-][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*", re.ASCII)


def split_key(key: str) -> list[str]:
    """The segments of `key`, which is a relative POSIX path.

    Refused with `store.bad_key`: empty segments (and so absolute paths), segments that begin with a dot (`..`, and the
    names a folder store keeps for itself), backslashes, control characters, lone surrogates and what is too long.
    """
    segments = key.split("/")
    if _PLAIN.fullmatch(key):
        return segments
    try:
        sizes = [len(segment.encode()) for segment in segments]
    except UnicodeEncodeError:
        raise _bad_key(key, "is not valid Unicode") from None
    if sum(sizes) + len(sizes) - 1 > MAX_KEY_BYTES or max(sizes) > MAX_SEGMENT_BYTES:
        raise _bad_key(key, f"is longer than {MAX_KEY_BYTES} bytes, or has a part longer than {MAX_SEGMENT_BYTES}")
    if any(not segment or segment[0] == "." for segment in segments):
        raise _bad_key(key, "has an empty part or one that begins with a dot")
    if not key.isprintable() or "\\" in key:
        raise _bad_key(key, "holds a backslash or a control character")
    return segments


def split_prefix(prefix: str) -> tuple[list[str], str]:
    """The whole segments of a listing's prefix, and the beginning of a name after the last slash."""
    folder, slash, stem = prefix.rpartition("/")
    return (split_key(folder) if slash else []), (split_key(stem)[0] if stem else "")


def _bad_key(key: str, why: str) -> StoreError:
    return StoreError(
        ErrorCode.STORE_BAD_KEY, f"The key {key[:80]!a} {why}.", "Keys are relative paths such as jobs/ID/audio/00000/NAME.wav."
    )
