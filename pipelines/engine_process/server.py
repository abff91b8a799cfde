"""The child: it opens one model, and answers requests until its client closes the channel or dies."""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pipelines.child_process import ORPHANED, parent_channel
from pipelines.daemon_threads import DaemonThreads
from pipelines.engine_process.messages import (
    Append,
    Cancel,
    ChunkMessage,
    NotOpened,
    Open,
    Opened,
    RecentRecordings,
    Recording,
    RequestFailed,
    SpeechMessage,
    Start,
    Stats,
    Taken,
    ToChild,
    ToClient,
)
from pipelines.errors import EngineCrashError, ErrorCode, NightjarError, SynthesisError
from pipelines.interpreter import serve_threads
from pipelines.ipc import Channel, ErrorRecord, close_all, share
from pipelines.registry import open_pipeline
from pipelines.request import (
    AudioChunk,
    Done,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Handle,
    Message,
    Pipeline,
    PreparedRequest,
    SynthesisRequest,
)

log = logging.getLogger(__name__)

#: Between two messages with the engine's stats.
STATS_SECONDS = 0.02
#: Threads that start streams whose recording is encoded first, or whose text is read here. More would only
#: share the device.
_STARTING_THREADS = 4


def main() -> None:
    """Serves the client at the other end of standard input, which started this process. Does not return."""
    faulthandler.enable()
    channel = parent_channel(ToChild)
    # The client ends this process, once its work is done. A signal to all processes of a terminal or a
    # service must not do it before.
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
        # What still runs is a library that does not end.
        os._exit(status)


@dataclass(slots=True)
class _Request:
    """A request that nobody has ended."""

    #: What the pipeline gave when it had begun.
    handle: Handle | None = None
    #: Text that came before.
    early: list[Append] = field(default_factory=list[Append])


