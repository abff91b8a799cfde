"""Gathers the artifacts of one leased shard into packs, and puts each pack into the store before any of
its items is done."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog
from msgspec.structs import replace

from jobs.layout import SPEC_SHA_CHARACTERS, pack_index_name, pack_key
from jobs.ledger.records import Artifact, Done
from jobs.packs import CONTENT_TYPE, PackBuilder
from jobs.store.base import ObjectStore
from jobs.times import Times
from worker.leases import Clock, HeldLease

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _OpenPack:
    """A pack that takes more items."""

    number: int
    begun_at: float
    builder: PackBuilder = field(default_factory=PackBuilder)
    #: Outcomes with the artifacts' offsets, and what waits for them.
    items: list[tuple[Done, Future[Done]]] = field(default_factory=list[tuple[Done, Future[Done]]])


@dataclass(eq=False)
class PackWriter:
    """The packs of one shard while its lease lives; safe to use from several threads.

    A pack is put when it has `pack_bytes`, when its first item has waited for `pack_seconds`, or when no
    other item of the shard is on its way. In memory are one pack that is put and one that fills; a thread
    that adds to a full one waits. A pack that was put and not committed is of no use to anyone: its items
    are made again, and the sweep removes it.
    """

    held: HeldLease
    store: ObjectStore
    times: Times
    clock: Clock
    #: Calls a function on a thread that may wait for the store.
    run: Callable[[Callable[[], None]], None]
    #: Whether so many items in the open pack are all that is on its way.
    alone: Callable[[int], bool]

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._open: _OpenPack | None = None
        self._putting = False
        self._packs = 0

    def add(self, done: Done, artifacts: Sequence[tuple[Artifact, bytes]], example_id: str) -> Future[Done]:
        """Takes the artifacts of an item, without their SHA-256, and their bytes; the future has its outcome
        once they are stored, and raises what the store raises.

        A pack that is full now is put by this call, so that a slow store slows down who adds.
        """
        stored: Future[Done] = Future()
        hashes = [hashlib.sha256(data).hexdigest() for _, data in artifacts]
        with self._changed:
            # The thread that puts the pack before this one takes the full one next.
            self._changed.wait_for(
                lambda: self._open is None or self._open.builder.bytes < self.times.pack_bytes
            )
            pack = self._open
            if pack is None:
                pack = self._open = _OpenPack(self._packs, self.clock.monotonic())
                self._packs += 1
            placed: list[Artifact] = []
            for (made, data), sha256 in zip(artifacts, hashes, strict=True):
                offset = pack.builder.add(
                    made.key, data, sha256=sha256, index=made.index, example_id=example_id
                )
                placed.append(replace(made, sha256=sha256, pack_offset=offset))
            pack.items.append((replace(done, artifacts=tuple(placed)), stored))
        self._put_due()
        return stored

    def flush_due(self) -> None:
        """Has the open pack put if it is time; does not wait for the store."""
        with self._changed:
            due = not self._putting and self._due()
        if due:
            self.run(self._put_due)

    def _put_due(self) -> None:
        """Puts the open pack if it is time, and those that are full by then; returns at once while another
        thread does."""
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
        if pack is None:
            return False
        full = pack.builder.bytes >= self.times.pack_bytes
        return (
            full
            or self.clock.monotonic() - pack.begun_at >= self.times.pack_seconds
            or self.alone(len(pack.items))
        )

    def _put(self, pack: _OpenPack) -> None:
        """Puts a pack and answers its items, each with the key of the pack in its artifacts."""
        try:
            key = self._put_bytes(pack)
        except Exception as error:  # noqa: BLE001 - handed to the items
            for _, stored in pack.items:
                stored.set_exception(error)
            return
        for done, stored in pack.items:
            stored.set_result(
                replace(done, artifacts=tuple([replace(artifact, pack=key) for artifact in done.artifacts]))
            )

    def _put_bytes(self, pack: _OpenPack) -> str:
        lease = self.held.lease
        written_by = (lease.job.id, lease.shard_no, lease.epoch, pack.number)
        data = pack.builder.finish(pack_index_name(*written_by))
        sha256 = hashlib.sha256(data).hexdigest()
        key = pack_key(*written_by, sha256)
        metadata = {"spec_sha": lease.job.spec_sha[:SPEC_SHA_CHARACTERS]}

        def put() -> None:
            result = self.store.put(key, data, content_type=CONTENT_TYPE, metadata=metadata)
            if not result.created and result.info.sha256 != sha256:
                # Only this lease writes this key, and no item of the pack is committed: what is there was
                # damaged on its way.
                self.store.delete(key)
                self.store.put(key, data, content_type=CONTENT_TYPE, metadata=metadata)

        self.held.retrying(put)
        log.debug("pack stored", key=key, items=len(pack.items), bytes=len(data))
        return key
