"""Packs: tar files with the audio and texts of many items, for stores that charge or throttle per object.
Workers write them (`worker.pack_writer`); this module reads them.

    jobs/ID/packs/000003-1-0-9f86d081884c7d65.tar
        jobs/ID/audio/00000/000000512-talk.flac     each member is named as a separate object would be
        jobs/ID/audio/00000/000000513-ask.flac
        jobs/ID/packs/000003-1-0.jsonl              last: the offsets of the others, as JSON lines

The format is POSIX.1-2001 (pax), as read by `tar` and `tarfile`. Unpacked at the root of a folder store,
members are where they would be without packs. The ledger has the offset of each member, so reading one item
takes one ranged request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, StoreError
from pipelines.recording import SizedCache

if TYPE_CHECKING:
    from jobs.ledger.records import Artifact
    from jobs.verify import Expected

    StoredArtifact = Artifact | Expected

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_artifact(
    store: ObjectStore, artifact: StoredArtifact, get_range: Callable[[str, int, int], bytes] | None = None
) -> bytes:
    """The bytes of an artifact, a separate object or a member of a pack, without a check of its hash. `get_range`:
    reads packs instead of the store.

    Raises `store.missing`, and `store.conflict` for a pack that is too short.
    """
    if artifact.pack is None or artifact.pack_offset is None or artifact.bytes is None:
        return store.get(artifact.key)
    data = (get_range or store.get_range)(artifact.pack, artifact.pack_offset, artifact.bytes)
    if len(data) != artifact.bytes:
        raise StoreError(
            ErrorCode.STORE_CONFLICT,
            f"The pack {artifact.pack} ends before the end of its member {artifact.key}.",
            "Repair it with: nightjar verify JOB --repair",
        )
    return data


#: Bytes of a piece. Reading them takes about as long as the request itself; a pack of the usual size has four
#: pieces.
PIECE_BYTES = 4 << 20
#: Number of pieces in the cache. Items are read in index order but stored in the order in which the engine
#: finished them, so neighbours may be a few pieces apart.
KEPT_PIECES = 16


class ArtifactReader:
    """Reads many artifacts of one store like `read_artifact`; thread-safe.

    Packs in a remote store are read in large pieces. The most recently used pieces are kept, so that
    neighbouring items need only one request.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        #: The pieces by (pack, number).
        self._pieces = SizedCache[bytes](KEPT_PIECES * PIECE_BYTES, len)

    def read(self, artifact: StoredArtifact) -> bytes:
        """The bytes of an artifact. Raises the errors of `read_artifact`."""
        return read_artifact(self._store, artifact, self._range if self._store.remote else None)

    def _range(self, pack: str, begin: int, size: int) -> bytes:
        """As `ObjectStore.get_range`, from pieces."""
        first = begin // PIECE_BYTES
        found: list[bytes] = []
        for number in range(first, -(-(begin + size) // PIECE_BYTES)):
            read = partial(self._store.get_range, pack, number * PIECE_BYTES, PIECE_BYTES)
            found.append(self._pieces.find((pack, number), read))
        return b"".join(found)[begin - first * PIECE_BYTES :][:size]


def map_ahead(
    start: Callable[[Item], Future[Result]],
    items: Iterable[Item],
    max_items: int,
    size: Callable[[Item], int] = lambda _: 0,
    max_bytes: int = 0,
) -> Iterator[tuple[Item, Result]]:
    """Yields each item with its result, in order. Up to `max_items` are started ahead, of up to `max_bytes` in total by
    `size`."""
    waiting = deque[tuple[Item, Future[Result]]]()
    total = 0
    for item in items:
        while waiting and (len(waiting) >= max_items or total + size(item) > max_bytes):
            first, future = waiting.popleft()
            total -= size(first)
            yield first, future.result()
        waiting.append((item, start(item)))
        total += size(item)
    for first, future in waiting:
        yield first, future.result()
