"""Prometheus metrics of engines: how they were opened, and what they do now. Labels are few and closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from pipelines.request import Pipeline

_LABELS = ("model", "device", "dtype", "executor", "kernels", "reproducible")


class EngineMetrics(Collector):
    """What the open pipelines of this process say of their engines, read at each scrape. Sizes of several
    add up."""

    def __init__(self, pipelines: Callable[[], Sequence[Pipeline]]) -> None:
        self._pipelines = pipelines

    def collect(self) -> Iterable[Metric]:
        pipelines = self._pipelines()
        infos, stats = [one.info for one in pipelines], [one.stats() for one in pipelines]
        opened = InfoMetricFamily("speech_engine", "How the engine of a model was opened.", labels=_LABELS)
        for pipeline, info in zip(pipelines, infos):
            reproducible = "yes" if info.reproducible else "no"
            opened.add_metric(
                (pipeline.name, info.device, info.dtype, info.executor, info.kernels, reproducible), {}
            )
        yield opened
        for name, text, value in (
            ("slots", "Utterances that can run at the same time.", sum(info.slots for info in infos)),
            ("waiting_room", "Requests that can wait for a slot.", sum(info.waiting_room for info in infos)),
            (
                "batch_size",
                "Requests in the engine's running batch.",
                sum(one.running for one in stats),
            ),
            ("waiting", "Requests that wait for a slot of the engine.", sum(one.waiting for one in stats)),
            ("kv_pages", "Pages of the KV cache.", sum(info.kv_pages for info in infos)),
            ("kv_use", "Share of KV cache in use.", max((one.kv_use for one in stats), default=0)),
        ):
            yield GaugeMetricFamily(f"speech_engine_{name}", text, float(value))
        # They start again from 0 with a new engine, which Prometheus knows to handle.
        for name, text, value in (
            ("requests", "Requests that ended in the engine.", sum(one.requests_done for one in stats)),
            ("frames", "Frames or tokens that the engine made.", sum(one.frames for one in stats)),
            (
                "audio_seconds",
                "Seconds of speech that the engine made.",
                sum(one.audio_seconds for one in stats),
            ),
        ):
            yield CounterMetricFamily(f"speech_engine_{name}", text, value)
