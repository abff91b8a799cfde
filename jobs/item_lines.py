"""The line of the input that an item came from: it stands in the item's shard in the store, not in the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.ledger.records import ItemRow
from jobs.payload import read_line_numbers
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, StoreError

if TYPE_CHECKING:
    from jobs.ledger import Ledger


class ItemLines:
    """Lines of items, which are asked for in order: one shard is in memory at a time. What the store cannot say is not known."""

    def __init__(self, ledger: Ledger, store: ObjectStore, job_id: str) -> None:
        self._store = store
        self._inputs = ledger.shard_inputs(job_id)
        self._key = ""
        self._lines: dict[int, int] = {}
        #: Why lines are not known, once some are not.
        self.failure: StoreError | None = None

    def line_of(self, item: ItemRow) -> int | None:
        """The number of the item's line; None where the store has lost it or cannot be reached."""
        key, sha256 = self._inputs[item.shard_no]
        if key != self._key and not self._away:
            self._key, self._lines = key, {}
            try:
                self._lines = read_line_numbers(self._store, key, sha256)
            except StoreError as error:
                self.failure = error
        return self._lines.get(item.index) if key == self._key else None

    @property
    def _away(self) -> bool:
        """Whether the store itself failed: waiting for that once is enough."""
        return self.failure is not None and self.failure.code not in (ErrorCode.STORE_MISSING, ErrorCode.STORE_CONFLICT)
