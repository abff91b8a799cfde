"""The loaded model of a worker: opened at its first use or ahead of it, shared by all shards, closed to
make room for another."""

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

#: Between two looks whether a shard that waits for a model still wants it.
LOOK_SECONDS = 0.2


def open_model(settings: Settings, model: str) -> Pipeline:
    """A model with the settings of its engine. Raises `NightjarError`: what opening raises, and
    `EngineCrashError`."""
    return _engine_process(settings, model) or open_pipeline(
        model, **settings.engine_options(describe(model))
    )


def _engine_process(settings: Settings, model: str) -> EngineProcess | None:
    """The process of a model that has one, when it is open; None for models that are opened in the
    worker's own."""
    card = describe(model)
    if settings.chosen_engine(card) != "native" or is_registered(model):
        return None
    return open_engine_process(model, settings.engine_options(card), settings)


class Preload:
    """A model that is opened on a thread of its own before a shard asks for it, where it has a process of
    its own."""

    def __init__(self, settings: Settings, model: str) -> None:
        self._model = model
        self._opened: Future[EngineProcess | None] | None = DaemonThreads(1, "preload").submit(
            _engine_process, settings, model
        )

    def take(self, model: str) -> Pipeline | None:
        """The pipeline, once; None for a model without a process, or another one: then this one is closed
        to make room.

        Raises as `open_model`.
        """
        opened, self._opened = self._opened, None
        if opened is not None and model != self._model:
            # Both at once may be more than the device holds.
            wait([opened])
            _close(opened)
            return None
        return None if opened is None else opened.result()

    def close(self) -> None:
        """Closes a pipeline that nobody took."""
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
    """One model at a time. Waiters are served in the order they came, so no model starves another."""

    def __init__(self, open_pipeline: Callable[[str], Pipeline]) -> None:
        self._open = open_pipeline
        self._loaded: _Loaded | None = None
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def use(self, model: str, check: Callable[[], None] = lambda: None) -> Iterator[Pipeline]:
        """The pipeline of `model` for as long as the block runs; waits while another model is in use.

        `check` is called while waiting and may raise to stop waiting. Raises `ModelError` when the model
        cannot be opened.
        """
        loaded = self._acquire(model, check)
        try:
            yield loaded.pipeline
        finally:
            with self._changed:
                loaded.users -= 1
                self._changed.notify_all()

    def discard(self, pipeline: Pipeline) -> None:
        """Marks a pipeline as broken: it is closed at once, so that its requests end, and the next use
        opens a new one."""
        with self._changed:
            if self._loaded is not None and self._loaded.pipeline is pipeline:
                self._loaded = None
            self._changed.notify_all()
        pipeline.close()

    def pipelines(self) -> list[Pipeline]:
        """What is loaded now."""
        loaded = self._loaded
        return [] if loaded is None else [loaded.pipeline]

    def slots(self) -> int:
        """Those of the loaded model's engine; 0 while none is loaded."""
        return max((pipeline.info.slots for pipeline in self.pipelines()), default=0)

    def close(self) -> None:
        """Closes the pipeline. May be called more than once."""
        with self._changed:
            self._closed = True
            loaded, self._loaded = self._loaded, None
            self._changed.notify_all()
        if loaded is not None:
            loaded.pipeline.close()

    def _acquire(self, model: str, check: Callable[[], None]) -> _Loaded:
        me = object()
        with self._changed:
            self._waiting.append(me)
            try:
                while self._waiting[0] is not me or not self._has_room(model):
                    check()
                    self._changed.wait(LOOK_SECONDS)
                check()
                return self._take(model)
            finally:
                self._waiting.remove(me)
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
