"""A model in a process of its own, for workers and servers.

`python -m jobs.engine_process LEVEL FORMAT` is that process: it logs as they do.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from jobs.logs import LogFormat, setup_logging
from pipelines.engine_choice import has_gpu
from pipelines.engine_process.client import EngineProcess
from pipelines.registry import has_option, is_registered, open_pipeline

if TYPE_CHECKING:
    from jobs.settings import Settings
    from pipelines.registry import ModelCard
    from pipelines.request import Pipeline

#: Streams that a model is prepared for, by its device.
_GPU_STREAMS, _CPU_STREAMS = 128, 8


def open_engine_process(
    model: str, options: dict[str, Any], settings: Settings, level: str | None = None
) -> EngineProcess:
    """The process of a model, once the model is open. Raises `NightjarError`: what opening raises, and
    `EngineCrashError`."""
    return EngineProcess(
        model, options, ("-m", "jobs.engine_process", level or settings.log_level, settings.log_format)
    )


def open_model(
    model: str, card: ModelCard, settings: Settings, options: dict[str, Any], level: str | None = None
) -> Pipeline:
    """A model in a process of its own: HTTP never waits for its interpreter. Models of the engine `vllm`
    bring such a process along.

    Raises as `pipelines.registry.open_pipeline`, and `EngineCrashError`.
    """
    if settings.chosen_engine(card) == "vllm" or is_registered(model):
        return open_pipeline(model, **options)
    return open_engine_process(model, options, settings, level)


def engine_options(settings: Settings, card: ModelCard) -> dict[str, Any]:
    """As a worker opens it, with the settings of its engine; but an answer that reaches its limit is one
    (`finish_reason` length), and a model that can is prepared for streams."""
    options, native = settings.engine_options(card), settings.chosen_engine(card) == "native"
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
