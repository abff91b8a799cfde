"""What the soak asks of an installation that is tormented."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Protocol

from jobs.ledger import Ledger
from jobs.store.base import ObjectStore

Fault = Callable[[random.Random], None]


class Site(Protocol):
    """An installation with one job. Its faults are over when they return, or heal by themselves."""

    #: Set by `begin`.
    job: str
    #: Jobs that had ended before the faults, with their texts.
    ended: Mapping[str, Mapping[str, str]]

    def begin(self, texts: Mapping[str, str]) -> Mapping[str, str]:
        """Submits one dialogue a text, by its id, and returns them as they went in: the first one waits for `let_go`."""
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
        """Waits for the job's end and the end of what follows it, for at most so long; then ends the processes as a person would."""
        ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def store(self) -> ObjectStore: ...

    def left_behind(self) -> list[str]:
        """Processes and temporary files that are there although everything has ended."""
        ...

    def end(self) -> None:
        """Frees everything, whatever has happened."""
        ...
