"""The pipeline of an engine process, as the process that started it sees it. Imports no model library."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from pipelines.child_process import Child
from pipelines.engine_process.messages import (
    Append,
    Cancel,
    ChunkMessage,
    Close,
    NotOpened,
    Open,
    Opened,
    RecentRecordings,
    Recording,
    RequestFailed,
    RequestRecord,
    SpeechMessage,
    Start,
    Stats,
    Taken,
    ToClient,
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
from pipelines.ipc import read_shared
from pipelines.registry import open_frontend
from pipelines.request import (
    AudioChunk,
    Done,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Frontend,
    Handle,
    Listener,
    Modality,
    OnEvent,
    PreparedRequest,
    Role,
    Speech,
    SynthesisRequest,
    TextPieces,
    check_start,
)
from pipelines.validation import no_character

log = logging.getLogger(__name__)

#: The child's program, behind the interpreter.
PROGRAM = ("-m", "pipelines.engine_process.server")

#: Whole utterances on their way to the child's `start`, before that of the client blocks. Enough that the
#: child never waits for one.
ON_THE_WAY = 32
#: Of the recordings used last, which the child keeps.
RECORDING_BYTES = 64 << 20
#: How long `close` waits for the child, which may hang, before it kills it.
CLOSE_SECONDS = 5.0


class EngineProcess:
    """Implements `pipelines.request.Pipeline` with a child process that opens the model.

    The constructor returns when the model is open. It raises what `open_pipeline` raised in the child, and
    `EngineCrashError` where the child died. When the child dies later, requests in it fail with
    `EngineCrashError` (`worker.crash`), `stats` says `broken`, and `start` raises `ModelError`
    (`model.unreachable`). The child ends with this process, however that ends.
    """

    starts_at_once = True

    def __init__(
        self, model: str, options: dict[str, Any] | None = None, program: Sequence[str] = PROGRAM
    ) -> None:
        self._program = program
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        #: Requests without an end.
        self._requests: dict[int, Listener] = {}
        #: Those that the child keeps, by their bytes.
        self._recordings = RecentRecordings[bytes, int](RECORDING_BYTES)
        #: Those that the child's pipeline has not accepted.
        self._on_the_way: set[int] = set()
        self._stats = EngineStats()
        #: What the child said of its engine last.
        self.info = EngineInfo()
        #: Why the child is gone, while its requests hear of it.
        self._gone: NightjarError | None = None
        #: Why `start` takes nothing more.
        self._over: NightjarError | None = None
        self._opened: Future[Opened] = Future()
        self._child: Child[ToClient] | None = None
        # The kernel ends the child together with this thread.
        self._host = threading.Thread(
            target=self._run,
            args=(Open(model, options or {}, RECORDING_BYTES),),
            name="engine-host",
            daemon=True,
        )
        self._host.start()
        self._frontend: Frontend | None = None
        try:
            # What is wrong with the model is the child's to say.
            with suppress(NightjarError):
                self._frontend = open_frontend(model)
            opened = self._opened.result()
        except BaseException:
            self.close()
            raise
        self.name = opened.name
        self.sample_rate = opened.sample_rate
        self.capabilities = opened.capabilities

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._child is None else self._child.pid

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        """Sends a request to the child, prepared as far as its family can do that here; see `Pipeline.start`.

        Raises `InputError` for what is refused here; what the child refuses is told as `Failed`. Raises
        `ModelError` (`model.unreachable`) when the child is gone. `on_event` is called on the host's
        thread.
        """
        check_start(self, request, stream)
        text_open = isinstance(request, SynthesisRequest) and request.text_open
        number, pieces = next(self._numbers), None
        if isinstance(request, SynthesisRequest) and self._frontend is not None:
            request, pieces = self._frontend.prepare(request)
        record, recordings = _record_of(request)
        for recording in recordings:
            # Python computes it once and keeps it; inside the lock it is looked up.
            hash(recording)
        heard = Listener(on_event, lambda _done: self._leave(number))
        with self._changed:
            # The host's thread is the one that makes room.
            if not stream and threading.current_thread() is not self._host:
                self._changed.wait_for(
                    lambda: self._over or (len(self._on_the_way) < ON_THE_WAY and self._gone is None)
                )
            if (error := self._over or self._gone) is not None:
                raise error
            # Before it is sent: its first chunk may come at once.
            self._requests[number] = heard
            if not stream:
                self._on_the_way.add(number)
            # Inside the lock, so that nothing of the request overtakes it, and it no recording.
            try:
                self._send(Start(number, record, stream, [self._numbered(one) for one in recordings]))
            except (ValueError, OverflowError) as error:
                self._take_out(number)
                # The child did not see what this request used: they are sent anew.
                self._recordings = RecentRecordings[bytes, int](RECORDING_BYTES)
                raise _unsendable(error) from error
            self._recordings.forget()
        return _OpenText(number, heard, pieces, self._send) if text_open else heard

    def stats(self) -> EngineStats:
        """The child's last message about its engine; `broken` when the child is gone."""
        return (
            replace(self._stats, running=0, waiting=0, state="broken")
            if self._over is not None
            else self._stats
        )

    def close(self) -> None:
        """Ends the child, by force when it does not end in `CLOSE_SECONDS`; see `Pipeline.close`."""
        with self._changed:
            self._over = self._over or engine_closed()
            entries = list(self._requests.values())
            self._requests.clear()
            self._changed.notify_all()
        self._send(Close())
        for entry in entries:
            _tell(entry, Failed(engine_closed()))
        self._host.join(CLOSE_SECONDS)
        if self._host.is_alive():
            log.error("the engine's process did not end in time and is killed")
            self._kill()
            self._host.join(CLOSE_SECONDS)

    def _numbered(self, recording: bytes) -> int:
        """The number of a recording, which is sent where the child does not have it. Numbers are never used
        again."""
        if (number := self._recordings.get(recording)) is None:
            number = next(self._numbers)
            self._send(Recording(number, recording))
            self._recordings.keep(recording, number, len(recording))
        return number

    def _send(self, message: Start | Recording | Append | Cancel | Close) -> None:
        if self._child is not None:
            with suppress(OSError):  # the host's thread sees that too, and tells everyone
                self._child.channel.send(message)

    def _leave(self, number: int) -> None:
        """A request is over. The child hears of it, unless it was the one to say so."""
        if self._take_out(number) is not None:
            self._send(Cancel(number))

    def _take_out(self, number: int) -> Listener | None:
        """Takes a request out, which is no longer on its way either; None where it was cancelled."""
        with self._changed:
            if number in self._on_the_way:
                self._on_the_way.discard(number)
                self._changed.notify()
            return self._requests.pop(number, None)

    def _run(self, wanted: Open) -> None:
        """The host's thread: the child's life from start to end."""
        reason = "because it could not be started"
        try:
            child = self._child = Child[ToClient](self._program, ToClient)
            try:
                child.channel.send(wanted)
                if self._over is not None:
                    self._send(Close())
                while True:
                    received = child.channel.receive()
                    self._take(received.message, received.descriptors)
            except (EOFError, OSError, msgspec.MsgspecError) as error:
                if not isinstance(error, EOFError | ConnectionResetError | BrokenPipeError):
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

    def _take(self, message: ToClient, descriptors: list[int]) -> None:
        """Handles a message of the child."""
        if isinstance(message, ChunkMessage):
            samples = np.frombuffer(message.samples, np.float32)
            chunk = AudioChunk(samples, message.sample_rate, message.text)
            _tell(self._requests.get(message.number), chunk)
        elif isinstance(message, Stats):
            self._stats = message.stats
            self.info = message.info or self.info
        elif isinstance(message, Opened):
            self.info = message.info
            self._opened.set_result(message)
        elif isinstance(message, NotOpened):
            self._opened.set_exception(message.error.error)
        elif isinstance(message, Taken):
            with self._changed:
                self._on_the_way.discard(message.number)
                self._changed.notify()
        else:
            _tell(self._take_out(message.number), _end_of(message, descriptors))

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _end(self, reason: str) -> None:
        """The child is gone. Its requests hear of it first, so that whoever had one in it knows that
        before `start` says anything."""
        gone = ModelError(
            ErrorCode.MODEL_UNREACHABLE,
            f"The engine's process has ended {reason}.",
            "The model is opened again.",
        )
        with self._changed:
            self._gone = gone
            entries = list(self._requests.values())
            self._requests.clear()
        advice = "See the log. The model may need more memory than there is."
        crash = EngineCrashError(ErrorCode.WORKER_CRASH, f"The engine's process ended {reason}.", advice)
        if self._over is None:
            log.error("the engine's process ended %s; requests in it: %d", reason, len(entries))
        if not self._opened.done():
            self._opened.set_exception(crash)
        for entry in entries:
            _tell(entry, Failed(crash))
        with self._changed:
            self._over = self._over or gone
            self._changed.notify_all()


