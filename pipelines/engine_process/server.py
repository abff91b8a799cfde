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
    RequestFailed,
    RequestRecord,
    SpeechMessage,
    Start,
    Stats,
    Taken,
    ToChild,
    ToClient,
)
from pipelines.errors import EngineCrashError, ErrorCode, NightjarError, SynthesisError
from pipelines.interpreter import serve_threads
from pipelines.ipc import Channel, ErrorRecord, share
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
    except OSError:
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
        self._open: queue.SimpleQueue[Open] = queue.SimpleQueue()
        #: Whole utterances to start, by their numbers.
        self._whole: queue.SimpleQueue[tuple[int, SynthesisRequest | PreparedRequest]] = queue.SimpleQueue()
        #: Ends of whole utterances to deliver; None: the client closes.
        self._answers: queue.SimpleQueue[tuple[int, Done | Failed] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._starters = DaemonThreads(_STARTING_THREADS, "starter")
        self._pipeline: Pipeline | None = None
        #: What the client was told last.
        self._sent = EngineStats()
        self._info = EngineInfo()
        self._stats_due_at = 0.0

    def run(self) -> int:
        """Serves until the client closes; the exit status. Raises `OSError` when the client is gone."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        wanted = self._open.get()
        try:
            pipeline = self._pipeline = open_pipeline(wanted.model, **wanted.options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client reports it
            self._send(NotOpened(ErrorRecord.of(_error_of(error, "The model could not be opened"))))
            self._channel.flush()
            return 0
        serve_threads()
        threading.Thread(target=self._feed, name="feeder", daemon=True).start()
        self._info = pipeline.info
        self._send(Opened(pipeline.name, pipeline.sample_rate, pipeline.capabilities, self._info))
        self._deliver(pipeline)
        pipeline.close()
        return 0

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive().message
                self._handle(message)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            log.warning("the client is gone: %s", error)
        except BaseException:
            log.exception("the reader failed")
        os._exit(ORPHANED)

    def _handle(self, message: ToChild) -> None:
        if isinstance(message, Start):
            request = _request_of(message, self._recordings)
            with self._lock:
                self._requests[message.number] = _Request()
            if not message.stream:
                self._whole.put((message.number, request))
            elif isinstance(request, PreparedRequest) and request.recording is None:
                self._start(message.number, request, stream=True)
            else:
                # A recording is encoded first, or a text that nobody has read is.
                self._starters.submit(self._start, message.number, request, stream=True)
        elif isinstance(message, Append):
            self._append(message)
        elif isinstance(message, Cancel):
            self._cancel(message.number)
        elif isinstance(message, Open):
            self._recordings = RecentRecordings[int, bytes](message.recording_bytes)
            self._open.put(message)
        else:
            self._answers.put(None)

    def _feed(self) -> None:
        while True:
            number, request = self._whole.get()
            self._start(number, request, stream=False)
            with suppress(OSError):  # the reader sees that too, and ends the process
                self._channel.send(Taken(number))

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
        """Sends answers and stats until the client closes."""
        while True:
            try:
                answer = self._answers.get(timeout=STATS_SECONDS)
                if answer is None:
                    return
                self._send_event(*answer, wait=True)
            except queue.Empty:
                pass
            if time.monotonic() >= self._stats_due_at and (stats := pipeline.stats()) != self._sent:
                self._stats_due_at = time.monotonic() + STATS_SECONDS
                self._sent = stats
                info = pipeline.info
                self._send(Stats(stats, None if info == self._info else info))
                self._info = info

    def _send_event(self, number: int, event: Event, wait: bool = False) -> None:
        """Sends what came of a request; where it cannot be sent, that."""
        message: ToClient
        shared: list[int] = []
        try:
            if isinstance(event, AudioChunk):
                samples = np.ascontiguousarray(event.samples, np.float32).tobytes()
                message = ChunkMessage(number, samples, event.sample_rate, event.text)
            elif isinstance(event, Done):
                speech = event.speech
                message = SpeechMessage(number, speech.sample_rate, speech.text, speech.text_out, speech.meta)
                if len(speech.samples):
                    shared.append(share(np.ascontiguousarray(speech.samples, np.float32)))
            else:
                message = RequestFailed(number, ErrorRecord.of(event.error))
        except (TypeError, ValueError, OSError) as error:
            message = _unsent(number, error)
        try:
            try:
                self._channel.send(message, shared)
            except (TypeError, ValueError, OverflowError) as error:
                self._channel.send(_unsent(number, error))
            if wait:
                self._channel.flush()
        except OSError as error:
            if wait:
                raise
            log.warning("the client takes no messages: %s", error)
        finally:
            for descriptor in shared:
                os.close(descriptor)

    def _send(self, message: ToClient) -> None:
        """For the main thread, which waits for a client that does not read, rather than gather speech.
        Raises `OSError`."""
        self._channel.send(message)
        self._channel.flush()


_decode = msgspec.msgpack.Decoder(RequestRecord | PreparedRequest).decode


def _request_of(message: Start, kept: RecentRecordings[int, bytes]) -> SynthesisRequest | PreparedRequest:
    """The request of a message, with its recordings."""
    record, recordings = _decode(message.request), []
    if message.recordings:
        for number, recording in message.recordings:
            if recording is not None:
                kept.keep(number, recording, len(recording))
            recordings.append(kept.get(number))
        kept.forget()
    if isinstance(record, PreparedRequest):
        return msgspec.structs.replace(record, recording=recordings[0]) if recordings else record
    left = iter(recordings)
    messages = [
        Message(role, kind, next(left) if content is None else content)
        for role, kind, content in record.messages
    ]
    return SynthesisRequest(
        record.request_id, tuple(messages), record.generation, record.seed, record.text_open
    )


def _unsent(number: int, error: Exception) -> RequestFailed:
    return RequestFailed(number, ErrorRecord.of(_error_of(error, "The engine's answer cannot be sent")))


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
