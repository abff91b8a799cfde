"""A model in a separate process, for workers and servers.

`python -m jobs.engine_process LEVEL FORMAT` runs that process, with the logging of its parent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from jobs.logs import LogFormat, setup_logging
from pipelines.engine_process.client import EngineProcess
from pipelines.options import has_gpu
from pipelines.registry import ModelCard, has_option, is_registered, open_pipeline

if TYPE_CHECKING:
    from jobs.settings import Settings
    from pipelines.request import Pipeline

#: Default number of streams that a model is prepared for.
_GPU_STREAMS, _CPU_STREAMS = 128, 8
#: Share of a GPU's memory that all models of a server take.
_SHARED_MEMORY = 0.9


def open_engine_process(
    model: str,
    options: dict[str, Any],
    settings: Settings,
    level: str | None = None,
    modules: Sequence[str] = (),
) -> EngineProcess:
    """Starts a process with a model and waits until the model is open, unless it is a spare one (`modules`).
    Raises the `NightjarError` of opening it, and `EngineCrashError`."""
    program = ("-m", "jobs.engine_process", level or settings.log_level, settings.log_format)
    return EngineProcess(model, options, program, modules)


@dataclass
class ModelOpener:
    """Opens a model of a server, again after each failure, in a separate process, so that it does not share an
    interpreter with the HTTP server. The engine `vllm` already has a process of its own.

    Keeps a spare process, if the settings want one, which has imported the model's libraries.
    """

    model: str
    card: ModelCard
    settings: Settings
    options: dict[str, Any]
    level: str
    _spare: EngineProcess | None = None

    def __call__(self) -> Pipeline:
        """Raises the errors of `pipelines.registry.open_pipeline`, and `EngineCrashError`."""
        if self.settings.chosen_engine(self.card) == "vllm" or is_registered(self.model):
            return open_pipeline(self.model, **self.options)
        start = partial(open_engine_process, self.model, settings=self.settings, level=self.level)
        process = self._spare
        self._spare = None
        if process is None:
            process = start(self.options)
        else:
            process.open()
        wanted = self.settings.serve.spare_process
        if has_gpu() if wanted is None else wanted:
            # A new engine is needed soon more than it is needed with all graphs.
            few = {"few_graphs": True} if "streams" in self.options else {}
            self._spare = start(self.options | few, modules=process.modules)
        return process


def engine_options(settings: Settings, card: ModelCard, models: int = 1) -> dict[str, Any]:
    """The options of a model for a server: the same as for a worker, and prepared for streams if possible.
    Several `models` share the GPU's memory equally, unless it is set. Answers that reach their limit are kept
    (`finish_reason` length)."""
    options = settings.engine_options(card)
    native = settings.chosen_engine(card) == "native"
    if models > 1 and card.engine != "cpu" and has_gpu():
        options.setdefault("memory_share", _SHARED_MEMORY / models)
    if native and has_option(card, "streams"):
        streams = settings.serve.streams
        options["streams"] = (_GPU_STREAMS if has_gpu() else _CPU_STREAMS) if streams is None else streams
    if native and has_option(card, "text_first") and settings.serve.text_in:
        options["text_first"] = False
    return options | {"keep_unfinished": True} if card.capabilities.text_out else options


if __name__ == "__main__":
    from pipelines.engine_process.server import main

    setup_logging(sys.argv[1], cast(LogFormat, sys.argv[2]))
    main()
