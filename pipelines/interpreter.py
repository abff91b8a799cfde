"""Tunes Python for processes that serve requests: rarer garbage collections, and more frequent thread
switches."""

from __future__ import annotations

import gc
import sys

#: New objects between two garbage collections (Python's default: 700).
COLLECT_AFTER = 20_000
#: How long a thread may run while others wait for the interpreter (Python's default: 5 ms).
SWITCH_SECONDS = 0.0005


def tune_gc() -> None:
    """Excludes all loaded objects from garbage collection, and makes collections rarer.

    Requests and items create few cycles, and a collection in a process that has loaded a model library stops
    all threads for tenths of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


def serve_threads() -> None:
    """Applies `tune_gc`, and lets threads switch more often: a stream's first chunk passes through several
    threads."""
    tune_gc()
    sys.setswitchinterval(SWITCH_SECONDS)
