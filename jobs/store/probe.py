"""The proof that a store can be used: written, read back and write-once."""

from __future__ import annotations

import hashlib
import secrets

from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, StoreError


def probe(store: ObjectStore) -> None:
    """Puts an object twice, reads it and removes it.

    Raises what the store raises, or `store.conflict` when the second put replaced the first: on such a store a worker that
    lost its lease could overwrite good audio.
    """
    key = f"probe-{secrets.token_hex(8)}"
    first, second = key.encode(), b"must not be kept"
    try:
        store.put(key, first)
        again = store.put(key, second)
        content, info = store.get(key), store.head(key)
    finally:
        store.delete(key)
    if again.created or content != first:
        raise StoreError(
            ErrorCode.STORE_CONFLICT,
            f"The store {store.url} replaced an object that was there.",
            "Use a store that honours `If-None-Match: *`, such as AWS S3, SeaweedFS or a local folder.",
        )
    if info is None or info.sha256 != hashlib.sha256(first).hexdigest():
        raise StoreError(ErrorCode.STORE_CONFLICT, f"The store {store.url} gave back other bytes than were put.", "Check the store.")
