"""The process of an engine, as the one that started it holds it: its start, its channel and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from pipelines.engine_process.messages import CLIENT_PID, ToClient
from pipelines.ipc import Channel

#: The child's program, behind the interpreter.
PROGRAM = ("-m", "pipelines.engine_process")


class Child:
    """A child process and the channel to it. The kernel ends it together with the thread that started it."""

    def __init__(self, program: Sequence[str]) -> None:
        flags = ["-P"] if sys.flags.safe_path else []
        ours, theirs = socket.socketpair()
        with theirs:
            # The socket is the child's standard input. What libraries print goes to standard error. A session of its own keeps the
            # terminal's signals away.
            self._process = subprocess.Popen(
                [sys.executable, *flags, *program],
                stdin=theirs.fileno(),
                stdout=2,
                env={**os.environ, CLIENT_PID: str(os.getpid())},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.channel: Channel[ToClient] = Channel(ours, ToClient)
        self.outbox = self.channel.outbox("engine-sender")

    def kill(self) -> None:
        """Kills the child and what it started. One that is gone is no error."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> str:
        """How it ended, once it did."""
        status = self._process.wait()
        if status < 0:
            return f"it was killed by {signal.Signals(-status).name}"
        return f"its exit status was {status}"

    def close(self) -> None:
        """Frees the channel, once nobody receives from it."""
        self.channel.shut_down()
        self.outbox.close()
        self.channel.close()
