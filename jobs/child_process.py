"""Child processes: they die with the process that started them, and tell it that they came up.

A child says so with a byte through a pipe whose number stands in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
UP_PIPE = "NIGHTJAR_UP_PIPE"


class UpPipe:
    """The parent's end. Give `environment` and `pass_fds` to the child, and call `started` once it runs."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)

    @property
    def environment(self) -> dict[str, str]:
        return {UP_PIPE: str(self._writer)}

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (self._writer,)

    def started(self) -> None:
        """The child has the pipe: this process no longer needs the child's end."""
        os.close(self._writer)

    def close(self) -> bool:
        """Ends the watch on a child that is gone; whether it ever came up."""
        try:
            return bool(os.read(self._reader, 1))
        except BlockingIOError:
            # A process that the child left behind holds the pipe still, and no word came.
            return False
        finally:
            os.close(self._reader)


def say_up() -> None:
    """Tells whoever started this process that it came up; does nothing where nobody asks, or a second time."""
    writer = os.environ.pop(UP_PIPE, None)
    if writer is None:
        return
    with contextlib.suppress(OSError, ValueError):
        os.write(int(writer), b"1")
        os.close(int(writer))


def spawn(command: Sequence[str], log: int, environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts a child in a group of its own that the kernel kills when this process dies, however it dies. `log`: the file of its
    output, open for writing; it is closed here."""
    parent = os.getpid()

    def die_with_parent() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

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


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Asks the child to end, waits up to `seconds`, and kills its group."""
    if process.poll() is None and seconds > 0:
        signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
    signal_group(process, signal.SIGKILL)
    process.wait()


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signals the child's whole group; one that is gone is no error."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
