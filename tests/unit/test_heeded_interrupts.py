"""Tests in the background of a script interrupt what they start as those of a terminal do."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.support import interrupts


def test_what_is_started_can_be_interrupted_although_a_shell_ignores_it() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        interrupts.heed()
        for number in before:
            code = f"import os; os.kill(os.getpid(), {number.value})"
            ended = subprocess.run(
                [sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False
            ).returncode
            assert ended == -number, number
        heeded = signal.signal(signal.SIGINT, lambda *_: None)
        assert heeded is signal.default_int_handler
        own = signal.getsignal(signal.SIGINT)
        interrupts.heed()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
