"""A real server on a free port around any pipeline, and the few things that every test of it asks."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
import numpy as np
import soundfile
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from pipelines.registry import ModelCard
from pipelines.request import Pipeline
from pipelines.serving import ServeOptions
from pipelines.serving.model import ServedModel
from pipelines.serving.server import Server

#: How long a test waits for what comes at once on a quiet machine.
PATIENCE_SECONDS = 240.0


def card_of(pipeline: Pipeline) -> ModelCard:
    return ModelCard(pipeline.name, "test", "cpu", pipeline.sample_rate, pipeline.capabilities)


class Running:
    """A server in a thread of this process; leaving the block drains it."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        wait: bool = True,
        open_model: Callable[[], Pipeline] | None = None,
        more: Sequence[Pipeline] = (),
        **options: Any,
    ) -> None:
        patience = {"drain_seconds": 120.0, "stream_queue_seconds": PATIENCE_SECONDS}
        sizes: dict[str, Any] = {"slots": 8, "waiting_room": 8, **patience, **options}
        self.pipeline = pipeline
        models = [(pipeline, open_model or (lambda: pipeline)), *((one, lambda one=one: one) for one in more)]
        self.server = Server(
            [ServedModel(card_of(one), opened, ServeOptions((one.name,), **sizes)) for one, opened in models],
            "127.0.0.1",
            0,
        )
        self.url = self.server.url
        self.http = httpx2.Client(base_url=self.url, timeout=PATIENCE_SECONDS, trust_env=False)
        self._wait = wait
        self._thread = threading.Thread(target=self.server.run, name="server", daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        if self._wait:
            self.until(lambda: self.health() == 200)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(300)
        assert not self._thread.is_alive(), "the server did not end"
        self.http.close()

    def health(self) -> int:
        try:
            return self.http.get("/health").status_code
        except httpx2.TransportError:
            return 0

    def speak(self, text: str = "Good morning.", **fields: Any) -> httpx2.Response:
        """An answer, as WAV unless `fields` ask for another format."""
        return self.http.post(
            "/v1/audio/speech",
            json={"model": self.pipeline.name, "input": text, "response_format": "wav", **fields},
        )

    def chat(self, *messages: dict[str, Any], **fields: Any) -> httpx2.Response:
        return self.http.post(
            "/v1/chat/completions", json={"model": self.pipeline.name, "messages": list(messages), **fields}
        )

    def metrics(self, **headers: str) -> dict[str, float]:
        """Samples without labels, and those with them as `name{a=b}`."""
        return scraped(self.http.get("/metrics", headers=headers).text)

    def busy(self) -> tuple[float, ...]:
        """What holds a slot or waits for one, in the server and in the engine."""
        now = self.metrics()
        names = (
            "speech_server_running",
            "speech_server_waiting",
            "speech_engine_batch_size",
            "speech_engine_waiting",
        )
        return tuple(now[name] for name in names)

    def until(self, true: Any, seconds: float = PATIENCE_SECONDS) -> None:
        wait_until(true, seconds)

    def until_idle(self) -> None:
        self.until(lambda: self.busy() == (0, 0, 0, 0))


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def scraped(text: str) -> dict[str, float]:
    """The samples of a page of metrics by name and labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error of an answer, which must be in OpenAI's form."""
    view = response.json()
    assert set(view) == {"error"}, view
    assert set(view["error"]) == {"message", "type", "param", "code"}
    assert view["error"]["message"]
    return view["error"]


def heard(data: bytes) -> tuple[NDArray[np.float32], int]:
    """Samples and rate of a whole file."""
    return soundfile.read(io.BytesIO(data), dtype="float32")


def wav(seconds: float, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    samples = (0.3 * np.sin(np.arange(int(seconds * rate)) / 20)).astype(np.float32)
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to its `[DONE]`."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])
