"""Prometheus metrics of engines: how they were opened, and their current state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from pipelines.request import Pipeline

#: Metrics of `EngineInfo` and of `EngineStats`: field -> description.
_GAUGES = {
    "slots": "Utterances that can run at the same time.",
    "waiting_room": "Requests that can wait for a slot.",
    "kv_pages": "Pages of the KV cache.",
    "running": "Requests in the engine's running batch.",
    "waiting": "Requests that wait for a slot of the engine.",
    "kv_use": "Share of the KV cache in use.",
}
_COUNTERS = {
    "requests_done": "Requests that ended in the engine.",
    "frames": "Frames or tokens that the engine made.",
    "audio_seconds": "Seconds of speech that the engine made.",
    "joules": "Energy of the whole board of the engine's GPU since the engine was opened.",
}
#: Names of metrics that differ from their field.
_NAMES = {"running": "batch_size", "requests_done": "requests"}
_LABELS = ("model", "device", "dtype", "executor", "kernels", "reproducible")


class EngineMetrics(Collector):
    """Collects the metrics of this process's open pipelines at each scrape. Values of several engines are
    summed; for the use of the KV cache the highest value is reported."""

    def __init__(self, pipelines: Callable[[], Sequence[Pipeline]]) -> None:
        self._pipelines = pipelines

    def collect(self) -> Iterable[Metric]:
        engines = [
            {**asdict(one.info), **asdict(one.stats()), "model": one.name} for one in self._pipelines()
        ]
        opened = InfoMetricFamily("speech_engine", "How the engine of a model was opened.", labels=_LABELS)
        for engine in engines:
            engine["reproducible"] = "yes" if engine["reproducible"] else "no"
            opened.add_metric([engine[label] for label in _LABELS], {})
        yield opened
        # Counters restart from 0 with a new engine; Prometheus handles that.
        for family, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, text in rows.items():
                values = [engine[field] for engine in engines]
                if None in values:
                    continue
                total = max(values, default=0) if field == "kv_use" else sum(values)
                yield family(f"speech_engine_{_NAMES.get(field, field)}", text, total)
