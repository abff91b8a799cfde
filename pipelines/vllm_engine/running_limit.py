"""How many requests one of vLLM's schedulers lets run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

#: vLLM 0.32 has a second one, for admission.
_LIMITS = ("max_num_running_reqs", "max_num_active_reqs")


@contextmanager
def running_limit(scheduler: Any, most: int) -> Generator[None]:
    """Inside, no more than `most` requests run."""
    saved = {name: value for name in _LIMITS if (value := getattr(scheduler, name, None)) is not None}
    for name in saved:
        setattr(scheduler, name, most)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(scheduler, name, value)
