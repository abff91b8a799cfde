"""What tests of the codec stage share: a listener that keeps what it heard, and an event that a test
holds."""

from __future__ import annotations

import queue
import threading

import numpy as np

from pipelines.codec.stage import Done
from pipelines.errors import NightjarError


class Heard:
    """What came out, in order."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[tuple[str, np.ndarray | NightjarError]] = queue.SimpleQueue()

    def at(self, name: str) -> Done:
        return lambda samples: self.items.put((name, samples))

    def take(self, count: int) -> list[tuple[str, np.ndarray | NightjarError]]:
        return [self.items.get(timeout=240) for _ in range(count)]


class OnTheWay:
    """The event of a batch that a device works on until it is told that it is done."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        self.done.wait()


def lists(items: list[tuple[str, np.ndarray | NightjarError]]) -> list[tuple[str, list[float]]]:
    """The samples that were heard, without errors."""
    return [(name, samples.tolist()) for name, samples in items if isinstance(samples, np.ndarray)]
