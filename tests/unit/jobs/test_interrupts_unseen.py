"""Ctrl-C that is raised where nobody can catch it, as in what runs when an object is freed, is not
printed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

from jobs.console import Interrupted, check_interrupts, record_interrupts


class Freed:
    def __init__(self, end: Callable[[], object]) -> None:
        self.end = end

    def __del__(self) -> None:
        self.end()


def test_it_is_noted_and_not_printed_and_other_errors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: heard.append(lost.exc_type))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        record_interrupts()
        Freed(lambda: 1 / 0)
        assert heard == [ZeroDivisionError]
        Freed(lambda: signal.raise_signal(signal.SIGINT))
        assert heard == [ZeroDivisionError]
        with pytest.raises(Interrupted):
            check_interrupts()
    finally:
        signal.signal(signal.SIGINT, before)
        record_interrupts()
        signal.signal(signal.SIGINT, before)
