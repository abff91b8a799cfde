"""Cases of a conformance run, their files, and what becomes of a folder whose cases cannot all be listed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.golden_arrays import Arrays, read_arrays

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


class Files:
    """The arrays of a golden folder whose cases name their `file` and list its `arrays`."""

    def __init__(self, folder: Path) -> None:
        self.read = cache(lambda file: Arrays(read_arrays(folder / file)))
        self._checked: list[dict[str, Any]] = []

    def __call__(self, file: str) -> Arrays:
        return self.read(file)

    def check(self, case: dict[str, Any]) -> None:
        """Raises AssertionError where the case's file lacks an array that the case lists."""
        if "file" in case:
            self.read(case["file"]).check_listed(case["arrays"])
            self._checked.append(case)

    def report(self) -> None:
        """Prints the arrays of checked cases that nothing was compared with."""
        for case in self._checked:
            for key in case["arrays"].keys() - self.read(case["file"]).seen:
                print(f"not compared: {key} of {case['name']}")
