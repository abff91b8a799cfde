"""A model in a process of its own, for workers and servers.

`python -m jobs.engine_process LEVEL FORMAT` is that process: it logs as they do.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from jobs.logs import LogFormat, setup_logging
from pipelines.engine_process.client import EngineProcess

if TYPE_CHECKING:
    from jobs.settings import Settings


def open_engine_process(model: str, options: dict[str, Any], settings: Settings, level: str | None = None) -> EngineProcess:
    """The process of a model, once the model is open. Raises `NightjarError`: what opening raises, and `EngineCrashError`."""
    return EngineProcess(model, options, ("-m", "jobs.engine_process", level or settings.log_level, settings.log_format))


if __name__ == "__main__":
    from pipelines.engine_process.server import main

    setup_logging(sys.argv[1], cast(LogFormat, sys.argv[2]))
    main()
