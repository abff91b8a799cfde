"""What the soak asks of an installation that is tormented, and what its installations have in common."""

from __future__ import annotations

import os
import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from jobs.ledger import Ledger
from jobs.store.base import ObjectStore
from tests.faults.cluster import patiently

Fault = Callable[[random.Random], object]

#: After so long without an answer the frozen engine's worker calls it stuck; the freeze is longer.
STUCK_SECONDS, ENGINE_FROZEN_SECONDS = 2.0, 5.0
#: For inputs to stay wrong while nobody reads them.
FLIPPED_SECONDS = 8.0


class Site(Protocol):
    """An installation with one job. Its faults are over when they return, or heal by themselves."""

    #: Set by `begin`.
    job: str
    #: Jobs that had ended before the faults, with their texts.
    ended: Mapping[str, Mapping[str, str]]
    #: What the faults reached: requests that were refused, items that the ledger forgot.
    effects: Counter[str]
    #: What a person had to be told and was not.
    untold: list[str]

    def begin(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        """Submits one dialogue a text, by its id, and returns them as they went in: the first one waits
        for `let_go`."""
        ...

    def faults(self) -> Mapping[str, Fault]:
        """The kinds of faults, by name."""
        ...

    def mend(self) -> None:
        """Does what a person or a service manager does: what ended is started again."""
        ...

    def wait_for_progress(self) -> None:
        """Returns once more items have ended than before, or all but those that wait."""
        ...

    def let_go(self) -> None: ...

    def settle(self, seconds: float) -> None:
        """Waits for the job's end and the end of what follows it, for at most so long; then ends the
        processes as a person would."""
        ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def store(self) -> ObjectStore: ...

    def verify(self, job: str) -> tuple[int, str]:
        """Has `nightjar verify --repair` look at a job. Returns its exit status and what it wrote, in
        JSON."""
        ...

    @property
    def repaired_by_hand(self) -> bool:
        """Whether objects may be missing that nothing but `verify --repair` makes again."""
        ...

    def left_behind(self) -> list[str]:
        """Processes and temporary files that are there although everything has ended."""
        ...

    def outside(self) -> list[str]:
        """Files that were written where the store is not."""
        ...

    def end(self) -> None:
        """Frees everything, whatever has happened."""
        ...


class Mark:
    """A variable in the environment of everything that an installation starts."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex
        self.environment = {"NIGHTJAR_CHAOS_MARK": self._value}

    def processes(self, *words: str) -> list[int]:
        """Ids of the live processes with the mark; with words, those whose command line holds one of them."""
        found: list[int] = []
        wanted = f"NIGHTJAR_CHAOS_MARK={self._value}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if not entry.name.isdigit() or wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if not words or any(word in line for word in words):
                    found.append(int(entry.name))
        return found

    def signal(self, number: int, *words: str) -> None:
        for pid in self.processes(*words):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class Stubs:
    """The folders that stand, or stood, where a folder was taken away. They are kept: a process may write
    into one late."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._count = 0

    @contextmanager
    def instead_of(self, root: Path) -> Iterator[None]:
        """An empty folder in place of `root`, as where a disk is not mounted any more; afterwards `root`
        is back."""
        away = self._folder / "unmounted"
        os.rename(root, away)
        with suppress(FileExistsError):
            root.mkdir()
        try:
            yield
        finally:
            self.put_back(away, root)

    def put_back(self, away: Path, root: Path) -> None:
        """Moves `away` to `root`; what stands there is kept as a stub, unless it is an empty folder."""
        while away.exists():
            try:
                os.rename(away, root)
            except OSError:
                self.keep(root)

    def keep(self, path: Path) -> None:
        self._count += 1
        os.rename(path, self._folder / f"stub-{self._count}")

    def files(self) -> list[str]:
        return [str(path) for path in self._folder.glob("stub-*/**/*") if not path.is_dir()]


def copy_of(folder: Path, copy: Path, but: str = "") -> None:
    """A backup of a store in a folder, whose files never change; `but`: a name at its root that is none of
    the store's."""

    def ignored(directory: str, names: list[str]) -> list[str]:
        return [but] if but in names and Path(directory) == folder else []

    shutil.rmtree(copy, ignore_errors=True)
    # A file that goes while it is copied is no loss.
    with suppress(shutil.Error):
        shutil.copytree(folder, copy, copy_function=os.link, ignore=ignored)


@contextmanager
def flipped_bits(paths: list[Path], chance: random.Random) -> Iterator[None]:
    """A bit of each file is another one and then right again, as where a disk or a cache errs and heals.
    Files that replace them meanwhile stay as they are."""
    spoiled: list[tuple[int, int, bytes]] = []
    try:
        for path in paths:
            with suppress(FileNotFoundError):
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                place = chance.randrange(os.fstat(file).st_size)
                right = os.pread(file, 1, place)
                spoiled.append((file, place, right))
                os.pwrite(file, bytes([right[0] ^ 1 << chance.randrange(8)]), place)
        yield
    finally:
        for file, place, right in spoiled:
            os.pwrite(file, right, place)
            os.close(file)


def flip_inputs(ledger: Ledger, job: str, root: Path, chance: random.Random) -> int:
    """Flips a bit of each input in a folder for as long as the next shard needs to be claimed and read;
    how many were claimed."""

    def claims() -> int:
        return sum(1 for _ in patiently(lambda: list(ledger.attempts(job))))

    paths = [root / key for key, _ in patiently(lambda: ledger.shard_inputs(job)).values()]
    before = claims()
    with flipped_bits(paths, chance):
        wait_until(lambda: claims() > before, FLIPPED_SECONDS)
        time.sleep(0.3)
    return claims() - before


def wait_until(
    condition: Callable[[], object], seconds: float, between: Callable[[], None] = lambda: None
) -> bool:
    """Whether the condition came true in time; `between` is called while it is not."""
    deadline = time.monotonic() + seconds
    while not (met := bool(condition())) and time.monotonic() < deadline:
        between()
        time.sleep(0.2)
    return met
