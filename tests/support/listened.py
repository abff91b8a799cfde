"""An engine's core whose one listener hears of all requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pipelines.engine.core import EngineCore, EngineOptions
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.errors import NightjarError


class ListenedCore(EngineCore):
    """The listener's methods have the request as their first argument. What it raises, the next `step`
    raises."""

    def __init__(
        self,
        executor: FrameExecutor,
        options: EngineOptions,
        listener: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(executor, options, clock)
        self.listener = listener
        self.faults: list[Exception] = []
        #: [frames] of every finished request.
        self.log_probabilities: dict[GenerationRequest, np.ndarray] = {}

    def add(self, request: GenerationRequest) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().add(request, _Told(self, request))

    def step(self, batch: bool = True) -> bool:
        found = super().step(batch)
        if self.faults:
            raise self.faults[0]
        return found


class _Told:
    def __init__(self, core: ListenedCore, request: GenerationRequest) -> None:
        self._core, self._request = core, request

    def frames(self, codes: np.ndarray) -> None:
        self._tell(self._core.listener.frames, codes)

    def finished(self, codes: np.ndarray, finish: str, log_probabilities: np.ndarray) -> None:
        self._core.log_probabilities[self._request] = log_probabilities
        self._tell(self._core.listener.finished, codes, finish)

    def failed(self, error: NightjarError) -> None:
        self._tell(self._core.listener.failed, error)

    def _tell(self, call: Callable[..., None], *what: object) -> None:
        try:
            call(self._request, *what)
        except Exception as error:  # noqa: BLE001 - `step` raises it
            self._core.faults.append(error)
