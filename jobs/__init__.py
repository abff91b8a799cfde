"""The producer side: command line, ingest, ledger, dispatch, store, export, report."""

from __future__ import annotations

#: Name of the distribution that contains all packages of this repository.
DISTRIBUTION = "nightjar-speech"


def installed_version(distribution: str = DISTRIBUTION) -> str | None:
    """The version of a distribution; None if it is not installed."""
    # Imported here, because most commands do not need the version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
