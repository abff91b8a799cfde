"""The client of an engine process: a pipeline whose model is in a child process. Imports no model library."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from pipelines.child_process import Child
from pipelines.daemon_threads import DaemonThreads
from pipelines.engine_process.messages import (
    Accepted,
    Answer,
    Append,
    Cancel,
    ChunkMessage,
    Close,
    Import,
    NotOpened,
    Open,
    Opened,
    RequestFailed,
    RequestRecord,
    Start,
    Stats,
    ToChild,
    ToClient,
    Wanted,
)
from pipelines.errors import (
    EngineCrashError,
    ErrorCode,
    InputError,
    ModelError,
    NightjarError,
    SynthesisError,
    engine_closed,
    unsupported,
)
from pipelines.ipc import LostArraysError
from pipelines.recording import Recording
from pipelines.registry import open_frontend
from pipelines.request import (
    AnyRequest,
    Done,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Frontend,
    Handle,
    Listener,
    OnEvent,
    PreparedRequest,
    SynthesisRequest,
    TextPieces,
    check_start,
)
from pipelines.validation import not_unicode

log = logging.getLogger(__name__)

#: The child's program: arguments of the interpreter.
PROGRAM = ("-m", "pipelines.engine_process.server")

#: Maximum whole utterances that are sent but not yet accepted by the child's pipeline; `start` blocks at this
#: number. It is large enough that the child never has to wait for a request.
MAX_PENDING = 128
#: Threads that decode recordings for the child.
_READING_THREADS = 8
#: How long `close` waits for the child before it kills it.
CLOSE_SECONDS = 5.0


class EngineProcess:
    """Implements `pipelines.request.Pipeline` with a child process that opens the model.

    The constructor returns when the model is open, as `open` does. If the child dies later, its requests fail with `EngineCrashError`
    (`worker.crash`), the state in `stats` is `broken`, and `start` raises `ModelError`
    (`model.unreachable`). The child always ends with this process.
    """

    starts_at_once = True

    def __init__(
        self,
        model: str,
        options: dict[str, Any] | None = None,
        program: Sequence[str] = PROGRAM,
        modules: Sequence[str] = (),
    ) -> None:
        """`modules`: the child imports them, and opens the model when `open` is called; empty: now."""
        self._program = program
        self._wanted = Open(model, options or {})
        self._may_open = threading.Event()
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        #: Requests that have not ended.
        self._requests = dict[int, Listener]()
        #: Recordings of the requests that the child has not accepted.
        self.recordings = dict[int, Sequence[Recording]]()
        self.readers = DaemonThreads(_READING_THREADS, "recording")
        #: Whole utterances that the child's pipeline has not accepted.
        self._pending = set[int]()
        self._stats = EngineStats()
        #: The latest description of the child's engine.
        self.info = EngineInfo()
        #: Why the child ended; set before its requests are notified.
        self._ended: NightjarError | None = None
        #: Why `start` accepts no more requests.
        self._closed: NightjarError | None = None
        self._opened = Future[Opened]()
        self._child: Child[ToClient] | None = None
        # The host's thread starts the child and receives its messages. The kernel kills the child when this
        # thread ends.
        self._host = threading.Thread(target=self._run, args=(modules,), name="engine-host", daemon=True)
        self._host.start()
        self._frontend: Frontend | None = None
        if not modules:
            self.open()

    def open(self, **options: Any) -> None:
        """Opens the model, with these options in addition. Raises what `open_pipeline` raised in the child, and
        `EngineCrashError` if the child died."""
        self._wanted.options.update(options)
        self._may_open.set()
        try:
            # If the model cannot be opened, the child reports the error.
            with suppress(NightjarError):
                self._frontend = open_frontend(self._wanted.model)
            opened = self._opened.result()
        except BaseException:
            self.close()
            raise
        self.name = opened.name
        self.sample_rate = opened.sample_rate
        self.capabilities = opened.capabilities
        #: The modules that a spare child can import.
        self.modules = opened.modules

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._child is None else self._child.pid

    def start(self, request: AnyRequest, on_event: OnEvent, stream: bool = False) -> Handle:
        """Sends a request to the child, prepared by the family's frontend if it has one; see `Pipeline.start`.

        Raises `InputError` for a request that is refused in this process; a request that the child refuses
        ends with `Failed`. Raises `ModelError` (`model.unreachable`) after the child has ended. `on_event` is
        called on the host's thread.
        """
        check_start(self, request, stream)
        text_open = isinstance(request, SynthesisRequest) and request.text_open
        number = next(self._numbers)
        pieces = None
        if isinstance(request, SynthesisRequest) and self._frontend is not None:
            request, pieces = self._frontend.prepare(request)
        record, recordings = _record_of(request)
        # Computed before the lock is taken.
        digests = [recording.digest for recording in recordings]
        listener = Listener(on_event, lambda _done: self._remove(number, cancel=True))
        with self._changed:
            # The host's thread must not wait: it is the one that makes room.
            if not stream and threading.current_thread() is not self._host:
                self._changed.wait_for(
                    lambda: self._closed or (len(self._pending) < MAX_PENDING and self._ended is None)
                )
            if (error := self._closed or self._ended) is not None:
                raise error
            # Registered before it is sent, because its first chunk may come at once.
            self._requests[number] = listener
            if not stream:
                self._pending.add(number)
            if recordings:
                self.recordings[number] = recordings
            # Sent inside the lock, which keeps requests and their texts in order.
            try:
                self._send(Start(number, record, stream, digests))
            except (ValueError, OverflowError) as error:
                self._remove(number)
                self.recordings.pop(number, None)
                raise _unsendable(error) from error
        return _OpenText(number, listener, pieces, self._send) if text_open else listener

    def stats(self) -> EngineStats:
        """The child's latest stats; the state is `broken` after the child has ended."""
        return (
            replace(self._stats, running=0, waiting=0, state="broken")
            if (self._closed or self._ended) is not None
            else self._stats
        )

    def close(self) -> None:
        """Ends the child, and kills it after `CLOSE_SECONDS`; see `Pipeline.close`."""
        with self._changed:
            self._closed = self._closed or engine_closed()
            self._changed.notify_all()
        self._may_open.set()
        # Before the child ends, which would look like a crash to them.
        self._fail_all(engine_closed())
        self._send(Close())
        self._host.join(CLOSE_SECONDS)
        if self._host.is_alive():
            log.error("the engine's process did not end in time and is killed")
            self._kill()
            self._host.join(CLOSE_SECONDS)

    def _send(self, message: ToChild) -> None:
        if self._child is not None:
            with suppress(OSError):  # the host's thread gets the same error and fails all requests
                self._child.channel.send(message)

    def _read(self, wanted: Wanted, recordings: Sequence[Recording]) -> None:
        """Sends what the child wants of a recording, or why that cannot be read or sent."""
        try:
            recording = recordings[wanted.place]
            if wanted.reading is None:
                data = np.frombuffer(recording.data, np.uint8)
                rate = 0
            else:
                data, rate = recording.read(wanted.reading)
            assert self._child is not None
            # May need a descriptor, and the child waits for an answer.
            self._child.channel.send(Answer(wanted.wanted, data, rate))
        except ConnectionError:
            pass  # the host's thread gets the same error and fails all requests
        except NightjarError as refused:
            self._send(Answer(wanted.wanted, refused))
        except Exception as failed:
            log.exception("a recording could not be sent")
            error = SynthesisError(
                ErrorCode.SYNTH_ENGINE, f"The recording could not be read: {failed!r}.", "See the log."
            )
            self._send(Answer(wanted.wanted, error))

    def _remove(self, number: int, cancel: bool = False) -> Listener | None:
        """Removes a request, also from the pending ones, and cancels it in the child if it is wanted; None if it was
        removed before."""
        with self._changed:
            self._pending.discard(number)
            self._changed.notify()
            removed = self._requests.pop(number, None)
        if cancel and removed is not None:
            self._send(Cancel(number))
        return removed

    def _run(self, modules: Sequence[str]) -> None:
        """Runs on the host's thread: starts the child, handles its messages, and waits for its end."""
        reason = "because it could not be started"
        try:
            child = self._child = Child[ToClient](self._program, ToClient)
            try:
                if modules:
                    child.channel.send(Import([*modules], self._wanted.model))
                    self._may_open.wait()
                child.channel.send(self._wanted if self._closed is None else Close())
                while True:
                    try:
                        self._handle(child.channel.receive())
                    except LostArraysError as lost:
                        _notify(self._remove(lost.args[0]["number"], cancel=True), Failed(lost.error))
            except (EOFError, ConnectionResetError, BrokenPipeError):
                pass  # the child has ended
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("the channel to the engine's process broke: %s", error)
            child.kill()
            reason = child.wait()
            child.channel.close()
        except Exception as error:
            log.exception("the engine's host failed")
            self._kill()
            reason = f"because its client failed: {error!r}"
        finally:
            self._end(reason)

    def _handle(self, message: ToClient) -> None:
        """Handles a message of the child."""
        if isinstance(message, ChunkMessage):
            _notify(self._requests.get(message.number), message.chunk)
        elif isinstance(message, Stats):
            self._stats = message.stats
            self.info = message.info
        elif isinstance(message, Opened):
            self.info = message.info
            self._opened.set_result(message)
        elif isinstance(message, NotOpened):
            self._opened.set_exception(message.error)
        elif isinstance(message, Accepted):
            with self._changed:
                self.recordings.pop(message.number, None)
                self._pending.discard(message.number)
                self._changed.notify()
        elif isinstance(message, Wanted):
            self.readers.submit(self._read, message, self.recordings.get(message.number, ()))
        elif isinstance(message, RequestFailed):
            _notify(self._remove(message.number), Failed(message.error))
        else:
            _notify(self._remove(message.number), Done(message.speech))

    def _fail_all(self, error: NightjarError) -> None:
        with self._changed:
            left = list(self._requests.values())
            self._requests.clear()
        for listener in left:
            _notify(listener, Failed(error))

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _end(self, reason: str) -> None:
        """Fails the child's requests after its end; only then does `start` raise."""
        ended = ModelError(
            ErrorCode.MODEL_UNREACHABLE,
            f"The engine's process has ended {reason}.",
            "The model is opened again.",
        )
        with self._changed:
            self._ended = ended
            self.recordings.clear()
        self.readers.shutdown(cancel_futures=True)
        crash = EngineCrashError(
            ErrorCode.WORKER_CRASH,
            f"The engine's process ended {reason}.",
            "See the log. The model may need more memory than there is.",
        )
        if self._closed is None:
            log.error("the engine's process ended %s; requests in it: %d", reason, len(self._requests))
        if not self._opened.done():
            self._opened.set_exception(crash)
        self._fail_all(crash)
        with self._changed:
            self._closed = self._closed or ended
            self._changed.notify_all()


