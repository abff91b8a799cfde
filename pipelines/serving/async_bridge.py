"""One request inside the pipeline, waited for on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Executor, Future

from pipelines.errors import NightjarError
from pipelines.request import AudioChunk, Pipeline, Speech, SynthesisRequest


class SpeechCall:
    """`submit` and what comes of it. The thread that submits may have to wait for room in the engine."""

    def __init__(self, pipeline: Pipeline, request: SynthesisRequest, over: Callable[[], None]) -> None:
        """`over` is called on the event loop once the pipeline has let go of the request, however it ended."""
        self._pipeline = pipeline
        self._request = request
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Speech] = self._loop.create_future()
        self._lock = threading.Lock()
        self._given_up = False

    async def result(self, threads: Executor) -> Speech:
        """The speech; being cancelled gives the request up. Raises `NightjarError`."""
        work = threads.submit(self._submit)
        try:
            return await self._outcome
        finally:
            if work.cancel():
                self._over()
            else:
                self._give_up()

    def _submit(self) -> None:
        if self._given_up:
            self._tell(None)
            return
        try:
            future = self._pipeline.submit(self._request)
        except BaseException as error:  # noqa: BLE001  # whatever it is, somebody waits for it
            self._tell(error)
            return
        future.add_done_callback(self._ended)
        with self._lock:
            unwanted = self._given_up
        if unwanted:
            self._pipeline.abort(self._request.request_id)

    def _ended(self, future: Future[Speech]) -> None:
        try:
            self._tell(future.result())
        except Exception as error:  # noqa: BLE001  # as above
            self._tell(error)

    def _tell(self, outcome: Speech | BaseException | None) -> None:
        def settle() -> None:
            self._over()
            if self._outcome.done() or outcome is None:
                return
            if isinstance(outcome, BaseException):
                self._outcome.set_exception(outcome)
            else:
                self._outcome.set_result(outcome)

        _on_loop(self._loop, settle)

    def _give_up(self) -> None:
        with self._lock:
            self._given_up = True
            # Also while it is being submitted, where it may be read or wait for room: a pipeline ignores an id it does not know yet.
            unwanted = not self._outcome.done() or self._outcome.cancelled()
        if unwanted:
            self._pipeline.abort(self._request.request_id)


class StreamCall:
    """`stream`, a chunk at a time: a thread is held only while the next chunk is made."""

    def __init__(self, pipeline: Pipeline, request: SynthesisRequest, over: Callable[[], None]) -> None:
        self._pipeline = pipeline
        self._request = request
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._pulling = threading.Lock()
        self._chunks: Iterator[AudioChunk] | None = None
        self._closed = False

    async def chunks(self, threads: Executor) -> AsyncGenerator[AudioChunk, None]:
        """The chunks; closing the generator gives the request up. Raises `NightjarError`."""
        try:
            while (chunk := await self._loop.run_in_executor(threads, self._pull)) is not None:
                yield chunk
        finally:
            # A pull that is under way ends by the abort; only then can the stream be closed.
            self._closed = True
            self._pipeline.abort(self._request.request_id)
            try:
                threads.submit(self._close)
            except RuntimeError:
                # The server is closing, and has closed the pipeline before its threads.
                self._over()

    def _pull(self) -> AudioChunk | None:
        with self._pulling:
            if self._closed:
                return None
            if self._chunks is None:
                self._chunks = self._pipeline.stream(self._request)
            return next(self._chunks, None)

    def _close(self) -> None:
        with self._pulling:
            close = getattr(self._chunks, "close", None)
            try:
                if close is not None:
                    close()
            except NightjarError:
                return
            finally:
                _on_loop(self._loop, self._over)


def _on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Calls back, unless the server is gone and nobody waits."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise
