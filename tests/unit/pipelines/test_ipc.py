"""The channel between a process and its child: whole messages, descriptors, shared memory, and ends that
die."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines import ipc
from pipelines.child_process import Child
from pipelines.ipc import INLINE_BYTES, Channel, LostArraysError, share


class _Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class _Data(msgspec.Struct, frozen=True, tag="data"):
    data: bytes


class _Samples(msgspec.Struct, frozen=True, tag="samples"):
    text: str
    samples: NDArray[Any] | None = None
    more: list[NDArray[Any]] = []


Ends = tuple[Channel[_Text | _Data | _Samples], Channel[_Text | _Data | _Samples]]
#: An array that crosses in shared memory.
LARGE = np.zeros(INLINE_BYTES + 1, np.uint8)


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, two = (Channel(connection, _Text | _Data | _Samples) for connection in socket.socketpair())
    yield one, two
    one.close()
    two.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_come_whole_and_in_order(ends: Ends) -> None:
    sent = [_Text("a"), _Data(bytes(3_000_000)), _Text(""), _Data(b"\0" * 70_000), _Text("ä" * 1000)]
    thread = threading.Thread(target=lambda: [ends[0].send(message) for message in sent])
    thread.start()
    assert [ends[1].receive() for _ in sent] == sent
    thread.join()


def test_messages_of_many_threads_do_not_mix(ends: Ends) -> None:
    def send(number: int) -> None:
        for size in range(0, 40_000, 1000):
            ends[0].send(_Data(bytes([number]) * size))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    sizes: dict[int, list[int]] = {}
    for _ in range(4 * 40):
        message = ends[1].receive()
        assert isinstance(message, _Data)
        assert len(set(message.data)) <= 1
        if message.data:
            sizes.setdefault(message.data[0], []).append(len(message.data))
    assert sizes == {number: list(range(1000, 40_000, 1000)) for number in range(4)}
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "samples",
    [
        *(np.arange(size, dtype=np.float32) for size in (0, 1, 200_000)),
        np.arange(48, dtype=np.int16).reshape(3, 16),
        np.arange(160_000, dtype=np.int16).reshape(-1, 16)[::2],
        np.zeros((0, 8), np.int16),
        np.frombuffer(os.urandom(100_001), np.uint8),
    ],
)
def test_arrays_arrive_whole_and_leave_no_descriptor(ends: Ends, samples: NDArray[Any]) -> None:
    before = open_descriptors()
    ends[0].send(_Samples("first", samples))
    ends[0].send(_Samples("none"))
    message = ends[1].receive()
    assert isinstance(message, _Samples)
    assert message.text == "first"
    assert message.samples is not None
    np.testing.assert_array_equal(message.samples, samples, strict=True)
    assert message.samples.flags.writeable
    assert ends[1].receive() == _Samples("none")
    assert open_descriptors() == before


def test_shared_bytes_are_the_same_bytes() -> None:
    for data in (b"", b"x", os.urandom(100_001)):
        with open(share(data), "rb") as file:
            file.seek(0)
            assert file.read() == data


def test_what_was_not_received_is_closed_with_the_channel() -> None:
    before = open_descriptors()
    one, two = (Channel(connection, _Samples) for connection in socket.socketpair())
    one.send(_Samples("first", LARGE))
    one.send(_Samples("second", LARGE))
    two.receive()
    two.close()
    one.close()
    assert open_descriptors() == before


def test_a_closed_end_is_the_end_of_the_messages(ends: Ends) -> None:
    ends[0].send(_Text("last"))
    ends[0].close()
    assert ends[1].receive() == _Text("last")
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(OSError, match="Broken pipe"):
        ends[1].send(_Text("to nobody"))


def test_shut_down_ends_who_waits(ends: Ends) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            ends[0].receive()
        except EOFError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ends[0].shut_down()
    thread.join(30)
    assert len(errors) == 1


def test_time_limits(ends: Ends) -> None:
    with pytest.raises(TimeoutError):
        ends[0].receive(0.01)


def test_a_message_that_is_too_long_is_not_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends[0].send(_Data(bytes(2000)))
    monkeypatch.setattr(ipc, "MAXIMUM_BYTES", 1000)
    with pytest.raises(ValueError, match="too long"):
        ends[0].send(_Data(bytes(2000)))
    with pytest.raises(ConnectionError, match="too long"):
        ends[1].receive()
    ends[1].send(_Data(b"fits"))
    assert ends[0].receive() == _Data(b"fits")


@contextmanager
def room_for(descriptors: int) -> Iterator[None]:
    """This process can open so many more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + descriptors, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_lost_descriptors_cost_only_their_message(ends: Ends) -> None:
    before = open_descriptors()
    for room in (0, 2):
        ends[0].send(_Samples("many", more=[LARGE] * 8))
        ends[0].send(_Samples("next", LARGE + 1))
        with room_for(room), pytest.raises(LostArraysError) as lost:
            ends[1].receive()
        assert lost.value.args[0]["text"] == "many"
        message = ends[1].receive()
        assert isinstance(message, _Samples)
        np.testing.assert_array_equal(message.samples, LARGE + 1)
    assert open_descriptors() == before


def test_an_array_needs_one_descriptor(ends: Ends) -> None:
    ends[0].send(_Samples("one", LARGE + 1))
    with room_for(1):
        message = ends[1].receive()
    assert isinstance(message, _Samples)
    np.testing.assert_array_equal(message.samples, LARGE + 1)


def test_other_programs_do_not_inherit_received_descriptors() -> None:
    one, two = socket.socketpair()
    channel = Channel(two, _Text)
    descriptor = share(b"samples")
    # The message is not complete, so its descriptor is kept.
    socket.send_fds(one, [b"\0"], [descriptor])
    os.close(descriptor)
    with pytest.raises(TimeoutError):
        channel.receive(0.1)
    names = os.listdir("/proc/self/fd")
    received = [int(name) for name in names if "memfd:nightjar" in os.path.realpath(f"/proc/self/fd/{name}")]
    assert [os.get_inheritable(one) for one in received] == [False]
    channel.close()
    one.close()


_CHILD = """
import socket, sys
import numpy as np
from tests.unit.pipelines.test_ipc import _Samples
from pipelines.ipc import Channel
channel = Channel(socket.socket(fileno=0), _Samples)
while True:
    channel.send(_Samples("chunk", np.zeros(1 << 20, np.uint8)), wait=True)
"""


def test_a_killed_child_leaves_nothing_behind() -> None:
    before = open_descriptors()
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=theirs.fileno())
    channel = Channel[_Samples](ours, _Samples)
    for _ in range(5):
        samples = channel.receive().samples
        assert samples is not None
        assert len(samples) == 1 << 20
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises((EOFError, ConnectionResetError)):
        while True:
            channel.receive()
    channel.close()
    assert open_descriptors() == before


def test_sending_waits_for_nobody_and_keeps_the_order(ends: Ends) -> None:
    """The socket takes a few hundred kB; what it has no room for goes out as it is read, with its
    descriptors."""
    before = open_descriptors()
    text = 20_000 * "x"
    for number in range(200):
        ends[0].send(_Samples(text, LARGE + number))
    for number in range(200):
        message = ends[1].receive()
        assert isinstance(message, _Samples)
        assert message.text == text
        np.testing.assert_array_equal(message.samples, LARGE + number)
    ends[0].send(_Text("at once"), wait=True)
    assert open_descriptors() == before
    assert ends[1].receive() == _Text("at once")


def test_sending_to_nobody_says_so(ends: Ends) -> None:
    before = open_descriptors()
    for _ in range(100):
        ends[0].send(_Samples(20_000 * "x", LARGE))
    ends[1].shut_down()
    with pytest.raises(OSError, match="Broken pipe"):
        ends[0].send(_Text("late"), wait=True)
    with pytest.raises(OSError, match="Broken pipe"):
        ends[0].send(_Text("late"))
    ends[1].close()
    ends[0].close()
    assert open_descriptors() == before - 2


_ASKING = """
import sys, time
from tests.unit.pipelines.test_ipc import _Text
from pipelines.child_process import parent_channel
channel = parent_channel(_Text)
assert sys.stdin.read() == ""
channel.send(_Text(channel.receive().text.upper()))
time.sleep(3600)
"""


def test_a_child_answers_at_its_standard_input_and_says_how_it_ended() -> None:
    child = Child[_Text](("-c", _ASKING), _Text)
    child.channel.send(_Text("hello"))
    assert child.channel.receive(60) == _Text("HELLO")
    assert child.alive
    child.kill()
    assert child.wait(60) == "by signal 9 (SIGKILL)"
    child.kill()
    assert not child.alive
    child.channel.close()
