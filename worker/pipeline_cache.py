"""The loaded models of this process: opened at the first use, shared by all shards of a model, closed to make room."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from pipelines.request import Pipeline

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Loaded:
    pipeline: Pipeline
    users: int = 0
    #: Broken: closed as soon as nobody uses it, and opened again at the next use.
    discarded: bool = False


class PipelineCache:
    """At most `max_loaded` models at once. Waiters are served in the order they came, so no model starves another."""

    def __init__(self, open_pipeline: Callable[[str], Pipeline], max_loaded: int = 1) -> None:
        self._open = open_pipeline
        self._max_loaded = max_loaded
        self._loaded: dict[str, _Loaded] = {}
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def use(self, model: str, check: Callable[[], None] = lambda: None) -> Iterator[Pipeline]:
        """The pipeline of `model` for as long as the block runs; waits while other models fill the room.

        `check` is called while waiting and may raise to stop waiting. Raises `ModelError` when the model cannot be opened.
        """
        entry = self._acquire(model, check)
        try:
            yield entry.pipeline
        finally:
            self._release(model, entry)

    def discard(self, pipeline: Pipeline) -> None:
        """Marks a pipeline as broken: it is closed at once, so that its requests end, and the next use opens a new one."""
        with self._changed:
            for model, entry in list(self._loaded.items()):
                if entry.pipeline is pipeline:
                    entry.discarded = True
                    del self._loaded[model]
            self._changed.notify_all()
        pipeline.close()

    def pipelines(self) -> list[Pipeline]:
        """What is loaded now."""
        return [entry.pipeline for entry in list(self._loaded.values())]

    def close(self) -> None:
        """Closes every pipeline. May be called more than once."""
        with self._changed:
            self._closed = True
            entries = list(self._loaded.values())
            self._loaded.clear()
            self._changed.notify_all()
        for entry in entries:
            entry.pipeline.close()

    def _acquire(self, model: str, check: Callable[[], None]) -> _Loaded:
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while self._waiting[0] is not me or not self._has_room(model):
                    check()
                    self._changed.wait(0.2)
                check()
                return self._take(model)
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def _has_room(self, model: str) -> bool:
        if self._closed:
            raise RuntimeError("The pipeline cache is closed.")
        return model in self._loaded or len(self._loaded) < self._max_loaded or any(e.users == 0 for e in self._loaded.values())

    def _take(self, model: str) -> _Loaded:
        entry = self._loaded.get(model)
        if entry is not None and entry.pipeline.stats().state == "broken":
            self._loaded.pop(model).pipeline.close()
            entry = None
        if entry is None:
            if len(self._loaded) >= self._max_loaded:
                idle = next(name for name, one in self._loaded.items() if one.users == 0)
                log.info("model closed to make room", model=idle)
                self._loaded.pop(idle).pipeline.close()
            log.info("model opening", model=model)
            entry = self._loaded[model] = _Loaded(self._open(model))
            log.info("model open", model=model)
        entry.users += 1
        return entry

    def _release(self, model: str, entry: _Loaded) -> None:
        with self._changed:
            entry.users -= 1
            self._changed.notify_all()
