"""Opens models for a worker: those of our engine in a process of their own, and one that is known ahead while the worker itself starts."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from jobs.engine_process import open_engine_process
from pipelines.engine_process.client import EngineProcess
from pipelines.registry import describe, is_registered, open_pipeline
from pipelines.request import Pipeline

if TYPE_CHECKING:
    from jobs.settings import Settings


def open_model(settings: Settings, model: str) -> Pipeline:
    """A model with the settings of its engine. Raises `NightjarError`: what opening raises, and `EngineCrashError`."""
    return _engine_process(settings, model) or open_pipeline(model, **settings.engine_options(describe(model)))


def _engine_process(settings: Settings, model: str) -> EngineProcess | None:
    """The process of a model that has one, when it is open; None for models that are opened in the worker's own."""
    card = describe(model)
    if settings.chosen_engine(card) != "native" or is_registered(model):
        return None
    return open_engine_process(model, settings.engine_options(card), settings)


class Preload:
    """A model that is opened on a thread of its own before a shard asks for it, where it has a process of its own."""

    def __init__(self, settings: Settings, model: str) -> None:
        self._model = model
        self._opened: Future[Pipeline | None] | None = Future()
        threading.Thread(target=self._open, args=(settings, self._opened), name="preload", daemon=True).start()

    def take(self, model: str) -> Pipeline | None:
        """The pipeline, once; None for a model without a process, or another one: then this one is closed to make room.

        Raises as `open_model`.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            return None
        if model == self._model:
            return opened.result()
        # Both at once may be more than the device holds.
        wait([opened])
        _close(opened)
        return None

    def close(self) -> None:
        """Closes a pipeline that nobody took."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.add_done_callback(_close)

    def _open(self, settings: Settings, opened: Future[Pipeline | None]) -> None:
        try:
            opened.set_result(_engine_process(settings, self._model))
        except BaseException as error:  # noqa: BLE001 - whoever takes the pipeline gets the error
            opened.set_exception(error)


def _close(opened: Future[Pipeline | None]) -> None:
    if opened.exception() is None and (pipeline := opened.result()) is not None:
        pipeline.close()
