"""The pipeline of an engine process, as the process that started it sees it. Imports no model library."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from pipelines.engine_process.messages import (
    CLIENT_PID,
    Abort,
    Cancel,
    Chunk,
    Close,
    Failed,
    Finished,
    Open,
    Opened,
    RequestRecord,
    Stats,
    Stream,
    Submit,
    Taken,
    ToClient,
)
from pipelines.errors import ConfigError, EngineCrashError, ErrorCode, InputError, ModelError, NightjarError, SynthesisError
from pipelines.ipc import Channel, close_all, read_shared
from pipelines.registry import open_frontend
from pipelines.request import AudioChunk, EngineStats, Frontend, Speech, SynthesisRequest
from pipelines.validation import no_character

log = logging.getLogger(__name__)

#: The child's program, behind the interpreter.
PROGRAM = ("-m", "pipelines.engine_process")
#: Requests on their way to the child's `submit`, before that of the client blocks. Enough that the child never waits for one.
ON_THE_WAY = 32
#: How long `close` waits for the child, which may hang, before it kills it.
CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class _Request:
    request_id: str
    #: Of a whole utterance.
    future: Future[Speech] | None = None
    #: Of a stream.
    heard: queue.SimpleQueue[AudioChunk | NightjarError] = field(default_factory=queue.SimpleQueue[AudioChunk | NightjarError])

    def fail(self, error: NightjarError) -> None:
        if self.future is not None:
            self.future.set_exception(error)
        else:
            self.heard.put(error)


class EngineProcess:
    """Implements `pipelines.request.Pipeline` with a child process that opens the model.

    The constructor returns when the model is open. It raises what `open_pipeline` raised in the child, and `EngineCrashError` where the
    child died. When the child dies later, requests in it fail with `EngineCrashError` (`worker.crash`), `stats` says `broken`, and
    `submit` raises `ModelError` (`model.unreachable`). The child ends with this process, however that ends.
    """

    def __init__(self, model: str, options: dict[str, Any] | None = None, program: Sequence[str] = PROGRAM) -> None:
        self._program = program
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        #: Requests without an end.
        self._requests: dict[int, _Request] = {}
        #: Those that the child's pipeline has not accepted.
        self._on_the_way: set[int] = set()
        self._stats = EngineStats()
        self._closed = False
        #: The child is gone, and its requests are told.
        self._failing = False
        #: Why `submit` takes nothing more.
        self._over: NightjarError | None = None
        self._opened: Future[Opened] = Future()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox.put(Open(model, options or {}))
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends the child together with this thread.
        self._host = threading.Thread(target=self._run, name="engine-host", daemon=True)
        self._host.start()
        try:
            opened = self._opened.result()
        except BaseException:
            self.close()
            raise
        self.name = opened.name
        self.sample_rate = opened.sample_rate
        self.capabilities = opened.capabilities
        self.info = opened.info
        self._frontend: Frontend | None = None
        threading.Thread(target=self._open_frontend, args=(model,), name="engine-frontend", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._process is None else self._process.pid

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        """Sends a request to the child, prepared as far as its family can do that here; see `Pipeline.submit`. What the child refuses comes
        as the future's error.

        Raises `SynthesisError` (`synth.aborted`) once it is closed, and `ModelError` (`model.unreachable`) when the child is gone.
        """
        try:
            wanted = RequestRecord.of(request) if self._frontend is None else self._frontend.prepare(request)
        except OverflowError as error:
            raise _too_large() from error
        future: Future[Speech] = Future()
        future.set_running_or_notify_cancel()
        self._send(Submit(next(self._numbers), wanted), _Request(request.request_id, future))
        return future

    def stream(self, request: SynthesisRequest) -> Iterator[AudioChunk]:
        """Audio as it is made. The request goes to the child at once; closing the iterator ends it. See `Pipeline.stream`."""
        if not self.capabilities.streaming:
            raise InputError(ErrorCode.INPUT_UNSUPPORTED, f"The model {self.name} cannot stream.", "Ask for whole speech.")
        number, entry = next(self._numbers), _Request(request.request_id)
        self._send(Stream(number, RequestRecord.of(request)), entry)
        return _ChunkStream(entry, lambda: self._cancel(number))

    def abort(self, request_id: str) -> None:
        """Ends a request at once; the child hears of it."""
        with self._changed:
            numbers = [number for number, entry in self._requests.items() if entry.request_id == request_id]
            entries = [self._requests.pop(number) for number in numbers]
        if entries:
            self._outbox.put(Abort(request_id))
        for entry in entries:
            entry.fail(SynthesisError(ErrorCode.SYNTH_ABORTED, "The request was aborted."))

    def stats(self) -> EngineStats:
        """The child's last message about its engine; `broken` when the child is gone."""
        return replace(self._stats, running=0, waiting=0, state="broken") if self._over is not None else self._stats

    def close(self) -> None:
        """Ends the child, by force when it does not end in `CLOSE_SECONDS`; see `Pipeline.close`."""
        with self._changed:
            self._closed = True
            self._over = self._over or _closed()
            entries = list(self._requests.values())
            self._requests.clear()
            self._changed.notify_all()
        self._outbox.put(Close())
        for entry in entries:
            entry.fail(_closed())
        if threading.current_thread() is self._host:
            self._kill()
            return
        self._host.join(CLOSE_SECONDS)
        if self._host.is_alive():
            log.error("the engine's process did not end in time and is killed")
            self._kill()
            self._host.join(CLOSE_SECONDS)

    def _send(self, message: Submit | Stream, entry: _Request) -> None:
        """Hands a request to the child once there is room."""
        with self._changed:
            # The host's thread is the one that makes room.
            if threading.current_thread() is not self._host:
                self._changed.wait_for(lambda: self._over or (len(self._on_the_way) < ON_THE_WAY and not self._failing))
            if self._over is not None:
                raise self._over
            self._requests[message.number] = entry
            self._on_the_way.add(message.number)
            # Inside the lock, so that no abort overtakes its request.
            self._outbox.put(message)

    def _open_frontend(self, model: str) -> None:
        """Reads the family's frontend, if it has one. Until then, and without one, the child prepares whole requests."""
        try:
            self._frontend = open_frontend(model)
        except NightjarError as error:
            log.warning("requests are prepared by the engine's process: %s", error)

    def _cancel(self, number: int) -> None:
        with self._changed:
            known = self._requests.pop(number, None)
        if known is not None:
            self._outbox.put(Cancel(number))

    def _run(self) -> None:
        """The host's thread: the child's life from start to end."""
        reason = "it could not be started"
        try:
            process, channel = self._start()
            sender = threading.Thread(target=self._run_sender, args=(channel,), name="engine-sender", daemon=True)
            sender.start()
            try:
                while True:
                    received = channel.receive()
                    self._take(received.message, received.descriptors)
            except (EOFError, OSError, msgspec.MsgspecError) as error:
                if not isinstance(error, EOFError | ConnectionResetError):
                    log.warning("the channel to the engine's process broke: %s", error)
            self._kill()
            reason = _ending(process.wait())
            channel.shut_down()
            self._outbox.put(None)
            sender.join()
            channel.close()
        except Exception as error:
            log.exception("the engine's host failed")
            self._kill()
            reason = f"its client failed: {error!r}"
        finally:
            self._end(reason)

    def _start(self) -> tuple[subprocess.Popen[bytes], Channel[ToClient]]:
        flags = ["-P"] if sys.flags.safe_path else []
        ours, theirs = socket.socketpair()
        with theirs:
            # The socket is the child's standard input. What libraries print goes to standard error. A session of its own keeps the
            # terminal's signals away.
            self._process = subprocess.Popen(
                [sys.executable, *flags, *self._program],
                stdin=theirs.fileno(),
                stdout=2,
                env={**os.environ, CLIENT_PID: str(os.getpid())},
                start_new_session=True,
            )
        return self._process, Channel(ours, ToClient)

    def _run_sender(self, channel: Channel[ToClient]) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                channel.send(message)
            except (TypeError, ValueError, OverflowError) as error:
                self._refuse(message, error)
            except OSError:
                # The host's thread sees that too, and tells everyone.
                return

    def _refuse(self, message: Any, error: Exception) -> None:
        """A message that cannot be sent."""
        if isinstance(message, Open):
            advice = "Give numbers, texts and lists of them."
            self._opened.set_exception(ConfigError(ErrorCode.CONFIG_INVALID, f"An option of the model cannot be used: {error}.", advice))
        elif isinstance(error, OverflowError):
            self._fail(message.number, _too_large())
        elif isinstance(error, UnicodeEncodeError):
            self._fail(message.number, no_character())
        else:
            advice = "Give shorter recordings."
            self._fail(message.number, InputError(ErrorCode.INPUT_TOO_LONG, "The request is too long to be sent.", advice))

    def _take(self, message: ToClient, descriptors: list[int]) -> None:
        """Handles a message of the child."""
        if isinstance(message, Finished):
            self._take_speech(message, descriptors)
        elif isinstance(message, Failed):
            self._fail(message.number, message.error.error)
        elif isinstance(message, Taken):
            self._forget(message.number)
        elif isinstance(message, Stats):
            self._stats = message.stats
        elif isinstance(message, Chunk):
            self._take_chunk(message, descriptors)
        elif isinstance(message, Opened):
            self._opened.set_result(message)
        else:
            self._opened.set_exception(message.error.error)

    def _take_speech(self, message: Finished, descriptors: list[int]) -> None:
        entry = self._answered(message.number)
        if entry is None or entry.future is None:
            close_all(descriptors)
            return
        try:
            speech = _speech(message, descriptors[0])
        except OSError as error:
            entry.fail(SynthesisError(ErrorCode.SYNTH_ENGINE, f"The speech could not be read from shared memory: {error}."))
        else:
            entry.future.set_result(speech)

    def _take_chunk(self, message: Chunk, descriptors: list[int]) -> None:
        with self._changed:
            entry = self._requests.get(message.number)
            if message.final:
                self._requests.pop(message.number, None)
        if entry is None:
            close_all(descriptors)
            return
        speech = None if message.speech is None else _speech(message.speech, descriptors[0])
        samples = np.frombuffer(message.samples, np.float32)
        entry.heard.put(AudioChunk(samples, message.sample_rate, message.final, message.text, speech))

    def _answered(self, number: int) -> _Request | None:
        """Takes a request out; None for one that was aborted."""
        self._forget(number)
        with self._changed:
            return self._requests.pop(number, None)

    def _fail(self, number: int, error: NightjarError) -> None:
        if (entry := self._answered(number)) is not None:
            entry.fail(error)

    def _forget(self, number: int) -> None:
        """The request is no longer on its way."""
        with self._changed:
            if number in self._on_the_way:
                self._on_the_way.discard(number)
                self._changed.notify()

    def _kill(self) -> None:
        """Kills the child and what it started. One that is gone is no error."""
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self, reason: str) -> None:
        """The child is gone. Its requests hear of it first, so that whoever had one in it knows that before `submit` says anything."""
        with self._changed:
            self._failing = True
            entries = list(self._requests.values())
            self._requests.clear()
        advice = "See the worker's log. The model may need more memory than there is."
        crash = EngineCrashError(ErrorCode.WORKER_CRASH, f"The engine's process ended: {reason}.", advice)
        if not self._closed:
            log.error("the engine's process ended: %s; requests in it: %d", reason, len(entries))
        if not self._opened.done():
            self._opened.set_exception(crash)
        for entry in entries:
            entry.fail(crash)
        with self._changed:
            gone = ModelError(ErrorCode.MODEL_UNREACHABLE, f"The engine's process has ended: {reason}.", "The model is opened again.")
            self._over = self._over or gone
            self._changed.notify_all()


