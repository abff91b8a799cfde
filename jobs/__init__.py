"""The producer side: command line, ingest, ledger, dispatch, store, export, report."""

from __future__ import annotations

#: The distribution that all packages of this repository are installed by.
DISTRIBUTION = "nightjar-speech"


def installed_version() -> str:
    """The version in pyproject.toml at the time of installation; `unknown` without an installation."""
    # Imported here: most commands never ask.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
