"""Python modules as processes of their own that need no second for their imports: forked from a process
that has done nothing else.

What such a process gets and gives is that of `python -m`: arguments, folder, environment, files, signals,
exit code. Its /proc entries of command line and environment are those of the process that it was forked
from.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
#: What the command and the worker import, at their start or at their first use of it.
_CONTEXT.set_forkserver_preload(["tests.support.forked_imports"])


class Forked:
    """A process with the methods of `subprocess.Popen` that tests use. It runs when `Forked` returns.

    Its standard files are appended to; without one: nothing.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: Path | None,
        stderr: Path | None,
        stdin: Path | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args = [module, *arguments]
        reader, writer = _CONTEXT.Pipe(duplex=False)
        given = (module, list(arguments), cwd, dict(env), (stdin, stdout, stderr), start_new_session, writer)
        self._process = ForkServerProcess(target=_run, args=given)
        self._process.start()
        writer.close()
        with reader:
            reader.recv()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def is_like_this_process(environment: Mapping[str, str], *, but_for_paths: bool = False) -> bool:
    """Whether these variables set Python itself up as it is here: what was imported before is what would
    be imported.

    With `but_for_paths` they may name further folders to import from, which `Forked` adds; not such as
    change how Python starts.
    """
    here, there = (
        {name: value for name, value in one.items() if name.startswith("PYTHON")}
        for one in (os.environ, environment)
    )
    if but_for_paths and not any(Path(folder, "sitecustomize.py").exists() for folder in _paths(environment)):
        for one in (here, there):
            one.pop("PYTHONPATH", None)
    return here == there


def _paths(environment: Mapping[str, str]) -> list[str]:
    return list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))


def _run(
    module: str,
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    files: Sequence[Path | None],
    new_session: bool,
    ready: Connection,
) -> None:
    assert threading.active_count() == 1, "threads do not survive a fork"
    if new_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(files):
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        opened = os.open(path or os.devnull, mode, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv[1:] = arguments
    sys.path[:0] = [folder for folder in _paths(environment) if folder not in sys.path]
    ready.send(True)
    ready.close()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
