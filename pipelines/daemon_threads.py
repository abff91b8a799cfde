"""An executor whose threads end with the process; the threads of `concurrent.futures` can keep it alive
forever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
#: A call and the future of its result; None ends a thread.
_Work = tuple[Future[Any], Callable[[], Any]] | None


class DaemonThreads(Executor):
    """Up to `count` daemon threads, started when needed; `count` may be raised."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._work = queue.SimpleQueue[_Work]()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = list[threading.Thread]()
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of calls that have not started."""
        return self._work.qsize()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `Executor.submit`. Raises `RuntimeError` after `shutdown`."""
        future = Future[T]()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads are shut down")
            self._work.put((future, lambda: fn(*args, **kwargs)))
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self.count:
                thread = threading.Thread(
                    target=self._run, name=f"{self._name}-{len(self._threads) + 1}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Refuses new calls, and ends the threads after the submitted calls. `cancel_futures` cancels those
        that have not started; `wait` waits for the threads."""
        with self._lock:
            self._closed = True
            waiting = list[_Work]()
            with suppress(queue.Empty):
                while cancel_futures:
                    waiting.append(self._work.get_nowait())
            for _ in self._threads:
                self._work.put(None)
        for work in waiting:
            if work is not None:
                work[0].cancel()
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, call = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  # the future reports it
                    future.set_exception(error)
            del work, future, call
            with self._lock:
                if self._work.empty():
                    self._idle += 1
