"""The ledger: jobs, shards, items, artifacts and workers in one database, and the protocol that makes
effects exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.ledger.ledger import Ledger

__all__ = ["Ledger"]


def __getattr__(name: str) -> Any:
    """Imports SQLAlchemy only for those who use the ledger itself: `nightjar status` reads its records
    without."""
    if name != "Ledger":
        raise AttributeError(name)
    from jobs.ledger.ledger import Ledger

    return Ledger
