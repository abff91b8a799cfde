"""Sorting more lines than fit into memory."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

_RUN_BYTES = 32 << 20


class SortedLines:
    """Takes lines in any order and gives them back in the order of their bytes (the C locale's); sorted runs lie in `folder`."""

    def __init__(self, folder: Path, run_bytes: int = _RUN_BYTES) -> None:
        self._folder = folder
        self._run_bytes = run_bytes
        self._lines: list[bytes] = []
        self._bytes = 0
        self._runs: list[Path] = []

    def add(self, line: bytes) -> None:
        """`line` ends with its only newline."""
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= self._run_bytes:
            self._spill()

    def __iter__(self) -> Iterator[bytes]:
        if not self._runs:
            self._lines.sort()
            return iter(self._lines)
        if self._lines:
            self._spill()
        return self._merged()

    def _spill(self) -> None:
        self._lines.sort()
        path = self._folder / f"run-{len(self._runs):06d}"
        with path.open("wb") as file:
            file.writelines(self._lines)
        self._runs.append(path)
        self._lines, self._bytes = [], 0

    def _merged(self) -> Generator[bytes, None, None]:
        with ExitStack() as stack:
            yield from heapq.merge(*(stack.enter_context(path.open("rb")) for path in self._runs))
