"""vLLM's own metrics, for a registry that is not the library's default one."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_PREFIX = "vllm:"


class VllmMetrics(Collector):
    """What vLLM counts in this process, under its own names; nothing while none runs. Imports no vLLM."""

    def collect(self) -> Iterable[Metric]:
        return [metric for metric in REGISTRY.collect() if metric.name.startswith(_PREFIX)]
