"""Engine cores of vLLM that need no seconds for their imports: forked from a process that has done nothing
else.

One such process, a template, serves all processes of a run of pytest, and another one the cores of the V2
runner, whose imports differ. Cores that commands and workers start are spawned, as in production, but for
those of a test that asks for it.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import forkserver, popen_forkserver, reduction
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pipelines.vllm_engine import library
from pipelines.vllm_engine.library import on_cpu

#: The variable that names the modules that a template imports.
IMPORTS = "NIGHTJAR_CORE_IMPORTS"
_STARTING = threading.Lock()


class Template(forkserver.ForkServer):
    """A process to fork from: that of another process of this run, where one has started it and still
    runs."""

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(os.environ.get(IMPORTS, "tests.support.core_imports").split())
        self._owner: int | None = None

    def share(self, card: Path) -> None:
        """Makes sure that there is one whose address is on the card."""
        with card.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if self._owner is None or not _runs(self._owner):
                self._adopt(file.read())
            if self._owner is None:
                super().ensure_running()
                self._owner = os.getpid()
                atexit.register(card.unlink, missing_ok=True)
                file.truncate(0)
                json.dump(
                    {
                        "owner": self._owner,
                        "address": self._forkserver_address,
                        "alive": self._forkserver_alive_fd,
                    },
                    file,
                )

    def ensure_running(self) -> None:
        """`share` has done it."""

    def _adopt(self, text: str) -> None:
        self._owner = None
        found = json.loads(text) if text else None
        if found is None or not _runs(found["owner"]):
            return
        # It runs until no process has this end of the pipe.
        self._forkserver_alive_fd = os.open(f"/proc/{found['owner']}/fd/{found['alive']}", os.O_WRONLY)
        self._forkserver_address = found["address"]
        self._owner = found["owner"]

    @property
    def pid(self) -> int | None:
        """The process, where this one has started it."""
        return self._forkserver_pid


#: By the run and the kind of its cores.
TEMPLATES: dict[tuple[str, str], Template] = {}


def run_name() -> str:
    """What all processes of a run of pytest have."""
    return os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: BaseProcess) -> None:
        environment: dict[str, str] = process_obj._environment  # pyright: ignore[reportAttributeAccessIssue]
        kind = "v2" if environment.get("TRITON_INTERPRET") == "1" else "v1"
        run = run_name()
        template = TEMPLATES.setdefault((run, kind), Template())
        with _STARTING:
            template.share(Path(tempfile.gettempdir(), f"nightjar-cores-{run}-{kind}"))
            with patch.object(forkserver, "connect_to_new_process", template.connect_to_new_process):
                super()._launch(process_obj)


class _Core(ForkServerProcess):
    """Has the environment and the output of the process that starts it, not those of its template."""

    _environment: dict[str, str]

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": [reduction.DupFd(number) for number in (1, 2)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # To our plugin its parent is the process that it was forked from.
        self.__dict__.update(state, _parent_pid=os.getppid())

    def run(self) -> None:
        threading.Thread(target=_end_with_starter, name="end-with-starter", daemon=True).start()
        os.environ.clear()
        os.environ.update(self._environment)
        for number, file in enumerate(self.__dict__.pop("_files"), 1):
            opened = file.detach()
            os.dup2(opened, number)
            os.close(opened)
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> _Popen:  # noqa: N802 - a hook of multiprocessing
        return _Popen(process_obj)


class ForkedCores(ForkServerContext):
    """The context of multiprocessing that vLLM starts its cores in."""

    Process = _Core  # pyright: ignore[reportAssignmentType]


def _end_with_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os.kill(os.getpid(), signal.SIGKILL)


def forked_pids() -> list[int]:
    """The cores that this process has started so and that run."""
    return [
        process.pid
        for process in multiprocessing.active_children()
        if isinstance(process, _Core) and process.pid is not None
    ]


def template_pids() -> list[int]:
    """The templates of this run among the children of this process; theirs are cores of other processes too."""
    own = (template for (run, _), template in TEMPLATES.items() if run == run_name())
    return [template.pid for template in own if template.pid is not None]


@pytest.fixture(scope="session", autouse=True)
def forked_cores() -> Iterator[None]:
    """Engine cores of hosts in this process are forked, where vLLM computes on the CPU."""

    def imported(name: str) -> Any:
        loaded = import_module(name)
        if name == "vllm" and on_cpu():
            import_module("vllm.v1.engine.utils").get_mp_context = ForkedCores
        return loaded

    with patch.object(library, "import_module", imported):
        yield


def _runs(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()
