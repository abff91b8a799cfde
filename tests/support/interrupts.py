"""Ctrl-C reaches what tests start, also where the tests run in the background of a script."""

from __future__ import annotations

import signal


def heed() -> None:
    """Heeds Ctrl-C and Ctrl-\\ where they are ignored: a shell without job control ignores them for what
    it puts into its background.

    Every process that is started from here would ignore them too, and tests that interrupt one would wait
    for its end.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