class _OpenText:
    """The `pipelines.request.Handle` of a request whose text comes in pieces."""

    def __init__(
        self, number: int, heard: Listener, pieces: TextPieces | None, post: Callable[[Append], None]
    ) -> None:
        """`pieces`: makes ids of the text; None: it is sent as it is."""
        self._number = number
        self._heard = heard
        self._pieces = pieces
        self._post = post
        self._complete = False

    def append(self, text: str | list[int], final: bool) -> None:
        if self._complete:
            return
        if isinstance(text, str) and self._pieces is not None:
            text = self._pieces(text, final)
        self._complete = final
        if text or final:
            self._post(Append(self._number, text, final))

    def cancel(self) -> None:
        self._heard.cancel()


def _tell(heard: Listener | None, event: Event) -> None:
    """Tells who has not left. A listener that raises must not stop the host."""
    try:
        if heard is not None:
            heard(event)
    except Exception:
        log.exception("a listener of a request failed")


def _end_of(message: SpeechMessage | RequestFailed, descriptors: list[int]) -> Done | Failed:
    if isinstance(message, RequestFailed):
        return Failed(message.error.error)
    try:
        samples = read_shared(descriptors[0]) if descriptors else np.zeros(0, np.float32)
    except OSError as error:
        reason = f"The speech could not be read from shared memory: {error}."
        return Failed(SynthesisError(ErrorCode.SYNTH_ENGINE, reason))
    return Done(Speech(samples, message.sample_rate, message.text, message.text_out, message.meta))


def _record_of(
    request: SynthesisRequest | PreparedRequest,
) -> tuple[RequestRecord | PreparedRequest, list[bytes]]:
    """A request as it travels, and its recordings."""
    if isinstance(request, PreparedRequest):
        if request.recording is None:
            return request, []
        return msgspec.structs.replace(request, recording=None), [request.recording]
    recordings = [one.content for one in request.messages if isinstance(one.content, bytes)]
    messages: list[tuple[Role, Modality, str | None]] = [
        (one.role, one.modality, None if isinstance(one.content, bytes) else one.content)
        for one in request.messages
    ]
    return RequestRecord(
        request.request_id, tuple(messages), request.generation, request.seed, request.text_open
    ), recordings


def _unsendable(error: ValueError | OverflowError) -> InputError:
    """The error of a request whose message cannot be made."""
    if isinstance(error, UnicodeEncodeError):
        return no_character()
    if isinstance(error, OverflowError):
        return unsupported("A number of the request has more than 64 bits.", "Give a smaller one.")
    message, advice = "The request is too long to be sent.", "Give shorter recordings."
    return InputError(ErrorCode.INPUT_TOO_LONG, message, advice)
