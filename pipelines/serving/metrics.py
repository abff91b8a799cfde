"""Prometheus metrics of one server and its engine. Labels have few, fixed values, and never identify a
request, a voice or a text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipelines.engine_metrics import EngineMetrics
from pipelines.serving.model import ServedModel
from pipelines.vllm_engine.library import VllmMetrics

ROUTES = ("/health", "/metrics", "/v1/models", "/v1/audio/speech", "/v1/audio/voices", "/v1/chat/completions")
_ELEVENLABS = "/v1/text-to-speech/{voice_id}/"
WEBSOCKET = "/tts/websocket"
SPEECH_STREAM = "/v1/audio/speech/stream"
MULTI_STREAM_INPUT = _ELEVENLABS + "multi-stream-input"
STREAM_INPUT = _ELEVENLABS + "stream-input"
WEBSOCKETS = (WEBSOCKET, SPEECH_STREAM, MULTI_STREAM_INPUT, STREAM_INPUT)
ROUTES += ("/tts/bytes", "/tts/sse", "/voices", *WEBSOCKETS)
#: Buckets of the latencies that listeners notice.
_LISTENING_SECONDS = (
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.045,
    0.065,
    0.09,
    0.13,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    5,
    10,
)
#: Buckets of the times of whole answers.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


def route_of(path: str) -> str:
    """The label of a path: one of `ROUTES`, or `other`."""
    route = re.sub(r"^/v1/text-to-speech/[^/{}]+/", _ELEVENLABS, path)
    return route if route in ROUTES else "other"


class MetricsPage(Collector):
    """The metrics of this process and of its answers, and those of its models, which have the label `model` if there
    are several."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(VllmMetrics())
        ProcessCollector(registry=registry)
        self._answers = Counter(
            "speech_http_requests", "Answers by route and status.", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "speech_http_seconds",
            "Time of an answer, to its last byte.",
            ["route"],
            registry=registry,
            buckets=_SECONDS,
        )
        #: The metrics of each model by its first name.
        self.models = dict[str, ServerMetrics]()

    def answered(self, path: str, status: int, seconds: float) -> str:
        """Counts an answer; returns its label `route`."""
        route = route_of(path)
        self._answers.labels(route=route, status=str(status)).inc()
        self._seconds.labels(route=route).observe(seconds)
        return route

    def collect(self) -> Iterable[Metric]:
        yield from self._registry.collect()
        families = dict[str, Metric]()
        for name, metrics in self.models.items():
            for family in metrics.registry.collect():
                samples = family.samples
                family.samples = []
                label = {"model": name} if len(self.models) > 1 else {}
                families.setdefault(family.name, family).samples += [
                    sample._replace(labels={**sample.labels, **label}) for sample in samples
                ]
        yield from families.values()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self)


class ServerMetrics:
    """The metrics of one model, in their own registry, which `page` shows."""

    def __init__(self, model: ServedModel, page: MetricsPage) -> None:
        self.registry = registry = CollectorRegistry()
        self.answered = page.answered
        page.models[model.options.names[0]] = self
        admission = model.admission
        registry.register(EngineMetrics(model.pipelines))
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_LISTENING_SECONDS)
        self._first = histogram(
            "speech_first_audio_seconds",
            "Time from the first byte of a request to the first byte of its streamed audio.",
            ["route"],
        )
        underruns = counter(
            "speech_stream_underruns", "Chunks too late for a player that starts at the first one."
        )
        underrun_seconds = counter(
            "speech_stream_underrun_seconds", "Seconds that such players had nothing to play."
        )
        #: Counts seconds of speech.
        self.audio_sent = counter("speech_audio_seconds", "Seconds of speech that were sent.").inc
        model.on_retry = counter(
            "speech_requests_retried", "Requests that were tried again after their engine had died."
        ).inc
        for name, text, value in (
            ("speech_server_running", "Requests that hold a slot of the server.", lambda: admission.running),
            (
                "speech_server_waiting",
                "Requests that wait for a slot of the server.",
                lambda: admission.waiting,
            ),
            (
                "speech_engine_up",
                "Whether the engine takes requests.",
                lambda: model.stats().state == "ready",
            ),
        ):
            Gauge(name, text, registry=registry).set_function(value)
        admission.admitted = histogram(
            "speech_queue_seconds", "Time that a request waits for a slot."
        ).observe

        def count_underrun(seconds: float) -> None:
            underruns.inc()
            underrun_seconds.inc(seconds)

        model.on_underrun = count_underrun

    def first_audio(self, route: str, seconds: float) -> None:
        """Records the time to the first audio of a stream."""
        self._first.labels(route=route).observe(seconds)
