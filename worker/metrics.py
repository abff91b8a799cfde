"""Prometheus metrics of one worker process. Labels have few fixed values, never jobs, shards or items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from jobs.ledger.records import Failed, Outcome
from pipelines.engine_metrics import EngineMetrics
from pipelines.errors import NightjarError, invalid
from pipelines.request import Pipeline
from pipelines.vllm_engine.library import VllmMetrics

log = structlog.get_logger(__name__)


class Metrics:
    """The metrics of this process, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(VllmMetrics())
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.items = counter(
            "speech_items", "Items that ended, by outcome and error code.", ["outcome", "code"]
        )
        self.audio_seconds = counter("speech_audio_seconds", "Seconds of committed speech.")
        self.bytes_stored = counter("speech_stored_bytes", "Bytes of committed audio.")
        self.refused_draws = counter(
            "speech_refused_draws", "Draws that did not pass their quality checks, by code.", ["code"]
        )
        self.shards = counter("speech_shards", "Shards that ended on this worker, by outcome.", ["outcome"])
        self.lease_lost = counter("speech_lease_lost", "Leases that another worker took or that expired.")
        self.retries = counter(
            "speech_service_retries", "Retried calls to the ledger or the store, by error code.", ["code"]
        )
        self.reconciled = counter("speech_reconciled", "Repairs by the reconciler, by kind.", ["what"])
        self.dispatched = counter("speech_dispatched", "Shards sent to the broker.")
        self.dropped_messages = counter(
            "speech_dropped_messages", "Dropped messages of the broker that this worker cannot read."
        )
        self.consumer_restarts = counter(
            "speech_consumer_restarts", "Reconnections of this worker to the broker."
        )
        self.leases_held = gauge("speech_leases_held", "Shards in flight on this worker.")
        self.queue_depth = gauge("speech_queue_depth", "Messages waiting in the broker.")
        self.commit_seconds = Histogram(
            "speech_commit_seconds",
            "Seconds of a micro-batch commit, with its retries.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60),
            registry=registry,
        )

    def count(self, outcomes: Iterable[Outcome]) -> None:
        """Counts committed outcomes."""
        for outcome in outcomes:
            for draw in outcome.draws:
                if draw.code is not None:
                    self.refused_draws.labels(draw.code.value).inc()
            if isinstance(outcome, Failed):
                self.items.labels("failed", outcome.code.value).inc()
                continue
            self.items.labels("done", "").inc()
            for artifact in outcome.artifacts:
                self.audio_seconds.inc(artifact.duration_ms / 1000)
                self.bytes_stored.inc(artifact.bytes)

    def count_retry(self, error: NightjarError) -> None:
        """Counts and logs the error of a call that will be retried."""
        self.retries.labels(code=error.code.value).inc()
        log.warning("waiting for a service", code=error.code.value, error=str(error))

    def watch(self, leases_held: Callable[[], int], pipelines: Callable[[], Sequence[Pipeline]]) -> None:
        """Sets the sources of the gauges: the number of shards in flight, and the open pipelines."""
        self.leases_held.set_function(leases_held)
        self.registry.register(EngineMetrics(pipelines))

    def serve(self, port: int, address: str = "127.0.0.1") -> Callable[[], None]:
        """Serves the metrics over HTTP; returns a function that stops it. Raises `ConfigError` if the port is in use."""
        try:
            server, thread = start_http_server(port, addr=address, registry=self.registry)
        except OSError as error:
            raise invalid(
                f"Metrics cannot be served on port {port}: {error.strerror}.",
                "Set SPEECH_WORKER__METRICS_PORT to a free port.",
            ) from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop
