"""The engine process: opens one model, and serves its client until the client closes the channel or dies."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from pipelines.child_process import ORPHANED, parent_channel
from pipelines.daemon_threads import DaemonThreads
from pipelines.engine_process.messages import (
    Accepted,
    Answer,
    Append,
    Cancel,
    ChunkMessage,
    Import,
    NotOpened,
    Open,
    Opened,
    RequestFailed,
    SpeechMessage,
    Start,
    Stats,
    ToChild,
    ToClient,
    Wanted,
)
from pipelines.errors import EngineCrashError, ErrorCode, NightjarError, SynthesisError
from pipelines.interpreter import COLLECT_AFTER, serve_threads
from pipelines.ipc import Channel, LostArraysError
from pipelines.recording import AS_IT_IS, Reading, ReadsRecordings, Recording
from pipelines.registry import open_frontend, open_pipeline
from pipelines.request import (
    AnyRequest,
    AudioChunk,
    Done,
    EngineStats,
    Event,
    Failed,
    Handle,
    Message,
    Pipeline,
    PreparedRequest,
    Samples,
    Speech,
    SynthesisRequest,
)

log = logging.getLogger(__name__)

#: Minimum seconds between two messages with stats, and between two of which only the counter of energy differs.
STATS_SECONDS = 0.02
IDLE_STATS_SECONDS = 1.0
#: Threads that start streams whose text is tokenized first. More threads would not be faster.
_STARTING_THREADS = 4
#: Threads that start requests with a recording, so that many voices are encoded in a batch. More than a client's
#: whole utterances (`MAX_PENDING`), which wait for room in the engine.
CLONING_THREADS = 160


def main() -> None:
    """Serves the client at the other end of standard input, which started this process. Does not return."""
    faulthandler.enable()
    # Imports make many permanent objects.
    gc.set_threshold(COLLECT_AFTER)
    channel = parent_channel(ToChild)
    # Only the client ends this process; a signal to all processes of a terminal or a service must not.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    status = 1
    try:
        status = EngineServer(channel).run()
    except (EOFError, OSError):
        status = ORPHANED
    except BaseException:
        log.exception("the engine's process failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Does not wait for threads of libraries.
        os._exit(status)


@dataclass(slots=True)
class _Request:
    """A request that has not ended."""

    #: Set once the pipeline has started the request.
    handle: Handle | None = None
    #: Text that arrived before the pipeline had started the request.
    early_text: deque[Append] = field(default_factory=deque[Append])


#: Receives the data and their rate from the client for a reading; None: the file.
_Ask = Callable[[Reading | None], tuple[NDArray[Any], int]]


class _ClientsRecording(Recording):
    """A recording that the client's process has, and decodes."""

    def __init__(self, digest: str, ask: _Ask) -> None:
        self.digest = digest
        self._ask = ask

    @property
    def data(self) -> bytes:
        return self._ask(None)[0].tobytes()

    def read(self, reading: Reading = AS_IT_IS) -> tuple[Samples, int]:
        return self._ask(reading)


