"""An honest client of the server beside hostile ones: it waits no longer than twice its time alone.

`python -m tests.faults.test_other_clients` prints its waits beside each kind.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faults.cluster import REPOSITORY
from tests.support.websocket_kit import PATH, Talk, talk

#: How long waits are measured, alone and beside, at least; and how often that is tried before it counts.
ALONE_SECONDS, BESIDE_SECONDS, ROUNDS = 2.0, 4.0, 5
#: What a busy machine may add to any wait.
GRAIN_SECONDS = 0.25
#: Hashed between two sentences: a few milliseconds of a core that nobody else uses.
PACE_BYTES = bytes(4_000_000)
#: A wait that is longer is as good as none.
PATIENCE_SECONDS = 60.0
#: Slots and room of the server: fewer than the bodies that never come.
SLOTS, ROOM, SLOW_BODIES = 2, 32, 40
SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 0)))


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


def post(url: str, path: str, body: bytes) -> None:
    with connected(url) as wire, suppress(OSError):
        wire.sendall(head(path, len(body)))
        wire.sendall(body)
        wire.recv(65_536)


def fields(url: str) -> Iterator[None]:
    """Speech with 3 M fields that nobody knows, 30 MB."""
    body = (
        b'{"model": "hibari", "input": "Hello.", '
        + b", ".join(b'"%d": 1' % number for number in range(2_400_000))
        + b"}"
    )
    while True:
        post(url, SPEECH, body)
        yield


def lists(url: str) -> Iterator[None]:
    """A voice of 11 M empty lists, 33 MB."""
    body = b"[" + b"[]," * 11_000_000 + b"[]]"
    while True:
        post(url, VOICES, body)
        yield


def blanks(url: str) -> Iterator[None]:
    """A text of 30 M spaces."""
    body = json.dumps({"model": "hibari", "input": 30_000_000 * " "}).encode()
    while True:
        post(url, SPEECH, body)
        yield


def slow_bodies(url: str) -> Iterator[None]:
    """More requests than there are slots and room, of which one byte comes."""
    while True:
        with ExitStack() as stack:
            for _ in range(SLOW_BODIES):
                stack.enter_context(connected(url)).sendall(head(SPEECH, 1000) + b"{")
            yield
            time.sleep(PATIENCE_SECONDS)


def frames(url: str, first: bytes, rest: bytes) -> Iterator[None]:
    """Frames of a WebSocket without end."""
    while True:
        with connected(url) as wire:
            wire.sendall(
                f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
            )
            wire.recv(4096)
            wire.sendall(first)
            yield
            with suppress(OSError):
                while True:
                    wire.sendall(rest * 10_000)


def chunks(url: str) -> Iterator[None]:
    """A body in chunks of a byte, without end."""
    while True:
        with connected(url) as wire, suppress(OSError):
            wire.sendall(head(SPEECH, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
            yield
            while True:
                wire.sendall(b"1\r\n \r\n" * 10_000)


def of(kind: int) -> bytes:
    """An empty frame."""
    return bytes((kind, 0x80, 0, 0, 0, 0))


ATTACKS: dict[str, Callable[[str], Iterator[None]]] = {
    "fields": fields,
    "lists": lists,
    "blanks": blanks,
    "slow bodies": slow_bodies,
    "chunks": chunks,
    "empty pieces": lambda url: frames(url, of(0x01), of(0x00)),
    "pings": lambda url: frames(url, b"", of(0x89)),
}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server of the embedded voice in a process of its own, without a key."""
    sizes = {
        "SPEECH_SERVE__SLOTS": str(SLOTS),
        "SPEECH_SERVE__WAITING_ROOM": str(ROOM),
        "SPEECH_HOME": str(folder),
    }
    command = [sys.executable, "-m", "jobs", "serve", "--model", "hibari", "--port", "0", "--quiet"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | sizes, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        assert url, (folder / "log").read_text()
        deadline = time.monotonic() + 240
        while not is_ready(url):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield url
    finally:
        # Twice: it ends at once, also while what an attacker sent is still being read.
        server.terminate()
        server.send_signal(signal.SIGINT)
        server.wait(120)


def is_ready(url: str) -> bool:
    with connected(url) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in wire.recv(4000).splitlines()[0]


@contextmanager
def attacked(name: str, url: str) -> Iterator[None]:
    """The attack goes on in a process of its own."""
    attacker = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, name, url], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "begun\n"
        yield
        assert attacker.poll() is None, "the attack ended by itself"
    finally:
        attacker.kill()
        attacker.wait()


@dataclass(frozen=True, slots=True)
class Waits:
    """The longest wait for a sentence, infinite where its speech had no end, and the longest time that a
    fixed piece of work of the client took meanwhile."""

    sentence: float
    work: float

    def at_most_twice(self, alone: Waits) -> bool:
        """Whether the server kept this client waiting for at most twice as long as alone. Where the machine
        made the client's own work slower, it made the sentences slower too."""
        slower = max(1.0, self.work / alone.work)
        return self.sentence <= slower * max(2 * alone.sentence, alone.sentence + GRAIN_SECONDS)


def longest_waits(client: Talk, seconds: float) -> Waits:
    sentence, work, end = 0.0, 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        client.say("c", "Good morning.", generation_config={"seed": 1})
        while True:
            try:
                view = json.loads(client.socket.recv(PATIENCE_SECONDS))
            except TimeoutError:
                return Waits(math.inf, work)
            if view["type"] == "error":
                return Waits(math.inf, work)
            if view["type"] == "done":
                break
        spoken = time.monotonic()
        hashlib.sha256(PACE_BYTES).digest()
        sentence, work = max(sentence, spoken - begin), max(work, time.monotonic() - spoken)
    return Waits(sentence, work)


def waits_alone(url: str) -> Waits:
    with talk(url) as client:
        longest_waits(client, 0.1)
        return longest_waits(client, ALONE_SECONDS)


def waits_beside(name: str, url: str) -> Waits:
    with talk(url) as client, attacked(name, url):
        return longest_waits(client, BESIDE_SECONDS)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("served")) as address:
        yield address


@pytest.fixture(scope="module")
def alone(url: str) -> Waits:
    return waits_alone(url)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_honest_client_waits_at_most_twice_as_long_beside_a_hostile_one(
    url: str, alone: Waits, name: str
) -> None:
    found: list[Waits] = []
    for _ in range(ROUNDS):
        found.append(waits_beside(name, url))
        if found[-1].at_most_twice(alone):
            return
    pytest.fail(f"alone: {alone}, beside: {found}")


def main(arguments: list[str]) -> None:
    """With a name and an address: that attack, until it is killed. Else all of them beside a client, with
    a table."""
    if arguments:
        name, url = arguments
        for number, _ in enumerate(ATTACKS[name](url)):
            if not number:
                print("begun", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as url:
        alone = waits_alone(url)
        for name in ATTACKS:
            beside = waits_beside(name, url)
            print(
                f"{name:14} {1000 * alone.sentence:8.0f} ms alone {1000 * beside.sentence:8.0f} ms beside",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
