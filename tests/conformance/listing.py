"""Cases of a conformance run, and what becomes of a folder whose cases cannot all be listed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

#: A name, and a check that raises AssertionError with the measured difference.
Case = tuple[str, Callable[[], None]]


def listed(what: str, found: Iterator[Case]) -> Iterator[Case]:
    """These cases; when their list breaks off, a last one that fails with the reason."""
    try:
        yield from found
    except Exception as error:  # noqa: BLE001 - a folder with one bad entry is still to be checked against the others
        message = f"{type(error).__name__}: {error}"

        def broken() -> None:
            raise AssertionError(f"the cases cannot be listed: {message}")

        yield f"list of {what}", broken