class EngineServer:
    """One pipeline and its channel.

    The reader thread handles messages, and ends the process when the client is gone. It starts streams that
    only have to be queued; a few threads start the others. The feeder thread starts whole utterances without
    recordings, because that may block. The main thread sends whole speech, so that the engine's threads do not
    wait for it. Events of a stream are sent by the thread that made them.
    """

    def __init__(self, channel: Channel[ToChild]) -> None:
        self._channel = channel
        #: Ends of whole utterances that are to be sent; None: the client closes the pipeline.
        self._answers = queue.SimpleQueue[tuple[int, Done | Failed] | None]()
        self._lock = threading.Lock()
        self._requests = dict[int, _Request]()
        self._feeder = DaemonThreads(1, "feeder")
        self._starters = DaemonThreads(_STARTING_THREADS, "starter")
        self._cloners = DaemonThreads(CLONING_THREADS, "cloner")
        self._questions = itertools.count()
        #: Answers of the client that threads wait for.
        self._asked = dict[int, Future[tuple[NDArray[Any], int]]]()
        self._pipeline: Pipeline | None = None

    def run(self) -> int:
        """Serves until the client closes; returns the exit status. Raises `EOFError` or `OSError` if the
        client ends before it sends `Open`."""
        wanted = self._channel.receive()
        if isinstance(wanted, Import):
            prepared = (partial(import_module, name) for name in wanted.modules)
            for prepare in (*prepared, partial(open_frontend, wanted.model)):
                # Opening the model raises the same error.
                with suppress(Exception):
                    prepare()
            wanted = self._channel.receive()
        if not isinstance(wanted, Open):
            return 0
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        try:
            pipeline = self._pipeline = open_pipeline(wanted.model, **wanted.options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client reports it
            self._send(NotOpened(_error_of(error, "The model could not be opened")), wait=True)
            return 0
        serve_threads()
        modules = [name for name in sys.modules if name.startswith(("pipelines", "kernels"))]
        self._send(Opened(pipeline.name, pipeline.sample_rate, pipeline.capabilities, pipeline.info, modules))
        self._deliver(pipeline)
        pipeline.close()
        return 0

    def _read(self) -> None:
        try:
            while True:
                try:
                    self._handle(self._channel.receive())
                except LostArraysError as lost:
                    self._asked.pop(lost.args[0]["wanted"]).set_exception(lost.error)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            log.warning("the client is gone: %s", error)
        except BaseException:
            log.exception("the reader failed")
        os._exit(ORPHANED)

    def _handle(self, message: ToChild) -> None:
        if isinstance(message, Start):
            number = message.number
            stream = message.stream
            with self._lock:
                self._requests[number] = _Request()
            request = self._request_of(message)
            awaited = bool(message.recordings) or not stream
            start = partial(self._start, number, request, stream, awaited)
            if message.recordings:
                self._cloners.submit(start)
            elif not stream:
                self._feeder.submit(start)
            elif isinstance(request, PreparedRequest):
                start()
            else:
                self._starters.submit(start)
        elif isinstance(message, Answer):
            asked = self._asked.pop(message.wanted)
            if isinstance(message.data, NightjarError):
                asked.set_exception(message.data)
            else:
                asked.set_result((message.data, message.sample_rate))
        elif isinstance(message, Append):
            self._append(message)
        elif isinstance(message, Cancel):
            # A request that is not started yet is never started; one that is being started is cancelled once it has
            # a handle.
            with self._lock:
                request = self._requests.pop(message.number, None)
            if request is not None and request.handle is not None:
                request.handle.cancel()
        else:
            self._answers.put(None)

    def _request_of(self, message: Start) -> AnyRequest:
        """The request of a message, with its recordings."""
        record = message.request
        recordings = [
            _ClientsRecording(digest, partial(self._ask, message.number, place))
            for place, digest in enumerate(message.recordings)
        ]
        if isinstance(record, PreparedRequest):
            return msgspec.structs.replace(record, recording=recordings[0]) if recordings else record
        left = iter(recordings)
        messages = tuple(
            Message(role, kind, next(left) if content is None else content)
            for role, kind, content in record.messages
        )
        return SynthesisRequest(record.request_id, messages, *astuple(record)[2:])

    def _ask(self, number: int, place: int, reading: Reading | None) -> tuple[NDArray[Any], int]:
        """Asks the client for a recording of a request, and waits for the answer. The process ends with the
        client, so no thread waits for ever."""
        question = next(self._questions)
        answer = self._asked[question] = Future()
        self._send(Wanted(question, number, place, reading))
        return answer.result()

    def _start(self, number: int, request: AnyRequest, stream: bool, awaited: bool) -> None:
        """Starts a request, and appends the text that has arrived meanwhile, unless it was cancelled. `awaited`: the
        client gets `Accepted`."""
        assert self._pipeline is not None, "requests come after the model is open"
        try:
            if number not in self._requests:
                return
            if isinstance(request, SynthesisRequest) and not isinstance(self._pipeline, ReadsRecordings):
                messages = (
                    msgspec.structs.replace(one, content=one.content.data)
                    if isinstance(one.content, Recording)
                    else one
                    for one in request.messages
                )
                request = replace(request, messages=tuple(messages))
            handle = self._pipeline.start(
                request, lambda event: self._on_event(number, event, stream), stream
            )
            while True:
                with self._lock:
                    started = self._requests.get(number)
                    if started is not None and not started.early_text:
                        started.handle = handle
                        return
                    early = None if started is None else started.early_text.popleft()
                if early is None:  # it was cancelled or has ended meanwhile
                    handle.cancel()
                    return
                handle.append(early.text, early.final)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this request
            self._on_event(number, Failed(_error_of(error, "The engine failed")), stream)
        finally:
            if awaited:
                self._send(Accepted(number))

    def _append(self, message: Append) -> None:
        with self._lock:
            request = self._requests.get(message.number)
            if request is None:
                return
            handle = request.handle
            if handle is None:
                request.early_text.append(message)
                return
        try:
            handle.append(message.text, message.final)
        except NightjarError as error:
            self._on_event(message.number, Failed(error), stream=True)
            handle.cancel()

    def _on_event(self, number: int, event: Event, stream: bool) -> None:
        """Handles an event of a request, on the thread that made it."""
        if isinstance(event, AudioChunk):
            if number in self._requests:
                self._send_event(number, event)
            return
        with self._lock:
            known = self._requests.pop(number, None)
        if known is None:
            return
        if stream:
            self._send_event(number, event)
        else:
            self._answers.put((number, event))

    def _deliver(self, pipeline: Pipeline) -> None:
        """Sends whole speech and stats until the client closes. Waits for a client that reads slowly instead
        of buffering speech."""
        sent = EngineStats()
        sent_at = 0.0
        while True:
            with suppress(queue.Empty):
                if (answer := self._answers.get(timeout=STATS_SECONDS)) is None:
                    return
                self._send_event(*answer, wait=True)
            if (now := time.monotonic()) < sent_at + STATS_SECONDS:
                continue
            stats = pipeline.stats()
            is_same = replace(stats, joules=sent.joules) == sent
            if stats != sent and not (is_same and now < sent_at + IDLE_STATS_SECONDS):
                sent = stats
                sent_at = now
                self._send(Stats(stats, pipeline.info), wait=True)

    def _send_event(self, number: int, event: Event, wait: bool = False) -> None:
        """Sends an event of a request. If that fails, sends the failure instead."""
        try:
            if isinstance(event, Failed):
                message = RequestFailed(number, event.error)
            else:
                made = event.speech if isinstance(event, Done) else event
                made = replace(made, samples=np.ascontiguousarray(made.samples, np.float32))
                message = (
                    SpeechMessage(number, made) if isinstance(made, Speech) else ChunkMessage(number, made)
                )
            self._send(message, wait)
        except (TypeError, ValueError, OverflowError, OSError) as error:
            unsent = _error_of(error, "The engine's answer cannot be sent")
            self._send(RequestFailed(number, unsent), wait)

    def _send(self, message: ToClient, wait: bool = False) -> None:
        """Sends a message. Does nothing if the client is gone: the reader then ends the process."""
        with suppress(ConnectionError):
            self._channel.send(message, wait)


def _error_of(error: Exception, what: str) -> NightjarError:
    """The error as a `NightjarError`. An unexpected one is logged with its traceback."""
    if isinstance(error, NightjarError):
        return error
    log.error("%s", what, exc_info=error)
    if what.startswith("The engine"):
        return SynthesisError(ErrorCode.SYNTH_ENGINE, f"{what}: {error!r}")
    return EngineCrashError(ErrorCode.WORKER_CRASH, f"{what}: {error!r}", "See the log.")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
