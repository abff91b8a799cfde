"""Prometheus metrics of one server, with its engine's. Labels are few and closed: never a request, a voice
or a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipelines.engine_metrics import EngineMetrics
from pipelines.request import EngineStats
from pipelines.serving.admission import AdmissionQueue
from pipelines.serving.model import ServedModel
from pipelines.vllm_engine.library import VllmMetrics

ROUTES = ("/health", "/metrics", "/v1/models", "/v1/audio/speech", "/v1/audio/voices", "/v1/chat/completions")
ROUTES += ("/tts/bytes", "/tts/sse", "/tts/websocket", "/voices")
#: Of what a listener waits for: bars are in tens of milliseconds.
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
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """The metrics of this process, in a registry of their own."""

    def __init__(self, model: ServedModel, gate: AdmissionQueue) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(VllmMetrics())
        self._registry.register(_Now(model, gate))
        self._registry.register(EngineMetrics(model.pipelines))
        ProcessCollector(registry=self._registry)
        self._answers = Counter(
            "speech_http_requests",
            "Answers by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "speech_http_seconds",
            "Time of an answer, to its last byte.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first = Histogram(
            "speech_first_audio_seconds",
            "Time from the first byte of a request to the first byte of its streamed audio.",
            ["route"],
            buckets=_LISTENING_SECONDS,
            registry=self._registry,
        )
        self._queue = Histogram(
            "speech_queue_seconds",
            "Time that a request waits for a slot.",
            buckets=_LISTENING_SECONDS,
            registry=self._registry,
        )
        self._underruns = Counter(
            "speech_stream_underruns",
            "Chunks too late for a player that starts at the first one.",
            registry=self._registry,
        )
        self._underrun_seconds = Counter(
            "speech_stream_underrun_seconds",
            "Seconds that such players had nothing to play.",
            registry=self._registry,
        )
        self._audio = Counter(
            "speech_audio_seconds", "Seconds of speech that were sent.", registry=self._registry
        )
        gate.admitted = self._queue.observe
        model.underran = self._underran

    def answered(self, path: str, status: int, seconds: float) -> str:
        """Counts an answer; the route it is counted under."""
        route = path if path in ROUTES else "other"
        self._answers.labels(route=route, status=str(status)).inc()
        self._seconds.labels(route=route).observe(seconds)
        return route

    def began(self, route: str, seconds: float) -> None:
        """Notes the first audio of a stream, once it is sent."""
        self._first.labels(route=route).observe(seconds)

    def spoke(self, seconds: float) -> None:
        """Counts speech."""
        self._audio.inc(seconds)

    def _underran(self, seconds: float) -> None:
        self._underruns.inc()
        self._underrun_seconds.inc(seconds)

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """What is read at the moment of a scrape: the gate, and the engine's own stats."""

    def __init__(self, model: ServedModel, gate: AdmissionQueue) -> None:
        self._model = model
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        stats = self._model.stats()
        yield _gauge("speech_server_running", "Requests that hold a slot of the server.", self._gate.running)
        yield _gauge(
            "speech_server_waiting", "Requests that wait for a slot of the server.", self._gate.waiting
        )
        yield _gauge("speech_engine_up", "Whether the engine takes requests.", stats.state == "ready")
        yield from _counters(stats)


def _counters(stats: EngineStats) -> Sequence[Metric]:
    # They start again from 0 with a new engine, which Prometheus knows to handle.
    return (
        CounterMetricFamily(
            "speech_engine_requests", "Requests that ended in the engine.", stats.requests_done
        ),
        CounterMetricFamily("speech_engine_frames", "Frames or tokens that the engine made.", stats.frames),
        CounterMetricFamily(
            "speech_engine_audio_seconds", "Seconds of speech that the engine made.", stats.audio_seconds
        ),
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, float(value))
