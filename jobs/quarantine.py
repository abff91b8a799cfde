"""Tells the ledger which workers of this process are quarantined, so that `nightjar workers` and `nightjar status` show them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from jobs import installed_version
from pipelines.errors import NightjarError

if TYPE_CHECKING:
    from jobs.settings import Settings
    from jobs.worker_group import Member

#: Between two signs of life; a report without one for a minute counts as lost.
SECONDS = 15.0
_CLOSE_SECONDS = 5.0


class QuarantineReports:
    """Reports in a thread of its own, which begins with the first quarantine: a ledger that is away must not hold up the workers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._changed = threading.Event()
        self._quarantines: tuple[tuple[str, str], ...] = ()
        self._closed = False
        self._thread: threading.Thread | None = None

    def tend(self, quarantined: Sequence[Member]) -> None:
        """Notes who is quarantined now; to be called often."""
        found = tuple((member.plan.gpu or "", member.reason) for member in quarantined)
        if found == self._quarantines:
            return
        self._quarantines = found
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quarantines", daemon=True)
            self._thread.start()

    def close(self, *, over: bool) -> None:
        """Ends the reports. `over`: the workers are ended, so none is quarantined any more; else what was said last stays."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if over:
            self._quarantines = ()
        self._closed = True
        self._changed.set()
        thread.join(_CLOSE_SECONDS)
        self._closed = False

    def _run(self) -> None:
        # Only a process that has somebody to report pays for the ledger.
        from jobs.ledger import Ledger
        from jobs.ledger.workers import Quarantine

        ledger, host, version = Ledger.of(self._settings), socket.gethostname(), installed_version()
        while True:
            self._changed.clear()
            last = self._closed
            reports = [Quarantine(gpu, version, reason) for gpu, reason in self._quarantines]
            # The log says the same, and the next report has all that this one has.
            with suppress(NightjarError):
                ledger.report_quarantines(host, os.getpid(), reports)
            if last:
                break
            self._changed.wait(SECONDS)
        ledger.close()
