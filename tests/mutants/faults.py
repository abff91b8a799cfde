"""The list of planted faults: one TOML file a room, one table a fault."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]


class BadFaultError(Exception):
    """A fault that cannot be planted: the code it names has changed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One edit of one file, and the tests of which at least one has to fail with it."""

    name: str
    #: The product's file, from the repository's root.
    file: str
    #: Stands in the file exactly once.
    old: str
    new: str
    #: Test files or node ids, as pytest takes them.
    tests: tuple[str, ...]

    @property
    def project(self) -> str:
        """The folder of the distribution whose environment its tests run in; empty: the repository's own."""
        parts = self.tests[0].split("/")
        return "/".join(parts[:2]) if parts[0] == "integrations" else ""

    def planted(self, source: str) -> str:
        """The file's text with the fault. Raises `BadFaultError` where it cannot be planted."""
        found = source.count(self.old)
        if found != 1:
            raise BadFaultError(
                f"{self.name}: its text stands {found} times in {self.file}; it must stand there once."
            )
        if self.old == self.new:
            raise BadFaultError(f"{self.name}: it changes nothing.")
        return source.replace(self.old, self.new)


def read_faults(folder: Path = FOLDER) -> list[Fault]:
    """Every fault, in the order of the files' names. Raises `BadFaultError` for two of one name."""
    faults: dict[str, Fault] = {}
    for path in sorted(folder.glob("*.toml")):
        for name, table in tomllib.loads(path.read_text()).items():
            if name in faults:
                raise BadFaultError(f"Two faults are called {name}.")
            faults[name] = Fault(name, table["file"], table["old"], table["new"], tuple(table["tests"]))
    return list(faults.values())


def of_the_day(faults: list[Fault], day: int, count: int) -> list[Fault]:
    """`count` faults of mixed rooms; another day's are others, until all had their turn."""
    mixed = sorted(faults, key=lambda fault: hashlib.sha256(fault.name.encode()).digest())
    start = day * count
    return [mixed[(start + offset) % len(mixed)] for offset in range(min(count, len(mixed)))]
