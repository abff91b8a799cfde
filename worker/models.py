"""The loaded model of a worker: opened at first use or earlier, shared by all shards, closed before another is opened."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from jobs.engine_process import open_engine_process
from pipelines.daemon_threads import DaemonThreads
from pipelines.engine_process.client import EngineProcess
from pipelines.registry import describe, is_registered, open_pipeline
from pipelines.request import Pipeline

if TYPE_CHECKING:
    from jobs.settings import Settings

log = structlog.get_logger(__name__)

#: Interval at which a shard that waits for a model checks whether it must give up.
CHECK_SECONDS = 0.2


def open_model(settings: Settings, model: str) -> Pipeline:
    """Opens a model with the settings of its engine. Raises `NightjarError` if it cannot be opened, for example
    `EngineCrashError`."""
    return _engine_process(settings, model) or open_pipeline(
        model, **settings.engine_options(describe(model))
    )


def _engine_process(settings: Settings, model: str) -> EngineProcess | None:
    """Opens a model in its own process; None if it must be opened in the process of the worker."""
    card = describe(model)
    if settings.chosen_engine(card) != "native" or is_registered(model):
        return None
    return open_engine_process(model, settings.engine_options(card), settings)


class Preload:
    """Opens a model in its own process, in the background, before a shard needs it."""

    def __init__(self, settings: Settings, model: str) -> None:
        self._model = model
        self._opened: Future[EngineProcess | None] | None = DaemonThreads(1, "preload").submit(
            _engine_process, settings, model
        )

    def take(self, model: str) -> Pipeline | None:
        """Returns the pipeline at the first call. Returns None at later calls, if the model has no process of its own,
        or if another model is needed, in which case this one is closed.

        Raises the errors of `open_model`.
        """
        opened, self._opened = self._opened, None
        if opened is not None and model != self._model:
            # The device may not have memory for both.
            wait([opened])
            _close(opened)
            return None
        return None if opened is None else opened.result()

    def close(self) -> None:
        """Closes the pipeline if `take` was not called."""
        if self._opened is not None:
            self._opened.add_done_callback(_close)
            self._opened = None


def _close(opened: Future[EngineProcess | None]) -> None:
    if opened.exception() is None and (pipeline := opened.result()) is not None:
        pipeline.close()


@dataclass(slots=True)
class _Loaded:
    model: str
    pipeline: Pipeline
    users: int = 0


class PipelineCache:
    """Holds one model at a time. Waiting shards are served in order, so no model is starved."""

    def __init__(self, open_pipeline: Callable[[str], Pipeline]) -> None:
        self._open = open_pipeline
        self._loaded: _Loaded | None = None
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def use(self, model: str, check: Callable[[], None] = lambda: None) -> Iterator[Pipeline]:
        """The pipeline of `model` for the block; waits while another model is in use.

        `check` is called during the wait, and may raise an error to end it. Raises `ModelError` if the model cannot be
        opened.
        """
        loaded = self._acquire(model, check)
        try:
            yield loaded.pipeline
        finally:
            with self._changed:
                loaded.users -= 1
                self._changed.notify_all()

    def discard(self, pipeline: Pipeline) -> None:
        """Closes a broken pipeline at once, so that its requests end; the next use opens a new one."""
        with self._changed:
            if self._loaded is not None and self._loaded.pipeline is pipeline:
                self._loaded = None
            self._changed.notify_all()
        pipeline.close()

    def pipelines(self) -> list[Pipeline]:
        """The loaded pipeline, if any."""
        loaded = self._loaded
        return [] if loaded is None else [loaded.pipeline]

    def slots(self) -> int:
        """Slots of the loaded model's engine; 0 if none is loaded."""
        return max((pipeline.info.slots for pipeline in self.pipelines()), default=0)

    def close(self) -> None:
        """Closes the pipeline. Idempotent."""
        with self._changed:
            self._closed = True
            loaded, self._loaded = self._loaded, None
            self._changed.notify_all()
        if loaded is not None:
            loaded.pipeline.close()

    def _acquire(self, model: str, check: Callable[[], None]) -> _Loaded:
        waiter = object()
        with self._changed:
            self._waiting.append(waiter)
            try:
                while self._waiting[0] is not waiter or not self._has_room(model):
                    check()
                    self._changed.wait(CHECK_SECONDS)
                check()
                return self._take(model)
            finally:
                self._waiting.remove(waiter)
                self._changed.notify_all()

    def _has_room(self, model: str) -> bool:
        if self._closed:
            raise RuntimeError("The pipeline cache is closed.")
        return self._loaded is None or self._loaded.model == model or self._loaded.users == 0

    def _take(self, model: str) -> _Loaded:
        loaded = self._loaded
        if loaded is not None and (loaded.model != model or loaded.pipeline.stats().state == "broken"):
            log.info("model closed to make room", model=loaded.model)
            loaded.pipeline.close()
            loaded = self._loaded = None
        if loaded is None:
            log.info("model opening", model=model)
            loaded = self._loaded = _Loaded(model, self._open(model))
            log.info("model open", model=model)
        loaded.users += 1
        return loaded