class _ChunkStream:
    """Iterates over the chunks of one stream. Ends it when it is closed or forgotten."""

    def __init__(self, entry: _Request, cancel: Any) -> None:
        self._entry = entry
        self._cancel = cancel
        self._over = False

    def __iter__(self) -> Iterator[AudioChunk]:
        return self

    def __next__(self) -> AudioChunk:
        if self._over:
            raise StopIteration
        heard = self._entry.heard.get()
        self._over = isinstance(heard, NightjarError) or heard.final
        if isinstance(heard, NightjarError):
            raise heard
        return heard

    def close(self) -> None:
        """Ends the stream. May be called more than once."""
        self._over = True
        self._cancel()

    def __del__(self) -> None:
        self.close()


def _speech(message: Finished, descriptor: int) -> Speech:
    return Speech(read_shared(descriptor), message.sample_rate, message.text, message.text_out, message.meta)


def _too_large() -> InputError:
    return InputError(ErrorCode.INPUT_UNSUPPORTED, "A number of the request has more than 64 bits.", "Give a smaller one.")


def _closed() -> SynthesisError:
    return SynthesisError(ErrorCode.SYNTH_ABORTED, "The engine was closed.")


def _ending(status: int) -> str:
    """How a process ended, by its exit status."""
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    return f"its exit status was {status}"