@dataclass(eq=False, slots=True)
class _OpenText:
    """The `pipelines.request.Handle` of a request whose text comes in pieces."""

    _number: int
    _listener: Listener
    #: Tokenizes the text; None: the child tokenizes it.
    _pieces: TextPieces | None
    _send: Callable[[Append], None]
    _complete: bool = False

    def append(self, text: str | list[int], final: bool) -> None:
        if self._complete:
            return
        if isinstance(text, str) and self._pieces is not None:
            text = self._pieces(text, final)
        self._complete = final
        if text or final:
            self._send(Append(self._number, text, final))

    def cancel(self) -> None:
        self._listener.cancel()


def _notify(listener: Listener | None, event: Event) -> None:
    """Delivers an event, unless the request has ended. A listener that raises must not stop the host."""
    try:
        if listener is not None:
            listener(event)
    except Exception:
        log.exception("a listener of a request failed")


def _record_of(request: AnyRequest) -> tuple[RequestRecord | PreparedRequest, list[Recording]]:
    """A request without its recordings, and the recordings."""
    if isinstance(request, PreparedRequest):
        if request.recording is None:
            return request, []
        return msgspec.structs.replace(request, recording=None), [request.recording]
    recordings = [Recording.of(one.content) for one in request.messages if not isinstance(one.content, str)]
    record = RequestRecord(
        request.request_id,
        tuple(
            (one.role, one.modality, one.content if isinstance(one.content, str) else None)
            for one in request.messages
        ),
        *(getattr(request, name) for name in RequestRecord.__struct_fields__[2:]),
    )
    return record, recordings


def _unsendable(error: ValueError | OverflowError) -> InputError:
    """The error of a request that cannot be encoded."""
    if isinstance(error, UnicodeEncodeError):
        return not_unicode()
    if isinstance(error, OverflowError):
        return unsupported("A number of the request has more than 64 bits.", "Give a smaller one.")
    return InputError(
        ErrorCode.INPUT_TOO_LONG, "The request is too long to be sent.", "Give shorter recordings."
    )
