"""vLLM's own metrics of several engine cores in one process, each under its number as the label `engine`.

By itself every `AsyncLLM` takes the metrics of the one before it out of the registry.
"""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger


class CoreMetrics:
    """What so many cores have in common."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._logger: PrometheusStatLogger | None = None

    def shared(self, vllm_config: Any) -> PrometheusStatLogger:
        """The logger of all cores; a core that is started again goes on counting in it."""
        if self._logger is None:
            self._logger = PrometheusStatLogger(vllm_config, list(range(self._cores)))
            self._logger.log_engine_initialized()
        return self._logger

    def of(self, core: int) -> type[PrometheusStatLogger]:
        """The class that vLLM is to make the logger of this core of."""
        common = self

        class OneCore(PrometheusStatLogger):
            def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:  # pyright: ignore[reportMissingSuperCall]
                self._shared = common.shared(vllm_config)

            def record(self, *args: Any, engine_idx: int = 0, **kwargs: Any) -> None:
                self._shared.record(*args, engine_idx=core, **kwargs)

            def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
                self._shared.record_sleep_state(*args, **kwargs)

            def log_engine_initialized(self) -> None:
                """Said once for all cores."""

        return OneCore
