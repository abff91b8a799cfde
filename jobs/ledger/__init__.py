"""The ledger: jobs, shards, items, artifacts and workers in one database, with the protocol that commits each
result exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.ledger.ledger import Ledger

__all__ = ["Ledger"]


def __getattr__(name: str) -> Any:
    """Imports SQLAlchemy only when the ledger itself is used: `nightjar status` needs only its records."""
    if name != "Ledger":
        raise AttributeError(name)
    from jobs.ledger.ledger import Ledger

    return Ledger
