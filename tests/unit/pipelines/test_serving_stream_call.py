"""A stream of a server, as the event loop waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, InputError
from pipelines.request import Generation, Message, SynthesisRequest
from pipelines.serving.async_bridge import PipelineCall, Unread

REQUEST = SynthesisRequest("one", (Message("user", "text", "Hello."),), Generation(), 1)


class _Refusing:
    """Takes its time over a request, such as for its recording, and refuses it."""

    starts_at_once = False

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()

    def start(self, *_: object) -> Any:
        self.asked.set()
        self.answer.wait()
        raise InputError(
            ErrorCode.INPUT_REFERENCE_SILENT,
            "The reference audio is silent.",
            "Give a recording with a clear voice.",
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_slot_is_free_after_a_client_left_and_its_request_was_refused(stream: bool) -> None:
    async def leave_early() -> int:
        pipeline, threads, times_over = _Refusing(), DaemonThreads(1, "starter"), 0
        over = asyncio.Event()

        def count() -> None:
            nonlocal times_over
            times_over += 1
            over.set()

        call: Any = PipelineCall(pipeline, REQUEST, count, Unread(), lambda _seconds: None, stream=stream)  # pyright: ignore[reportArgumentType]

        async def listen() -> None:
            async with aclosing(call.events(threads)) as chunks:
                async for _ in chunks:
                    pass

        listening = asyncio.create_task(listen())
        await asyncio.to_thread(pipeline.asked.wait)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        assert not times_over, "the pipeline still has the request"
        pipeline.answer.set()
        async with asyncio.timeout(30):
            await over.wait()
        threads.shutdown()
        return times_over

    assert asyncio.run(leave_early()) == 1


class _LateThread(Executor):
    """A thread that has taken its work and comes to it later."""

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Does not do it yet, and too late to cancel it."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.work.append(partial(fn, *args, **kwargs))
        return future


@pytest.mark.parametrize("stream", [False, True])
def test_a_slot_is_free_after_a_client_left_before_its_request_was_begun(stream: bool) -> None:
    async def leave_early() -> int:
        thread, outcomes = _LateThread(), list[bool]()
        call: Any = PipelineCall(
            _Refusing(),
            REQUEST,
            lambda: outcomes.append(True),
            Unread(),
            lambda _seconds: None,
            stream=stream,
        )  # pyright: ignore[reportArgumentType]
        listening = asyncio.create_task(anext(call.events(thread)))
        while not thread.work:
            await asyncio.sleep(0)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        # On this thread: a request that is begun would wait here for ever.
        thread.work[0]()
        await asyncio.sleep(0)
        return len(outcomes)

    assert asyncio.run(leave_early()) == 1
