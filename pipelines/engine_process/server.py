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
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec
import numpy as np

from pipelines.engine_process.messages import (
    CLIENT_PID,
    Abort,
    Cancel,
    Chunk,
    ErrorRecord,
    Failed,
    Finished,
    NotOpened,
    Open,
    Opened,
    Stats,
    Stream,
    Submit,
    Taken,
    ToChild,
    plain,
)
from pipelines.errors import EngineCrashError, ErrorCode, NightjarError, SynthesisError
from pipelines.ipc import Channel, close_all, share
from pipelines.registry import open_pipeline
from pipelines.request import AudioChunk, EngineStats, Pipeline, PreparedRequest, Speech, engine_info

log = logging.getLogger(__name__)

#: Between two messages with the engine's stats.
STATS_SECONDS = 0.1
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

    The reader's thread takes messages and ends the process when the client is gone. The feeder submits requests, because `submit` may
    wait. The main thread delivers speech, so that the engine's threads do not wait for it.
    """

    def __init__(self, channel: Channel[ToChild]) -> None:
        self._channel = channel
        self._open: queue.SimpleQueue[Open] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        #: Answers to deliver; None: the client closes.
        self._answers: queue.SimpleQueue[tuple[int, Future[Speech]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        #: Requests that the pipeline has not accepted: number -> whether it was aborted meanwhile.
        self._queued: dict[int, bool] = {}
        self._queued_ids: dict[int, str] = {}
        self._streams: set[int] = set()
        self._pipeline: Pipeline | None = None
        self._sent = EngineStats()
        self._stats_due_at = 0.0

    def run(self) -> int:
        """Serves until the client closes; the exit status. Raises `OSError` when the client is gone."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        wanted = self._open.get()
        try:
            pipeline = self._pipeline = open_pipeline(wanted.model, **wanted.options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client reports it
            self._channel.send(NotOpened(_record_of(error, "The model could not be opened")))
            return 0
        threading.Thread(target=self._feed, name="feeder", args=(pipeline,), daemon=True).start()
        self._channel.send(Opened(pipeline.name, pipeline.sample_rate, pipeline.capabilities, engine_info(pipeline)))
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
        if isinstance(message, Submit):
            with self._lock:
                self._queued[message.number] = False
                self._queued_ids[message.number] = message.request.request_id
            self._requests.put(message)
        elif isinstance(message, Abort):
            self._abort(message.request_id)
        elif isinstance(message, Stream):
            self._streams.add(message.number)
            threading.Thread(target=self._stream, name=f"stream-{message.number}", args=(message,), daemon=True).start()
        elif isinstance(message, Cancel):
            self._streams.discard(message.number)
        elif isinstance(message, Open):
            self._open.put(message)
        else:
            self._answers.put(None)

    def _abort(self, request_id: str) -> None:
        with self._lock:
            for number, queued_id in self._queued_ids.items():
                if queued_id == request_id:
                    self._queued[number] = True
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
            self._send(Taken(number))
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
                self._channel.send(Stats(stats))

    def _answer(self, number: int, future: Future[Speech]) -> None:
        try:
            speech = future.result()
            samples = share(np.ascontiguousarray(speech.samples, np.float32))
        except CancelledError:
            self._channel.send(Failed(number, ErrorRecord.of(_aborted())))
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this request
            self._channel.send(Failed(number, _record_of(error, "The engine failed")))
            return
        try:
            self._channel.send(_made(number, speech), [samples])
        except (TypeError, ValueError, OverflowError) as error:
            self._channel.send(Failed(number, _record_of(error, "The engine's answer cannot be sent")))
        finally:
            os.close(samples)

    def _stream(self, message: Stream) -> None:
        number = message.number
        chunks: Iterator[AudioChunk] | None = None
        try:
            assert self._pipeline is not None, "streams come after the model is open"
            chunks = self._pipeline.stream(message.request.request)
            self._send(Taken(number))
            for chunk in chunks:
                if number not in self._streams:
                    return
                self._send_chunk(number, chunk)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to this request
            self._send(Failed(number, _record_of(error, "The engine failed")))
        finally:
            self._streams.discard(number)
            if (close := getattr(chunks, "close", None)) is not None:
                close()

    def _send_chunk(self, number: int, chunk: AudioChunk) -> None:
        samples = np.ascontiguousarray(chunk.samples, np.float32).tobytes()
        made, descriptors = None, list[int]()
        if chunk.speech is not None:
            made = _made(number, chunk.speech)
            descriptors = [share(np.ascontiguousarray(chunk.speech.samples, np.float32))]
        try:
            self._send(Chunk(number, samples, chunk.sample_rate, chunk.final, chunk.text, made), descriptors)
        finally:
            close_all(descriptors)

    def _send(self, message: Any, descriptors: list[int] | None = None) -> None:
        """For threads beside the main one: they have nobody to raise an error to, and the reader ends the process."""
        try:
            self._channel.send(message, descriptors or ())
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
    return ErrorRecord.of(EngineCrashError(ErrorCode.WORKER_CRASH, f"{what}: {error!r}", "See the worker's log."))


def _aborted() -> SynthesisError:
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted.")
