"""The loaded model of a worker: opened at first use or earlier, shared by all shards, closed before another is opened."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from jobs.engine_process import open_engine_process
from jobs.settings import Settings
from pipelines.daemon_threads import DaemonThreads
from pipelines.registry import describe, is_registered, open_pipeline
from pipelines.request import Pipeline

log = structlog.get_logger(__name__)

#: Interval at which a shard that waits for a model checks whether it must give up.
CHECK_SECONDS = 0.2


def open_model(settings: Settings, model: str, decodes: bool) -> Pipeline:
    """Opens a model with the settings of its engine; `decodes`: with the decoder of its codec. Raises `NightjarError` if
    it cannot be opened, for example `EngineCrashError`."""
    options = settings.engine_options(describe(model)) | ({} if decodes else {"decodes": False})
    if not has_process(settings, model):
        return open_pipeline(model, **options)
    return open_engine_process(model, options, settings)


def has_process(settings: Settings, model: str) -> bool:
    """Whether a model is opened in its own process, and not in that of the worker."""
    return settings.chosen_engine(describe(model)) == "native" and not is_registered(model)


class Preload:
    """Opens a model in its own process, in the background, before a shard needs it."""

    def __init__(self, settings: Settings, model: str, decodes: bool = True) -> None:
        self._wanted = model, decodes
        self._opened = DaemonThreads(1, "preload").submit(
            lambda: open_model(settings, model, decodes) if has_process(settings, model) else None
        )

    def take(self, model: str, decodes: bool = True) -> Pipeline | None:
        """Returns the pipeline at the first call. Returns None at later calls, if the model has no process of its own,
        or if another model is needed, in which case this one is closed.

        Raises the errors of `open_model`.
        """
        opened = self._opened
        self._opened = None
        if opened is not None and not _serves(*self._wanted, model, decodes):
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


def _close(opened: Future[Pipeline | None]) -> None:
    if opened.exception() is None and (pipeline := opened.result()) is not None:
        pipeline.close()


def _serves(model: str, decodes: bool, wanted: str, wants_audio: bool) -> bool:
    """Whether a model that was opened with or without the decoder of its codec serves what is wanted."""
    return model == wanted and decodes >= wants_audio


@dataclass(slots=True)
class _Loaded:
    model: str
    decodes: bool
    pipeline: Pipeline
    users: int = 0


class PipelineCache:
    """Holds one model at a time. Waiting shards are served in order, so no model is starved."""

    def __init__(self, open_pipeline: Callable[[str, bool], Pipeline]) -> None:
        """`open_pipeline`: opens a model, with or without the decoder of its codec."""
        self._open = open_pipeline
        self._loaded: _Loaded | None = None
        self._waiting = deque[object]()
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def use(
        self, model: str, check: Callable[[], None] = lambda: None, decodes: bool = True
    ) -> Iterator[Pipeline]:
        """The pipeline of `model` for the block; waits while another model is in use. A model that was opened without
        its decoder is opened again when audio is wanted (`decodes`).

        `check` is called during the wait, and may raise an error to end it. Raises `ModelError` if the model cannot be
        opened.
        """
        waiter = object()
        with self._changed:
            self._waiting.append(waiter)
            try:
                while self._waiting[0] is not waiter or not self._has_room(model, decodes):
                    check()
                    self._changed.wait(CHECK_SECONDS)
                check()
                loaded = self._take(model, decodes)
            finally:
                self._waiting.remove(waiter)
                self._changed.notify_all()
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

    def close(self) -> None:
        """Closes the pipeline. Idempotent."""
        # A model that is being opened is waited for, and closed too.
        with self._changed:
            self._closed = True
            opened = self.pipelines()
        for pipeline in opened:
            self.discard(pipeline)

    def _has_room(self, model: str, decodes: bool) -> bool:
        if self._closed:
            raise RuntimeError("The pipeline cache is closed.")
        loaded = self._loaded
        return loaded is None or loaded.users == 0 or _serves(loaded.model, loaded.decodes, model, decodes)

    def _take(self, model: str, decodes: bool) -> _Loaded:
        loaded = self._loaded
        if loaded is not None and (
            not _serves(loaded.model, loaded.decodes, model, decodes)
            or loaded.pipeline.stats().state == "broken"
        ):
            log.info("model closed to make room", model=loaded.model)
            loaded.pipeline.close()
            loaded = self._loaded = None
        if loaded is None:
            log.info("model opening", model=model)
            loaded = self._loaded = _Loaded(model, decodes, self._open(model, decodes))
            log.info("model open", model=model)
        loaded.users += 1
        return loaded
