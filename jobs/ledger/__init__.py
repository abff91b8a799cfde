"""The ledger: jobs, shards, items, artifacts and workers in one database, and the protocol that makes
effects exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.ledger.ingest import DuplicateExamples
    from jobs.ledger.ledger import Ledger

__all__ = ["DuplicateExamples", "Ledger"]


def __getattr__(name: str) -> Any:
    """Imports SQLAlchemy only for those who use the ledger itself: `nightjar status` reads its records
    without."""
    if name == "Ledger":
        from jobs.ledger.ledger import Ledger

        return Ledger
    if name == "DuplicateExamples":
        from jobs.ledger.ingest import DuplicateExamples

        return DuplicateExamples
    raise AttributeError(name)
