"""Starts and ends child processes. No child outlives its parent.

A child that runs one of Nightjar's programs has a channel to its parent as its standard input. `CalledChild`
and `answer_calls` are the two ends of such a channel if the child only answers calls.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import msgspec

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import NightjarError
from pipelines.ipc import Channel

T = TypeVar("T")

#: Exit status of a child whose parent has ended.
ORPHANED = 3
#: Environment variables of the child: the process id of its parent, and whether the kernel kills the child
#: when the parent ends.
_PARENT_PID = "NIGHTJAR_PARENT_PID"
_BOUND = "NIGHTJAR_BOUND"
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


class Child(Generic[T]):
    """A child process that runs one of Nightjar's programs, and the channel to it.

    It has its own session, so that it does not receive the terminal's signals.
    """

    def __init__(
        self,
        program: Sequence[str],
        incoming: type[T] | Any,
        environment: Mapping[str, str] | None = None,
        *,
        bound: bool = True,
        output: int = 2,
        cores: frozenset[int] | None = None,
    ) -> None:
        """`program`: arguments of the Python interpreter; `incoming`: the type of the child's messages;
        `environment`: additional environment variables; `bound`: the kernel kills the child when the thread
        that starts it ends; `output`: descriptor of its output; `cores`: the CPU cores of the child and its
        own children."""
        flags = ["-P"] if sys.flags.safe_path else []
        own = {_PARENT_PID: str(os.getpid()), **({_BOUND: "1"} if bound else {})}
        ours, theirs = socket.socketpair()
        with theirs, _on_cores(cores):
            self.process = subprocess.Popen(
                [sys.executable, *flags, *program],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {}), **own},
                start_new_session=True,
            )
        self.pid = self.process.pid
        self.channel: Channel[T] = Channel(ours, incoming)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kills the child and its own children. Does nothing if it has ended."""
        if self.process.returncode is None:
            signal_group(self.process, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> str:
        """Waits until the child has ended; returns the `exit_description` of its status. Raises
        `subprocess.TimeoutExpired`."""
        return exit_description(self.process.wait(seconds))


def exit_description(status: int) -> str:
    """Describes the exit status of a process as part of a sentence, such as `by signal 9 (SIGKILL)`."""
    if status >= 0:
        return f"with status {status}"
    name = next((f" ({one.name})" for one in signal.Signals if one == -status), "")
    return f"by signal {-status}{name}"


def helper_environment() -> dict[str, str]:
    """Environment variables of a child that uses one core and no GPU."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }


def has_parent() -> bool:
    """Whether this process was started by `Child` and has not called `parent_channel` yet."""
    return _PARENT_PID in os.environ


def parent_channel(incoming: type[T] | Any) -> Channel[T]:
    """The channel to the parent of a process started by `Child`. Standard input is empty after the call.

    If the parent asks for it, the kernel kills this process when the parent ends. A thread that watches the
    parent would not be enough, because a library may block all threads for minutes.
    """
    parent = int(os.environ.pop(_PARENT_PID))
    if os.environ.pop(_BOUND, None) is not None:
        die_with_parent()
    if os.getppid() != parent:
        os._exit(ORPHANED)
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return Channel(connection, incoming)


def spawn(command: Sequence[str], log: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a program without a channel. The kernel kills it when the thread that started it ends. `log`: an
    open descriptor for its output, which this function closes."""
    parent = os.getpid()
    # Hooks that run at a fork, such as those of logging, would discard an exception of a signal handler.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

    def bind() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(ORPHANED)

    try:
        with os.fdopen(log, "ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
                preexec_fn=bind,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Terminates children, waits up to `seconds` for all of them, and kills their groups."""
    deadline = time.monotonic() + seconds
    running = [process for process in processes if process.poll() is None and seconds > 0]
    for process in running:
        signal_group(process, signal.SIGTERM)
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    for process in processes:
        signal_group(process, signal.SIGKILL)
        process.wait()


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals the child's process group. Does nothing if it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def _on_cores(cores: frozenset[int] | None) -> Generator[None]:
    """Restricts processes that this thread starts inside the block to these cores. If the kernel refuses, for
    example because a container has lost cores, they run on all cores."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class ChildEndedError(Exception):
    """A child ended before it answered."""


class _Call(msgspec.Struct, frozen=True):
    number: int
    content: Any


class _Answer(msgspec.Struct, frozen=True):
    number: int
    #: An answer, or a `NightjarError`.
    content: Any


class CalledChild(Child[_Answer], Generic[T]):
    """A child that runs `answer_calls`. It may answer calls in any order."""

    def __init__(
        self,
        program: Sequence[str],
        answer: type[T] | Any,
        environment: Mapping[str, str] | None = None,
        *,
        bound: bool = True,
        output: int = 2,
    ) -> None:
        super().__init__(program, _Answer, environment, bound=bound, output=output)
        self._answer = answer
        self._closed = False
        self._numbers = itertools.count()
        self._waiting = dict[int, Future[T]]()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._receive, name="child-answers", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the child has ended, or does not answer any more."""
        return self._closed or not self.alive

    @property
    def waiting(self) -> int:
        """The number of unanswered calls."""
        return len(self._waiting)

    def call(self, content: object) -> Future[T]:
        """Returns the future of the answer; its exception is the child's `NightjarError`, or
        `ChildEndedError`. Raises `ChildEndedError` after the child's end, and `OSError` if there is no memory
        for large arrays."""
        number = next(self._numbers)
        answered = Future[T]()
        with self._lock:
            if self.ended:
                raise ChildEndedError
            self._waiting[number] = answered
        try:
            with suppress(ConnectionError):  # the receiving thread gets the same error and ends the call
                self.channel.send(_Call(number, content))
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return answered

    def close(self, seconds: float = 0.0) -> str:
        """Ends the child, and kills it after `seconds`. Returns how it ended. May be called more than
        once."""
        self.channel.shut_down()
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        self.kill()
        how = self.wait()
        self._thread.join()
        self.channel.close()
        return how

    def _receive(self) -> None:
        with suppress(EOFError, OSError, msgspec.MsgspecError):
            while True:
                answer = self.channel.receive()
                with self._lock:
                    answered = self._waiting.pop(answer.number, None)
                if answered is None:  # its caller was interrupted
                    continue
                if isinstance(answer.content, NightjarError):
                    answered.set_exception(answer.content)
                else:
                    answered.set_result(msgspec.convert(answer.content, self._answer))
        with self._lock:
            self._closed = True
            left = list(self._waiting.values())
            self._waiting.clear()
        for answered in left:
            answered.set_exception(ChildEndedError())


def answer_calls(
    content: type[T] | Any,
    answer: Callable[[T], object],
    failure: Callable[[Exception], NightjarError],
    threads: int = 1,
) -> None:
    """The child's side of `CalledChild`: answers calls on `threads` threads until its parent closes the channel
    or ends. `failure` converts unexpected errors. Does not return."""
    channel: Channel[_Call] = parent_channel(_Call)
    answering = DaemonThreads(threads, "answer")

    def answered(call: _Call) -> None:
        try:
            made = answer(msgspec.convert(call.content, content))
        except Exception as error:  # noqa: BLE001 - every error is sent to the parent
            made = error if isinstance(error, NightjarError) else failure(error)
        with suppress(OSError):
            channel.send(_Answer(call.number, made))

    with suppress(EOFError, OSError):
        while True:
            answering.submit(answered, channel.receive())
    # Does not wait for running calls.
    os._exit(0)
