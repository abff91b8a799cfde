"""Ctrl-C that Python code called by C code has swallowed is found by the run that begins after it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import pytest

from jobs.console import Interrupted, Signals, record_interrupts


def test_a_swallowed_interrupt_ends_the_run_that_follows() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        record_interrupts()
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("Ctrl-C is not raised")
        noted = signal.getsignal(signal.SIGINT)
        with pytest.raises(Interrupted) as caught, Signals().installed():
            raise AssertionError("the run goes on")
        assert caught.value.exit_code == 128 + signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is noted
        signal.signal(signal.SIGINT, signal.default_int_handler)
        record_interrupts()
        with Signals().installed():
            pass
    finally:
        signal.signal(signal.SIGINT, before)
        record_interrupts()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("before", "heard"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_run_under_nohup_outlives_its_terminal(before: signal.Handlers, heard: bool) -> None:
    kept = signal.signal(signal.SIGHUP, before)
    signals = Signals()
    try:
        with signals.installed():
            assert (signal.getsignal(signal.SIGHUP) == signals) is heard
            assert signal.getsignal(signal.SIGTERM) == signals
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, kept)
