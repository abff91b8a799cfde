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

import msgspec
import numpy as np
import pytest

from pipelines.child_process import Child
from pipelines.ipc import Channel, close_all, read_shared, share


class _Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class _Data(msgspec.Struct, frozen=True, tag="data"):
    data: bytes


Ends = tuple[Channel[_Text | _Data], Channel[_Text | _Data]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, two = (Channel(connection, _Text | _Data) for connection in socket.socketpair())
    yield one, two
    one.close()
    two.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_come_whole_and_in_order(ends: Ends) -> None:
    sent = [_Text("a"), _Data(bytes(3_000_000)), _Text(""), _Data(b"\0" * 70_000), _Text("ä" * 1000)]
    thread = threading.Thread(target=lambda: [ends[0].send(message) for message in sent])
    thread.start()
    assert [ends[1].receive().message for _ in sent] == sent
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
        message = ends[1].receive().message
        assert isinstance(message, _Data)
        assert len(set(message.data)) <= 1
        if message.data:
            sizes.setdefault(message.data[0], []).append(len(message.data))
    assert sizes == {number: list(range(1000, 40_000, 1000)) for number in range(4)}
    for thread in threads:
        thread.join()


def test_samples_go_through_shared_memory_and_leave_no_descriptor(ends: Ends) -> None:
    before = open_descriptors()
    arrays = [np.arange(size, dtype=np.float32) for size in (0, 1, 200_000)]
    for number, samples in enumerate(arrays):
        descriptor = share(samples)
        ends[0].send(_Text(str(number)), [descriptor])
        os.close(descriptor)
    ends[0].send(_Text("none"))
    for number, samples in enumerate(arrays):
        message, (descriptor,) = ends[1].receive()
        assert message == _Text(str(number))
        got = read_shared(descriptor)
        np.testing.assert_array_equal(got, samples)
        assert got.flags.writeable
    assert ends[1].receive().descriptors == []
    assert open_descriptors() == before


def test_shared_bytes_are_the_same_bytes() -> None:
    for data in (b"", b"x", os.urandom(100_001)):
        assert read_shared(share(data), np.uint8).tobytes() == data


def test_what_was_not_received_is_closed_with_the_channel() -> None:
    before = open_descriptors()
    one, two = (Channel(connection, _Text) for connection in socket.socketpair())
    descriptor = share(b"lost")
    one.send(_Text("first"), [descriptor])
    one.send(_Text("second"), [descriptor])
    os.close(descriptor)
    close_all(two.receive().descriptors)
    two.close()
    one.close()
    assert open_descriptors() == before


def test_a_closed_end_is_the_end_of_the_messages(ends: Ends) -> None:
    ends[0].send(_Text("last"))
    ends[0].close()
    assert ends[1].receive().message == _Text("last")
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


def test_a_message_that_is_too_long_is_not_sent() -> None:
    one, two = (Channel(connection, _Data, maximum_bytes=1000) for connection in socket.socketpair())
    with pytest.raises(ValueError, match="too long"):
        one.send(_Data(bytes(2000)))
    one.send(_Data(b"fits"))
    assert two.receive().message == _Data(b"fits")
    wide = Channel(one._connection, _Data)
    wide.send(_Data(bytes(2000)))
    with pytest.raises(ConnectionError, match="too long"):
        two.receive()
    one.close()
    two.close()


def test_lost_descriptors_are_an_error(ends: Ends) -> None:
    descriptors = [share(b"x") for _ in range(8)]
    ends[0].send(_Text("many"), descriptors)
    close_all(descriptors)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, limits[1]))
    try:
        with pytest.raises(ConnectionError, match="too many open files"):
            ends[1].receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


_CHILD = """
import socket, sys
from tests.unit.pipelines.test_ipc import _Text
from pipelines.ipc import Channel, share
channel = Channel(socket.socket(fileno=0), _Text)
while True:
    channel.send(_Text("chunk"), [share(bytes(1 << 20))])
    channel.flush()
"""


def test_a_killed_child_leaves_nothing_behind() -> None:
    before = open_descriptors()
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=theirs.fileno())
    channel = Channel(ours, _Text)
    for _ in range(5):
        assert len(read_shared(channel.receive().descriptors[0], np.uint8)) == 1 << 20
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises((EOFError, ConnectionResetError)):
        while True:
            close_all(channel.receive().descriptors)
    channel.close()
    assert open_descriptors() == before


def test_sending_waits_for_nobody_and_keeps_the_order(ends: Ends) -> None:
    """The socket takes a few hundred kB; what it has no room for goes out as it is read, with its
    descriptors."""
    before = open_descriptors()
    data = bytes(20_000)
    for number in range(200):
        descriptor = share(str(number).encode())
        ends[0].send(_Data(data), [descriptor])
        os.close(descriptor)
    for number in range(200):
        message, (descriptor,) = ends[1].receive()
        assert message == _Data(data)
        assert read_shared(descriptor, np.uint8).tobytes() == str(number).encode()
    ends[0].flush()
    assert open_descriptors() == before
    ends[0].send(_Text("at once"))
    assert ends[1].receive().message == _Text("at once")


def test_sending_to_nobody_says_so(ends: Ends) -> None:
    before = open_descriptors()
    descriptor = share(b"x")
    for _ in range(100):
        ends[0].send(_Data(bytes(20_000)), [descriptor])
    os.close(descriptor)
    ends[1].shut_down()
    with pytest.raises(OSError, match="Broken pipe"):
        ends[0].flush()
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
channel.send(_Text(channel.receive().message.text.upper()))
time.sleep(3600)
"""


def test_a_child_answers_at_its_standard_input_and_says_how_it_ended() -> None:
    child = Child[_Text](("-c", _ASKING), _Text)
    child.channel.send(_Text("hello"))
    assert child.channel.receive(60).message == _Text("HELLO")
    assert child.alive
    child.kill()
    assert child.wait(60) == "by signal 9 (SIGKILL)"
    child.kill()
    assert not child.alive
    child.channel.close()
