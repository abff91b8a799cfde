"""Fake pipelines written as calls: `submit` gives a future, `stream` an iterator, `abort` ends a request
by its id."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import (
    AudioChunk,
    Done,
    Event,
    Failed,
    Handle,
    Listener,
    OnEvent,
    PreparedRequest,
    Speech,
    SynthesisRequest,
)


class _Called(Listener):
    def __init__(self, pipeline: CalledPipeline, request_id: str, on_event: OnEvent) -> None:
        super().__init__(on_event, lambda _done: None)
        self._pipeline, self._request_id = pipeline, request_id

    def cancel(self) -> None:
        if self.is_open:
            super().cancel()
            self._pipeline.abort(self._request_id)


class CalledPipeline:
    """`pipelines.request.Pipeline.start` over such calls: a stream has a thread of its own."""

    sample_rate: int
    starts_at_once = False

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        """The speech of a request."""
        raise NotImplementedError

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        """Its chunks; an iterator may return the speech without its samples."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Ends it."""

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        assert isinstance(request, SynthesisRequest)
        handle = _Called(self, request.request_id, on_event)
        if stream:
            threading.Thread(target=self._pull, name="stream", args=(request, handle), daemon=True).start()
        else:
            self.submit(request).add_done_callback(lambda future: handle(_end_of(future)))
        return handle

    def _pull(self, request: SynthesisRequest, handle: Listener) -> None:
        chunks = self.stream(request)
        try:
            while handle.is_open:
                handle(next(chunks))
        except StopIteration as end:
            handle(Done(end.value or Speech(np.zeros(0, np.float32), self.sample_rate)))
        except NightjarError as error:
            handle(Failed(error))
        except Exception as error:  # noqa: BLE001
            handle(Failed(SynthesisError(ErrorCode.SYNTH_ENGINE, f"The engine failed: {error!r}.")))
        finally:
            if (close := getattr(chunks, "close", None)) is not None:
                close()


def _end_of(future: Future[Speech]) -> Event:
    error = future.exception()
    if error is None:
        return Done(future.result())
    return Failed(
        error
        if isinstance(error, NightjarError)
        else SynthesisError(ErrorCode.SYNTH_ENGINE, f"The engine failed: {error!r}")
    )
