"""`nightjar` for shells as a program that needs no second for its imports: it asks the process of the tests
for a fork, whose files, variables, folder, signals and exit code are its own."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.forked import Forked

PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
answers = connection.makefile()
asked = [os.getpid(), os.getcwd(), sys.argv[1:], dict(os.environ)]
connection.sendall(json.dumps(asked).encode() + b"\\n")
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
sys.exit(int(answers.readline()))
"""


@contextmanager
def forked_nightjar(folder: Path) -> Iterator[None]:
    """The folder has a program `nightjar` inside the block, at whose end what it started is killed."""
    started: list[Forked] = []

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile() as asked, suppress(BrokenPipeError):
            pid, place, arguments, environment = json.loads(asked.readline())
            stdin, stdout, stderr = (Path(f"/proc/{pid}/fd/{number}") for number in range(3))
            process = Forked(
                "jobs",
                arguments,
                cwd=Path(place),
                env=environment,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
            started.append(process)
            connection.sendall(f"{process.pid}\n".encode())
            code = process.wait()
            connection.sendall(f"{code if code >= 0 else 128 - code}\n".encode())

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[listener.accept()[0]], daemon=True).start()

    with TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}/socket")
        listener.listen()
        threading.Thread(target=listen, daemon=True).start()
        folder.mkdir(exist_ok=True)
        program = folder / "nightjar"
        program.write_text(PROGRAM.format(python=sys.executable, address=f"{place}/socket"))
        program.chmod(0o755)
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for process in started:
                process.kill()
