"""Collects the artifacts of one leased shard in packs (tar archives), and stores each pack before its items count as
done."""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog
from msgspec.structs import replace

from jobs.layout import SPEC_SHA_CHARACTERS, pack_index_name, pack_key, put_hashed
from jobs.ledger.records import Artifact, Done
from jobs.store.base import ObjectStore, sha256_of
from jobs.times import Times
from worker.leases import Clock, HeldLease

log = structlog.get_logger(__name__)

_BLOCK_BYTES = tarfile.BLOCKSIZE


class PackMember(msgspec.Struct, frozen=True):
    """One line of a pack's index."""

    #: The member's name: the key that it would have as a separate object.
    key: str
    #: Offset of the member's data in the pack.
    offset: int
    bytes: int
    sha256: str
    #: Index and example id of its item.
    index: int
    example_id: str


class PackBuilder:
    """Builds one pack in memory. Equal members give equal bytes, because the owner is always 0 and the date 1970."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._members: list[PackMember] = []
        #: Size in bytes so far.
        self.bytes = 0

    def add(self, one: Artifact, data: bytes, example_id: str) -> int:
        """Adds an artifact with its data. Returns the offset of the data in the pack."""
        offset = self._append(one.key, data)
        self._members.append(PackMember(one.key, offset, len(data), one.sha256, one.index, example_id))
        return offset

    def finish(self, index_name: str) -> bytes:
        """The complete pack, with its index as the last member. The builder cannot be used again."""
        self._append(index_name, msgspec.json.Encoder().encode_lines(self._members))
        # The end of an archive: two empty blocks.
        self._chunks.append(bytes(2 * _BLOCK_BYTES))
        whole = b"".join(self._chunks)
        # So that only one copy is in memory during the put.
        self._chunks.clear()
        return whole

    def _append(self, name: str, data: bytes) -> int:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        # The header has several blocks if the name is not ASCII or too long for the old format.
        header = member.tobuf(tarfile.PAX_FORMAT)
        padding = bytes(-len(data) % _BLOCK_BYTES)
        self._chunks += (header, data, padding)
        offset = self.bytes + len(header)
        self.bytes = offset + len(data) + len(padding)
        return offset


@dataclass(slots=True)
class _OpenPack:
    """A pack that is not yet full."""

    number: int
    started_at: float
    builder: PackBuilder = field(default_factory=PackBuilder)
    #: Outcomes, with offsets in their artifacts, and the futures of their results.
    items: list[tuple[Done, Future[Done]]] = field(default_factory=list)


@dataclass
class PackWriter:
    """Writes the packs of one shard under its lease; thread-safe.

    A pack is stored when it has `pack_bytes`, when its first item has waited for `pack_seconds`, or when no other items
    of the shard are in progress. At most two packs are in memory: one that is being stored and one that is being
    filled; a thread that adds to a full pack waits. If a pack was stored but its items were not committed, they are
    synthesized again, and the sweep deletes the pack.
    """

    held: HeldLease
    store: ObjectStore
    times: Times
    clock: Clock
    #: Runs a function on a thread that may wait for the store.
    run: Callable[[Callable[[], None]], object]
    #: Whether all items in progress are in the open pack and no others will follow. The argument is the number of items
    #: in this pack.
    are_last: Callable[[int], bool]

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._open: _OpenPack | None = None
        self._putting = False
        self._packs = 0

    def add(self, done: Done, artifacts: Sequence[tuple[Artifact, bytes]], example_id: str) -> Future[Done]:
        """Adds the artifacts of an item, whose SHA-256 is not yet set, with their data. The future gets the outcome once
        they are stored, or the error of the store.

        If the pack is then full, this call stores it, so that a slow store slows down its callers.
        """
        stored = Future[Done]()
        hashed = [(replace(one, sha256=sha256_of(data)), data) for one, data in artifacts]
        with self._changed:
            # The thread that stores the previous pack stores the full one next.
            self._changed.wait_for(
                lambda: self._open is None or self._open.builder.bytes < self.times.pack_bytes
            )
            pack = self._open
            if pack is None:
                pack = self._open = _OpenPack(self._packs, self.clock.monotonic())
                self._packs += 1
            placed: list[Artifact] = []
            for one, data in hashed:
                placed.append(replace(one, pack_offset=pack.builder.add(one, data, example_id)))
            pack.items.append((replace(done, artifacts=tuple(placed)), stored))
        self._put_due()
        return stored

    def flush_due(self) -> None:
        """Starts to store the open pack if it is due, and does not wait for the end."""
        with self._changed:
            due = not self._putting and self._due()
        if due:
            self.run(self._put_due)

    def _put_due(self) -> None:
        """Stores the open pack if it is due, and packs that become due meanwhile. Returns at once if another thread is
        storing."""
        while True:
            with self._changed:
                pack = self._open
                if self._putting or pack is None or not self._due():
                    return
                self._open, self._putting = None, True
            try:
                self._put(pack)
            finally:
                with self._changed:
                    self._putting = False
                    self._changed.notify_all()

    def _due(self) -> bool:
        pack = self._open
        return pack is not None and (
            pack.builder.bytes >= self.times.pack_bytes
            or self.clock.monotonic() - pack.started_at >= self.times.pack_seconds
            or self.are_last(len(pack.items))
        )

    def _put(self, pack: _OpenPack) -> None:
        """Stores a pack and sets the futures of its items to their outcomes, with the key of the pack in each artifact."""
        lease = self.held.lease
        written_by = (lease.job.id, lease.shard_no, lease.epoch, pack.number)
        metadata = {"spec_sha": lease.job.spec_sha[:SPEC_SHA_CHARACTERS]}
        try:
            data = pack.builder.finish(pack_index_name(*written_by))
            sha256 = sha256_of(data)
            key = pack_key(*written_by, sha256)
            self.held.retrying(partial(put_hashed, self.store, key, data, sha256, metadata))
        except Exception as error:  # noqa: BLE001 - passed to the items
            for _, stored in pack.items:
                stored.set_exception(error)
            return
        log.debug("pack stored", key=key, items=len(pack.items), bytes=len(data))
        for done, stored in pack.items:
            stored.set_result(
                replace(done, artifacts=tuple([replace(artifact, pack=key) for artifact in done.artifacts]))
            )
