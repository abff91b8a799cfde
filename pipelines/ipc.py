"""Messages between two processes: a channel over a socket pair, and memory that both can read.

A message is its length and one MessagePack object. Decoding it runs no code. Samples are not sent through
the socket: the writer puts them into an anonymous memory file and sends its descriptor with the message.
The memory is freed when the last process with the descriptor closes it or dies, so a killed process leaks
nothing.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from pipelines import errors
from pipelines.errors import NightjarError

T = TypeVar("T")

#: The header of a message: its length in bytes, and the number of its descriptors.
_HEAD = struct.Struct(">IB")
#: Maximum length of a message in bytes, which is enough for recordings of voices.
MAXIMUM_BYTES = 256 << 20
#: Maximum number of descriptors of one message; the kernel's own limit is 253.
MAXIMUM_DESCRIPTORS = 64
_READ_BYTES = 1 << 16


def _plain_number(value: object) -> object:
    """Converts a NumPy number to a Python number."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain_number).encode


class Received(NamedTuple, Generic[T]):
    """One message. Its descriptors belong to the receiver, which closes them (`read_shared` does)."""

    message: T
    descriptors: list[int]


class Channel(Generic[T]):
    """One end of a socket pair. `send` may be called from any thread, `receive` from one.

    `incoming`: the type of received messages, a `msgspec.Struct` or a union of tagged ones. `send` keeps the
    order of messages and does not block: it writes at once if the socket has room, else on a thread.
    """

    def __init__(
        self, connection: socket.socket, incoming: type[T] | Any, maximum_bytes: int = MAXIMUM_BYTES
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._maximum_bytes = maximum_bytes
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()
        #: Unsent messages with copies of their descriptors; the first one may be partly sent.
        self._left: deque[tuple[memoryview, list[int]]] = deque()
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._closed = False
        self._sender: threading.Thread | None = None

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Sends a message and copies of descriptors, which the caller may close afterwards.

        Raises `ValueError` for a message that is too long, the encoder's errors, and `OSError` if the other
        end is closed.
        """
        data = _encode(message)
        if len(data) > self._maximum_bytes or len(descriptors) > MAXIMUM_DESCRIPTORS:
            raise ValueError(f"a message of {len(data)} bytes and {len(descriptors)} descriptors is too long")
        view = memoryview(_HEAD.pack(len(data), len(descriptors)) + data)
        with self._changed:
            if self._error is not None or self._closed:
                raise self._error or BrokenPipeError("the channel is closed")
            if not self._left:
                view, descriptors = self._sent(view, descriptors)
            if view:
                if self._sender is None:
                    sender = threading.Thread(target=self._send_left, name="sender", daemon=True)
                    sender.start()
                    self._sender = sender
                self._left.append((view, [os.dup(one) for one in descriptors]))
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits until everything is sent. Raises `OSError` if the other end is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left or self._error or self._closed)
            if self._error is not None:
                raise self._error

    def receive(self, seconds: float | None = None) -> Received[T]:
        """The next message. Raises `TimeoutError` after `seconds` without data, `EOFError` if the other end is
        closed, and `OSError` or `msgspec.MsgspecError` if the channel is broken."""
        self._fill(_HEAD.size, seconds)
        size, count = _HEAD.unpack_from(self._buffer)
        if size > self._maximum_bytes:
            raise ConnectionError(f"a message of {size} bytes is too long")
        self._fill(_HEAD.size + size, seconds)
        data = self._buffer[_HEAD.size : _HEAD.size + size]
        del self._buffer[: _HEAD.size + size]
        if count > len(self._descriptors):
            raise ConnectionError("a message arrived without its descriptors")
        # Descriptors arrive with the first byte of their message at the latest.
        descriptors = [self._descriptors.popleft() for _ in range(count)]
        try:
            return Received(self._decode(data), descriptors)
        except BaseException:
            close_all(descriptors)
            raise

    def shut_down(self) -> None:
        """Closes both directions, which wakes `flush` and `receive` at both ends. May be called from any
        thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket, which no thread may use any more; unsent messages are dropped. May be called more
        than once."""
        self.shut_down()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._sender is not None:
            self._sender.join()
        self._connection.close()
        for descriptors in (self._descriptors, *(copies for _, copies in self._left)):
            close_all(descriptors)
        self._descriptors.clear()
        self._left.clear()

    def _fill(self, size: int, seconds: float | None) -> None:
        """Reads until the buffer holds `size` bytes."""
        while len(self._buffer) < size:
            room = max(_READ_BYTES, min(size - len(self._buffer), 1 << 20))
            try:
                data, descriptors, flags, _ = socket.recv_fds(
                    self._connection, room, MAXIMUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                if not self._poll(select.POLLIN, None if seconds is None else 1000 * seconds):
                    raise TimeoutError("the other end did not answer in time") from None
                continue
            self._descriptors.extend(descriptors)
            if flags & socket.MSG_CTRUNC:
                raise ConnectionError("descriptors were lost: this process has too many open files")
            if not data:
                raise EOFError("the other end is closed")
            self._buffer += data

    def _poll(self, event: int, milliseconds: float | None = None) -> bool:
        poll = select.poll()
        poll.register(self._connection, event)
        return bool(poll.poll(milliseconds))

    def _send_left(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._closed)
                if self._closed or self._error is not None:
                    return
            self._poll(select.POLLOUT)
            with self._changed, suppress(OSError):
                while self._left:
                    view, copies = self._left[0]
                    left, unsent = self._sent(view, copies)
                    if not unsent:
                        close_all(copies)
                        copies = []
                    self._left[0] = (left, copies)
                    if left:
                        break
                    self._left.popleft()
                self._changed.notify_all()

    def _sent(self, view: memoryview, descriptors: Sequence[int]) -> tuple[memoryview, Sequence[int]]:
        """Sends as much as the socket accepts, and returns the rest. Descriptors are sent with the first byte.
        Called inside the lock."""
        try:
            while view:
                if descriptors:
                    sent = socket.send_fds(self._connection, [view], descriptors)
                else:
                    sent = self._connection.send(view)
                view, descriptors = view[sent:], ()
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = error
            self._changed.notify_all()
            raise
        return view, descriptors


_CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, NightjarError)
}


class ErrorRecord(msgspec.Struct, frozen=True):
    """A `NightjarError` in a message."""

    #: The name of its class in `pipelines.errors`, or of the nearest base class there.
    kind: str
    #: The arguments of the class.
    arguments: list[Any]

    @classmethod
    def of(cls, error: NightjarError) -> ErrorRecord:
        kind = next(one.__name__ for one in type(error).__mro__ if one.__name__ in _CLASSES)
        known = kind == type(error).__name__
        return cls(kind, [*error.args] if known else [error.code, error.message, error.advice])

    @property
    def error(self) -> NightjarError:
        return _CLASSES[self.kind](*self.arguments)


def share(data: bytes | memoryview | NDArray[Any]) -> int:
    """Copies bytes or contiguous samples into anonymous shared memory. Returns its descriptor, which the
    caller closes after sending it.

    Raises `OSError` if there is no memory or no descriptor left.
    """
    descriptor = os.memfd_create("nightjar", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(np.frombuffer(data, np.uint8).data)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_shared(descriptor: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Copies shared memory into a new array [values], and closes the descriptor.

    Does not map the memory: in Python 3.11 a mapping keeps a descriptor open, and takes as long. Raises
    `OSError`.
    """
    with open(descriptor, "rb") as file:
        file.seek(0)
        return np.fromfile(file, dtype)


def close_all(descriptors: Sequence[int] | deque[int]) -> None:
    """Closes descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
