"""A model in a separate process, for workers and servers.

`python -m jobs.engine_process LEVEL FORMAT` runs that process, with the logging of its parent.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jobs.logs import LogFormat, setup_logging
from pipelines.engine_process.client import EngineProcess
from pipelines.options import has_gpu
from pipelines.registry import ModelCard, has_option, is_registered, open_pipeline

if TYPE_CHECKING:
    from jobs.settings import Settings
    from pipelines.request import Pipeline

_PROGRAM = "-m", "jobs.engine_process"
#: Default number of streams that a model is prepared for.
_GPU_STREAMS, _CPU_STREAMS = 128, 8
#: Share of a GPU's memory that all models of a server take.
_SHARED_MEMORY = 0.9
#: Environment variable of a worker: the model, modules and logging of the process that `start_spare` starts.
_SPARE = "NIGHTJAR_SPARE"
#: Model -> the process that has imported its libraries, until the model is opened in it.
_spares = dict[str, EngineProcess]()


def spare_variables(settings: Settings, model: str, family: str) -> dict[str, str]:
    """Environment variables of a worker that calls `start_spare`. `family`: that of the model, which has a process
    of its own."""
    wanted = model, [f"pipelines.{family}.pipeline"], settings.log_level, settings.log_format
    return {_SPARE: json.dumps(wanted)}


def start_spare() -> None:
    """Starts a spare process for a model if the parent process asks for it. The settings need not be known."""
    if wanted := os.environ.pop(_SPARE, None):
        model, modules, *logging = json.loads(wanted)
        _spares[model] = EngineProcess(model, {}, (*_PROGRAM, *logging), modules)


def open_engine_process(
    model: str,
    options: dict[str, Any],
    settings: Settings,
) -> EngineProcess:
    """Opens a model in its spare process, or starts one, and waits until it is open. Raises the `NightjarError` of
    opening it, and `EngineCrashError`."""
    if spare := _spares.pop(model, None):
        spare.open(**options)
        return spare
    return EngineProcess(model, options, (*_PROGRAM, settings.log_level, settings.log_format))


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

    def __call__(self) -> Pipeline:
        """Raises the errors of `pipelines.registry.open_pipeline`, and `EngineCrashError`."""
        if self.settings.chosen_engine(self.card) == "vllm" or is_registered(self.model):
            return open_pipeline(self.model, **self.options)
        process = open_engine_process(self.model, self.options, self.settings)
        wanted = self.settings.serve.spare_process
        if self.model not in _spares and (has_gpu() if wanted is None else wanted):
            # A new engine is needed soon more than it is needed with all graphs.
            self.options |= {"few_graphs": True} if "streams" in self.options else {}
            _spares[self.model] = EngineProcess(
                self.model,
                {},
                (*_PROGRAM, self.settings.log_level, self.settings.log_format),
                process.modules,
            )
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
