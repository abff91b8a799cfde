"""Child processes: how they are started, and how they end. None outlives its parent, however that ends.

A child that runs a program of ours has a channel to its parent, which is its standard input. Where it only
answers calls, both ends are here: `CalledChild` and `answer_calls`.
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
import numpy as np
from numpy.typing import NDArray

from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import NightjarError
from pipelines.ipc import Channel, ErrorRecord, read_shared, share

T = TypeVar("T")

#: Exit status of a child whose parent is gone.
ORPHANED = 3
#: The child's variables: the process id of its parent, and whether the kernel kills it with that.
_PARENT_PID, _BOUND = "NIGHTJAR_PARENT_PID", "NIGHTJAR_BOUND"
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


class Child(Generic[T]):
    """A child process that runs a program of ours, and the channel to it, on which it says what
    `incoming` is.

    A session of its own keeps the terminal's signals away.
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
        """`program`: what follows the interpreter; `environment`: variables over those of this process;
        `bound`: the kernel kills it when the thread that starts it here ends; `output`: the descriptor of
        what it prints; `cores`: the only ones that it and its children use."""
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
        """Kills the child and what it started. One that is gone is no error."""
        if self.process.returncode is None:
            signal_group(self.process, signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> str:
        """How it ended, once it did. Raises `subprocess.TimeoutExpired`."""
        return exit_description(self.process.wait(seconds))


def exit_description(status: int) -> str:
    """The end of a process, as part of a sentence."""
    if status >= 0:
        return f"with status {status}"
    name = next((f" ({one.name})" for one in signal.Signals if one == -status), "")
    return f"by signal {-status}{name}"


def helper_environment() -> dict[str, str]:
    """Variables of a child that leaves GPU and cores to the engine."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }


def has_parent() -> bool:
    """Whether this process was started by `Child`, and has not asked for its channel yet."""
    return _PARENT_PID in os.environ


def parent_channel(incoming: type[T] | Any) -> Channel[T]:
    """The channel to the process that started this one by `Child`; standard input is empty from here on.

    The kernel kills this process when its parent ends, if the parent wants that. A thread of this process
    would not do: a library may hold the interpreter for minutes.
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
    """Starts a program that has no channel, bound to this process as `Child` is. `log`: the file of its
    output, open for writing; it is closed here."""
    parent = os.getpid()
    # What a signal's handler raises while hooks of a fork run, such as those of logging, would be lost in
    # them.
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
    """Asks children to end, waits up to `seconds` for all of them, and kills their groups."""
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
    """Signals the child's whole group; one that is gone is no error."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def _on_cores(cores: frozenset[int] | None) -> Generator[None]:
    """What this thread starts inside keeps to these cores. It runs on others too if the kernel refuses,
    for example where a container lost some meanwhile."""
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
    """What is asked; with it comes a descriptor of its data."""

    number: int
    content: Any


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    number: int
    content: Any = None
    error: ErrorRecord | None = None


class CalledChild(Generic[T]):
    """A child that answers calls, by `answer_calls`, in whatever order it is done with them."""

    def __init__(
        self,
        program: Sequence[str],
        answer: type[T] | Any,
        environment: Mapping[str, str] | None = None,
        *,
        bound: bool = True,
        output: int = 2,
    ) -> None:
        self._answer = answer
        self._child = Child[_Answer](program, _Answer, environment, bound=bound, output=output)
        self.pid = self._child.pid
        self.ended = False
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[T]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._receive, name="child-answers", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Calls that it has not answered."""
        return len(self._waiting)

    def call(self, content: object, data: bytes | NDArray[Any] = b"") -> Future[T]:
        """The answer, with the error of the child's `NightjarError`, and `ChildEndedError`. Raises that
        too, and `OSError` where there is no memory to share."""
        shared, answered = share(data), Future[T]()
        try:
            with self._lock:
                if self.ended:
                    raise ChildEndedError
                number = next(self._numbers)
                self._waiting[number] = answered
            with suppress(OSError):  # the thread that receives sees that too
                self._child.channel.send(_Call(number, content), [shared])
        finally:
            os.close(shared)
        return answered

    def kill(self) -> None:
        self._child.kill()

    def close(self, seconds: float = 0.0) -> str:
        """Ends the child, by force after `seconds`; how it ended. May be called more than once."""
        self._child.channel.shut_down()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)
        self._child.kill()
        how = self._child.wait()
        self._thread.join()
        self._child.channel.close()
        return how

    def _receive(self) -> None:
        with suppress(EOFError, OSError, msgspec.MsgspecError):
            while True:
                answer = self._child.channel.receive().message
                with self._lock:
                    answered = self._waiting.pop(answer.number)
                if answer.error is not None:
                    answered.set_exception(answer.error.error)
                else:
                    answered.set_result(msgspec.convert(answer.content, self._answer))
        with self._lock:
            self.ended = True
            left = list(self._waiting.values())
            self._waiting.clear()
        for answered in left:
            answered.set_exception(ChildEndedError())


def answer_calls(
    content: type[T] | Any,
    answer: Callable[[T, NDArray[np.uint8]], object],
    failure: Callable[[Exception], NightjarError],
    threads: int = 1,
) -> None:
    """The child's side of `CalledChild`: answers calls on so many threads until its parent ends it, or is
    gone. `failure`: what the parent hears of an error that is not ours. Does not return."""
    channel: Channel[_Call] = parent_channel(_Call)
    answering = DaemonThreads(threads, "answer")

    def answered(call: _Call, data: NDArray[np.uint8]) -> None:
        try:
            message = _Answer(call.number, answer(msgspec.convert(call.content, content), data))
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent hears of it
            ours = error if isinstance(error, NightjarError) else failure(error)
            message = _Answer(call.number, error=ErrorRecord.of(ours))
        with suppress(OSError):
            channel.send(message)

    with suppress(EOFError, OSError):
        while True:
            call, (shared,) = channel.receive()
            answering.submit(answered, call, read_shared(shared, np.uint8))
    # Whatever its calls wait for.
    os._exit(0)
