"""Child processes: they die with the process that started them, and tell it that they came up, that they
finish items, and why they end.

A child says so in lines through a pipe whose number stands in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from jobs.formatting import redact
from pipelines.errors import ConfigError, ErrorCode, ModelError, NightjarError

_PR_SET_PDEATHSIG = 1
UP_PIPE = "NIGHTJAR_UP_PIPE"
START_PIPE = "NIGHTJAR_START_PIPE"
_UP, _FINISHED, _ENDS, _REFUSED = b"up", b"finished", b"ends ", b"refused "
#: So many bytes go through a pipe in one piece.
MAX_WORDS_BYTES = 2000
#: This process's end of the pipe, once it said something.
_writer: int | None = None


class UpPipe:
    """The parent's end. Give `environment` and `pass_fds` to the child, and call `started` once it runs."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._rest = b""
        self.came_up = False
        #: Why the child says that it ends; empty if it has said nothing.
        self.last_words = ""
        #: What the child cannot open its model with, however often it is started; None if it has said nothing
        #: of that.
        self.refusal: NightjarError | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {UP_PIPE: str(self._writer)}

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (self._writer,)

    def started(self) -> None:
        """The child has the pipe: this process no longer needs the child's end."""
        os.close(self._writer)

    def read(self) -> bool:
        """Takes in what the child has said; whether it has finished items since the last call."""
        finished = False
        while said := self._received():
            *lines, self._rest = (self._rest + said).split(b"\n")
            for line in lines:
                self.came_up |= line == _UP
                finished |= line == _FINISHED
                if line.startswith(_ENDS):
                    self.last_words = line.removeprefix(_ENDS).decode(errors="replace")
                if line.startswith(_REFUSED):
                    self.refusal = _refusal(line.removeprefix(_REFUSED).decode(errors="replace"))
        return finished

    def close(self) -> bool:
        """Ends the watch on a child that is gone; whether it ever came up."""
        self.read()
        os.close(self._reader)
        return self.came_up

    def _received(self) -> bytes:
        try:
            return os.read(self._reader, 65536)
        except BlockingIOError:
            # Nothing more by now; a process that the child left behind may hold the pipe still.
            return b""


class StartSignal:
    """Holds children back until `send`. Give `environment` and `pass_fds` to each; afterwards they are
    empty."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = os.pipe()

    @property
    def environment(self) -> dict[str, str]:
        return {} if self._pipe is None else {START_PIPE: str(self._pipe[0])}

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return () if self._pipe is None else self._pipe[:1]

    def send(self) -> None:
        """Lets the children go on. May be called more than once."""
        pipe, self._pipe = self._pipe, None
        for end_of_pipe in pipe or ():
            os.close(end_of_pipe)


def wait_for_start() -> None:
    """Waits until the process that started this one lets it go on, or ends; returns at once where there is
    none."""
    number = os.environ.pop(START_PIPE, None)
    if number is not None:
        with os.fdopen(int(number), "rb") as pipe:
            pipe.read(1)


def say_up() -> None:
    """Tells the process that started this one that it came up; does nothing where nobody asks."""
    _say(_UP)


def is_watched() -> bool:
    """Whether the process that started this one starts it again when it ends."""
    return UP_PIPE in os.environ or _writer is not None


def say_finished() -> None:
    """Tells it that this process has finished items."""
    _say(_FINISHED)


def say_last_words(text: str) -> None:
    """Tells it why this process ends, without the passwords of addresses."""
    _say(_ENDS + _plain(text).encode()[:MAX_WORDS_BYTES])


def say_refused(error: ConfigError | ModelError) -> None:
    """Tells it that every start would end with this error: a person has to mend a setting or the model."""
    parts = (error.code.value, error.message, error.advice)
    _say(_REFUSED + "\t".join(map(_plain, parts)).encode()[:MAX_WORDS_BYTES])


def _plain(text: str) -> str:
    """On one line, without the passwords of addresses."""
    return redact(" ".join(text.split()))


def _refusal(said: str) -> NightjarError:
    code, message, advice = (*said.split("\t"), "", "")[:3]
    kind = ConfigError if code.startswith("config.") else ModelError
    return kind(ErrorCode(code), message, advice)


def _say(line: bytes) -> None:
    global _writer
    number = os.environ.pop(UP_PIPE, None)
    try:
        if number is not None:
            _writer = int(number)
            os.set_inheritable(_writer, False)
            os.set_blocking(_writer, False)
        if _writer is not None:
            os.write(_writer, line + b"\n")
    except BlockingIOError:
        # A parent that stands still: no work waits for it.
        return
    except (OSError, ValueError):
        _writer = None


def spawn(
    command: Sequence[str],
    log: int,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    cores: frozenset[int] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a child in a group of its own that the kernel kills when this process dies, however it dies.
    `log`: the file of its output, open for writing; it is closed here. `cores`: the only ones it and its
    children may use."""
    parent = os.getpid()
    pin = pinned_to(cores)
    # What a signal's handler raises while hooks of a fork run, such as those of logging, would be lost in
    # them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

    def die_with_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if pin is not None:
            pin()
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    try:
        with os.fdopen(log, "ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
                pass_fds=pass_fds,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def pinned_to(cores: frozenset[int] | None) -> Callable[[], None] | None:
    """What a new process does before its program to keep itself and its children on these cores; None:
    nothing.

    A worker works on other cores too if the kernel refuses, for example where a container lost some
    meanwhile.
    """
    if cores is None or not hasattr(os, "sched_setaffinity"):
        return None

    def pin() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)

    return pin


def end(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Asks children to end, waits up to `seconds` for all of them, and kills their groups."""
    deadline = time.monotonic() + seconds
    running = [process for process in processes if process.poll() is None and seconds > 0]
    for process in running:
        signal_group(process, signal.SIGTERM)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    for process in processes:
        signal_group(process, signal.SIGKILL)
        process.wait()


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals the child's whole group; one that is gone is no error."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