class EngineServer:
    """One pipeline and its channel.

    The reader's thread takes messages and ends the process when the client is gone. It starts streams that
    only have to be queued; a few threads start the others. The feeder starts whole utterances, because
    that may wait. The main thread delivers speech, so that the engine's threads do not wait for it. What
    comes of a stream is sent by the thread that made it.
    """

    def __init__(self, channel: Channel[ToChild]) -> None:
        self._channel = channel
        #: Ends of whole utterances to deliver; None: the client closes.
        self._answers: queue.SimpleQueue[tuple[int, Done | Failed] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._feeder, self._starters = DaemonThreads(1, "feeder"), DaemonThreads(_STARTING_THREADS, "starter")
        self._pipeline: Pipeline | None = None
        #: What the client was told last.
        self._sent = EngineStats()
        self._info = EngineInfo()
        self._stats_due_at = 0.0

    def run(self) -> int:
        """Serves until the client closes; the exit status. Raises `EOFError` or `OSError` when the client
        is gone before it says what to open."""
        wanted = self._channel.receive().message
        if not isinstance(wanted, Open):
            return 0
        self._recordings = RecentRecordings[int, bytes](wanted.recording_bytes)
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        try:
            pipeline = self._pipeline = open_pipeline(wanted.model, **wanted.options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client reports it
            self._send(
                NotOpened(ErrorRecord.of(_error_of(error, "The model could not be opened"))), wait=True
            )
            return 0
        serve_threads()
        self._info = pipeline.info
        self._send(Opened(pipeline.name, pipeline.sample_rate, pipeline.capabilities, self._info))
        self._deliver(pipeline)
        pipeline.close()
        return 0

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._channel.receive().message)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            log.warning("the client is gone: %s", error)
        except BaseException:
            log.exception("the reader failed")
        os._exit(ORPHANED)

    def _handle(self, message: ToChild) -> None:
        if isinstance(message, Start):
            with self._lock:
                self._requests[message.number] = _Request()
            if (request := _request_of(message, self._recordings)) is None:
                reason = "The engine's process does not have a recording of the request."
                error = SynthesisError(ErrorCode.SYNTH_ENGINE, reason, "See the log.")
                log.error("request %d names an unknown recording", message.number)
                self._heard(message.number, Failed(error), message.stream)
            elif not message.stream:
                self._feeder.submit(self._feed, message.number, request)
            elif isinstance(request, PreparedRequest) and request.recording is None:
                self._start(message.number, request, stream=True)
            else:
                # A recording is encoded first, or a text that nobody has read is.
                self._starters.submit(self._start, message.number, request, stream=True)
        elif isinstance(message, Recording):
            self._recordings.keep(message.number, message.data, len(message.data))
        elif isinstance(message, Append):
            self._append(message)
        elif isinstance(message, Cancel):
            self._cancel(message.number)
        else:
            self._answers.put(None)

    def _feed(self, number: int, request: SynthesisRequest | PreparedRequest) -> None:
        self._start(number, request, stream=False)
        self._send(Taken(number))

    def _start(self, number: int, request: SynthesisRequest | PreparedRequest, stream: bool) -> None:
        """Starts a request, unless it was cancelled meanwhile."""
        if number not in self._requests:
            return
        assert self._pipeline is not None, "requests come after the model is open"
        try:
            handle = self._pipeline.start(request, lambda event: self._heard(number, event, stream), stream)
            self._started(number, handle)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this request
            self._heard(number, Failed(_error_of(error, "The engine failed")), stream)

    def _started(self, number: int, handle: Handle) -> None:
        """Gives a request the text that came meanwhile, before what comes from now on."""
        while True:
            with self._lock:
                request = self._requests.get(number)
                early = [] if request is None else request.early
                if request is not None:
                    request.early = []
                    if not early:
                        request.handle = handle
                        return
            if request is None:  # cancelled, or over
                handle.cancel()
                return
            for message in early:
                handle.append(message.text, message.final)

    def _append(self, message: Append) -> None:
        with self._lock:
            request = self._requests.get(message.number)
            if request is None:
                return
            handle = request.handle
            if handle is None:
                request.early.append(message)
                return
        try:
            handle.append(message.text, message.final)
        except NightjarError as error:
            self._heard(message.number, Failed(error), stream=True)
            handle.cancel()

    def _cancel(self, number: int) -> None:
        """Nobody waits. A request that has not begun does not begin; one that is being started ends when
        it is."""
        with self._lock:
            request = self._requests.pop(number, None)
        if request is not None and request.handle is not None:
            request.handle.cancel()

    def _heard(self, number: int, event: Event, stream: bool) -> None:
        """What comes of a request, on the thread that made it."""
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
        """Sends answers and stats until the client closes. It waits for a client that does not read, rather
        than gather speech."""
        while True:
            with suppress(queue.Empty):
                if (answer := self._answers.get(timeout=STATS_SECONDS)) is None:
                    return
                self._send_event(*answer, wait=True)
            if time.monotonic() >= self._stats_due_at and (stats := pipeline.stats()) != self._sent:
                self._stats_due_at = time.monotonic() + STATS_SECONDS
                self._sent = stats
                info = pipeline.info
                self._send(Stats(stats, None if info == self._info else info), wait=True)
                self._info = info

    def _send_event(self, number: int, event: Event, wait: bool = False) -> None:
        """Sends what came of a request; where it cannot be sent, that."""
        shared: list[int] = []
        try:
            if isinstance(event, Done) and len(event.speech.samples):
                shared.append(share(np.ascontiguousarray(event.speech.samples, np.float32)))
            self._send(_message_of(number, event), shared, wait=wait)
        except (TypeError, ValueError, OverflowError, OSError) as error:
            unsent = Failed(_error_of(error, "The engine's answer cannot be sent"))
            self._send(_message_of(number, unsent), wait=wait)
        finally:
            close_all(shared)

    def _send(self, message: ToClient, shared: Sequence[int] = (), *, wait: bool = False) -> None:
        """Sends a message, unless the client is gone: the reader sees that too, and ends the process."""
        with suppress(ConnectionError):
            self._channel.send(message, shared)
            if wait:
                self._channel.flush()


def _message_of(number: int, event: Event) -> ToClient:
    """What came of a request as it travels, a speech without its samples."""
    if isinstance(event, AudioChunk):
        samples = np.ascontiguousarray(event.samples, np.float32).tobytes()
        return ChunkMessage(number, samples, event.sample_rate, event.text)
    if isinstance(event, Done):
        speech = event.speech
        return SpeechMessage(number, speech.sample_rate, speech.text, speech.text_out, speech.meta)
    return RequestFailed(number, ErrorRecord.of(event.error))


def _request_of(
    message: Start, kept: RecentRecordings[int, bytes]
) -> SynthesisRequest | PreparedRequest | None:
    """The request of a message, with its recordings; None where one of them is unknown."""
    record, found = message.request, [kept.get(number) for number in message.recordings]
    kept.forget()
    recordings = [recording for recording in found if recording is not None]
    if len(recordings) < len(found):
        return None
    if isinstance(record, PreparedRequest):
        return msgspec.structs.replace(record, recording=recordings[0]) if recordings else record
    left = iter(recordings)
    messages = tuple(
        Message(role, kind, next(left) if content is None else content)
        for role, kind, content in record.messages
    )
    return SynthesisRequest(record.request_id, messages, record.generation, record.seed, record.text_open)


def _error_of(error: Exception, what: str) -> NightjarError:
    """An error in our words. One that is not ours is a fault of a library: the log has its traceback."""
    if isinstance(error, NightjarError):
        return error
    log.error("%s", what, exc_info=error)
    if what.startswith("The engine"):
        return SynthesisError(ErrorCode.SYNTH_ENGINE, f"{what}: {error!r}")
    return EngineCrashError(ErrorCode.WORKER_CRASH, f"{what}: {error!r}", "See the log.")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
