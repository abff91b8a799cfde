"""How a process that serves requests runs Python: few collections of garbage, and threads that give way
soon."""

from __future__ import annotations

import gc
import sys

#: New objects until the collector of garbage looks through them (Python's own: 700).
COLLECT_AFTER = 20_000
#: How long a thread keeps the interpreter from others that wait for it (Python's own: 5 ms).
SWITCH_SECONDS = 0.0005


def collect_seldom() -> None:
    """Leaves what was loaded so far out of the collections of garbage, and collects after more objects.

    Requests and items make few cycles, and looking through a loaded model's library stops all threads for
    tenths of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


def serve_threads() -> None:
    """`collect_seldom`, and no thread waits for long while another computes: a first chunk crosses several
    of them."""
    collect_seldom()
    sys.setswitchinterval(SWITCH_SECONDS)
