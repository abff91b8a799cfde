"""The child: it opens one model, and answers requests until its client closes the channel or dies."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec
import numpy as np

from pipelines.daemon_threads import DaemonThreads
from pipelines.engine_process.messages import (
    CLIENT_PID,
    Abort,
    Append,
    Cancel,
    Chunk,
    ErrorRecord,
    Failed,
    Finished,
    Forget,
    Keep,
    NotOpened,
    Open,
    Opened,
    Stats,
    Stream,
    Submit,
    Taken,
    ToChild,
    ToClient,
    plain,
)
from pipelines.engine_process.recordings import with_recordings
from pipelines.errors import EngineCrashError, ErrorCode, NightjarError, SynthesisError
from pipelines.interpreter import serve_threads
from pipelines.ipc import Channel, close_all, share
from pipelines.registry import open_pipeline
from pipelines.request import AudioChunk, EngineInfo, EngineStats, Pipeline, PreparedRequest, Speech, engine_info
from pipelines.streams import End, IdStream, start_stream

log = logging.getLogger(__name__)

#: Between two messages with the engine's stats.
STATS_SECONDS = 0.02
#: Threads that start streams whose recording is encoded first, or whose text is read here. More would only share the device.
_STARTING_THREADS = 4
#: Exit status of a child whose client is gone.
ORPHANED = 3
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves the client at the other end of standard input, which started this process. Does not return."""
    faulthandler.enable()
    _end_with_client(int(os.environ.pop(CLIENT_PID)))
    # The client ends this process, once its work is done. A signal to all processes of a terminal or a service must not do it before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    status = 1
    try:
        status = EngineServer(Channel(connection, ToChild)).run()
    except OSError:
        status = ORPHANED
    except BaseException:
        log.exception("the engine's process failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # What still runs is a library that does not end.
        os._exit(status)


def _end_with_client(client: int) -> None:
    """Has the kernel kill this process when the thread that started it ends. A thread of this process would not do: a library may hold the
    interpreter for minutes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != client:
        os._exit(ORPHANED)


class EngineServer:
    """One pipeline and its channel.

    The reader's thread takes messages and ends the process when the client is gone. It starts streams that only have to be queued; a few
    threads start the others. The feeder submits requests, because `submit` may wait. The main thread delivers speech, so that the engine's
    threads do not wait for it. Chunks of a stream are sent by the thread that made them.
    """

    def __init__(self, channel: Channel[ToChild]) -> None:
        self._channel = channel
        self._outbox = channel.outbox("sender")
        self._open: queue.SimpleQueue[Open] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        #: Answers to deliver; None: the client closes.
        self._answers: queue.SimpleQueue[tuple[int, Future[Speech]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        #: Requests that the pipeline has not accepted: number -> whether it was aborted meanwhile.
        self._queued: dict[int, bool] = {}
        self._queued_ids: dict[int, str] = {}
        #: Streams that nobody has ended: number -> their request's id, and what ends them once they have begun.
        self._streams: dict[int, str] = {}
        self._ends: dict[int, End] = {}
        #: Of those whose text is open: what takes it once they have begun, and what came before.
        self._texts: dict[int, IdStream] = {}
        self._early: dict[int, list[Append]] = {}
        #: Those that requests name by their numbers.
        self._recordings: dict[int, bytes] = {}
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
            self._send(NotOpened(_record_of(error, "The model could not be opened")))
            self._outbox.wait()
            return 0
        serve_threads()
        threading.Thread(target=self._feed, name="feeder", args=(pipeline,), daemon=True).start()
        self._info = engine_info(pipeline)
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
        if isinstance(message, Submit | Stream):
            recordings = [self._recordings[number] for number in message.recordings]
            message = msgspec.structs.replace(message, request=with_recordings(message.request, recordings))
        if isinstance(message, Submit):
            with self._lock:
                self._queued[message.number] = False
                self._queued_ids[message.number] = message.request.request_id
            self._requests.put(message)
        elif isinstance(message, Abort):
            self._abort(message.request_id)
        elif isinstance(message, Stream):
            with self._lock:
                self._streams[message.number] = message.request.request_id
            if message.quick:
                self._start_stream(message)
            else:
                self._starters.submit(self._start_stream, message)
        elif isinstance(message, Append):
            self._append(message)
        elif isinstance(message, Cancel):
            self._end_stream(message.number)
        elif isinstance(message, Keep):
            self._recordings[message.number] = message.recording
        elif isinstance(message, Forget):
            for number in message.numbers:
                del self._recordings[number]
        elif isinstance(message, Open):
            self._open.put(message)
        else:
            self._answers.put(None)

    def _abort(self, request_id: str) -> None:
        with self._lock:
            for number, queued_id in self._queued_ids.items():
                if queued_id == request_id:
                    self._queued[number] = True
            streams = [number for number, one in self._streams.items() if one == request_id]
        for number in streams:
            self._end_stream(number)
        if self._pipeline is not None:
            self._pipeline.abort(request_id)

    def _feed(self, pipeline: Pipeline) -> None:
        while True:
            message = self._requests.get()
            number = message.number
            if self._queued[number]:
                future: Future[Speech] = Future()
                future.set_exception(_aborted())
            else:
                future = _submitted(pipeline, message)
            with self._lock:
                aborted = self._queued.pop(number)
                del self._queued_ids[number]
            if aborted:
                # The abort may have come before the pipeline knew the request.
                pipeline.abort(message.request.request_id)
            self._post(Taken(number))
            future.add_done_callback(lambda done, number=number: self._answers.put((number, done)))

    def _deliver(self, pipeline: Pipeline) -> None:
        """Sends answers and stats until the client closes."""
        while True:
            try:
                answer = self._answers.get(timeout=STATS_SECONDS)
                if answer is None:
                    return
                self._answer(*answer)
            except queue.Empty:
                pass
            if time.monotonic() >= self._stats_due_at and (stats := pipeline.stats()) != self._sent:
                self._stats_due_at = time.monotonic() + STATS_SECONDS
                self._sent = stats
                info = engine_info(pipeline)
                self._send(Stats(stats, None if info == self._info else info))
                self._info = info

    def _answer(self, number: int, future: Future[Speech]) -> None:
        try:
            speech = future.result()
            samples = share(np.ascontiguousarray(speech.samples, np.float32))
        except CancelledError:
            self._send(Failed(number, ErrorRecord.of(_aborted())))
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this request
            self._send(Failed(number, _record_of(error, "The engine failed")))
            return
        try:
            self._send(_made(number, speech), [samples])
        except (TypeError, ValueError, OverflowError) as error:
            self._send(Failed(number, _record_of(error, "The engine's answer cannot be sent")))
        finally:
            os.close(samples)

    def _start_stream(self, message: Stream) -> None:
        number, request = message.number, message.request
        with self._lock:
            if number not in self._streams:
                return
        assert self._pipeline is not None, "streams come after the model is open"
        try:
            wanted = request if isinstance(request, PreparedRequest) else request.request
            if message.text_open:
                end = self._start_text(number, wanted)
            else:
                end = start_stream(self._pipeline, wanted, lambda outcome: self._heard(number, outcome))
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this request
            self._heard(number, error)
            return
        with self._lock:
            wanted_still = number in self._streams
            if wanted_still:
                self._ends[number] = end
        if not wanted_still:
            end()

    def _start_text(self, number: int, wanted: Any) -> End:
        """Starts a stream and gives it the text that came meanwhile, before what comes from now on."""
        native: Any = self._pipeline
        stream: IdStream = native.start_ids_stream(wanted, lambda outcome: self._heard(number, outcome))
        while True:
            with self._lock:
                early = self._early.pop(number, ())
                if not early and number in self._streams:
                    self._texts[number] = stream
            if not early:
                return stream.end
            for message in early:
                stream.append(message.ids, message.final)

    def _append(self, message: Append) -> None:
        with self._lock:
            if message.number not in self._streams:
                return
            stream = self._texts.get(message.number)
            if stream is None:
                self._early.setdefault(message.number, []).append(message)
        if stream is not None:
            stream.append(message.ids, message.final)

    def _forget(self, number: int) -> str | None:
        """The stream is over; the id of its request where nobody knew that yet. Called inside the lock."""
        for kept in (self._ends, self._texts, self._early):
            kept.pop(number, None)
        return self._streams.pop(number, None)

    def _end_stream(self, number: int) -> None:
        """Nobody listens. One that has not begun does not begin; one that is being started ends when it is."""
        with self._lock:
            end = self._ends.get(number)
            self._forget(number)
        if end is not None:
            end()

    def _heard(self, number: int, outcome: AudioChunk | Exception) -> None:
        """Sends what comes of a stream, on the thread that made it."""
        if isinstance(outcome, Exception) or outcome.final:
            with self._lock:
                known = self._forget(number)
        else:
            known = self._streams.get(number)
        if known is None:
            return
        if isinstance(outcome, Exception):
            self._post(Failed(number, _record_of(outcome, "The engine failed")))
            return
        try:
            self._post_chunk(number, outcome)
        except (TypeError, ValueError, OverflowError, OSError) as error:
            self._post(Failed(number, _record_of(error, "The engine's answer cannot be sent")))

    def _post_chunk(self, number: int, chunk: AudioChunk) -> None:
        samples = np.ascontiguousarray(chunk.samples, np.float32).tobytes()
        made, descriptors = None, list[int]()
        if chunk.speech is not None:
            made = _made(number, chunk.speech)
            descriptors = [share(np.ascontiguousarray(chunk.speech.samples, np.float32))]
        try:
            self._post(Chunk(number, samples, chunk.sample_rate, chunk.final, chunk.text, made), descriptors)
        finally:
            close_all(descriptors)

    def _send(self, message: ToClient, descriptors: Sequence[int] = ()) -> None:
        """For the main thread, which waits for a client that does not read, rather than gather speech. Raises `OSError`."""
        self._outbox.post(self._channel.pack(message, len(descriptors)), descriptors)
        self._outbox.wait()

    def _post(self, message: ToClient, descriptors: Sequence[int] = ()) -> None:
        """For the other threads: they do not wait, and have nobody to raise an error to; the reader ends the process."""
        data = self._channel.pack(message, len(descriptors))
        try:
            self._outbox.post(data, descriptors)
        except OSError as error:
            log.warning("the client takes no messages: %s", error)


def _submitted(pipeline: Pipeline, message: Submit) -> Future[Speech]:
    try:
        request = message.request
        if isinstance(request, PreparedRequest):
            prepared: Any = pipeline
            return prepared.submit_prepared(request)
        return pipeline.submit(request.request)
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this request
        future: Future[Speech] = Future()
        future.set_exception(error)
        return future


def _made(number: int, speech: Speech) -> Finished:
    return Finished(number, speech.sample_rate, speech.text, speech.text_out, plain(speech.meta))


def _record_of(error: Exception, what: str) -> ErrorRecord:
    """An error as it travels. One that is not ours is a fault of a library: the log has its traceback."""
    if isinstance(error, NightjarError):
        return ErrorRecord.of(error)
    log.error("%s", what, exc_info=error)
    if what.startswith("The engine"):
        return ErrorRecord.of(SynthesisError(ErrorCode.SYNTH_ENGINE, f"{what}: {error!r}"))
    return ErrorRecord.of(EngineCrashError(ErrorCode.WORKER_CRASH, f"{what}: {error!r}", "See the log."))


def _aborted() -> SynthesisError:
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.")
