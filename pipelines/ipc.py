"""Messages between two processes: a channel over a socket pair, and memory that both can read.

A message is its length and one MessagePack object, which may contain arrays and errors. Decoding it runs no
code. Large arrays are not sent through the socket: the writer puts them into an anonymous memory file and
sends its descriptor with the message. The memory is freed when the last process with the descriptor closes it
or dies, so a killed process leaks nothing.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from array import array
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipelines import errors
from pipelines.errors import NightjarError, engine_error

T = TypeVar("T")

#: The header of a message: its length in bytes, and the number of its descriptors.
_HEAD = struct.Struct(">IB")
#: Maximum length of a message in bytes, which is enough for recordings of voices.
MAXIMUM_BYTES = 256 << 20
#: Maximum number of descriptors of one message; the kernel's own limit is 253.
MAXIMUM_DESCRIPTORS = 64
#: Arrays of more bytes cross in shared memory. Most chunks of streams have less: where they are read late, each would
#: else hold a descriptor.
INLINE_BYTES = 1 << 18
_READ_BYTES = 1 << 16
_ATTACHED_BYTES = socket.CMSG_LEN(MAXIMUM_DESCRIPTORS * array("i").itemsize)
#: The MessagePack extensions of arrays (data type, shape, and bytes or the number of a descriptor) and of errors (name
#: of the class, and its arguments).
_ARRAY = 1
_ERROR = 2
_read_array = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], memoryview | int]).decode


def _extension(shared: list[int], value: object) -> object:
    """What a message contains for an array, an error or a number of NumPy. The descriptors of large arrays are
    added to `shared`."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        values: NDArray[Any] = np.ascontiguousarray(value)
        content: bytes | int = len(shared)
        if values.nbytes > INLINE_BYTES:
            shared.append(share(values))
        else:
            content = values.tobytes()
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((values.dtype.str, values.shape, content)))
    if isinstance(value, NightjarError):
        # A class of another package becomes the nearest base class in `pipelines.errors`.
        kind = next(one for one in type(value).__mro__ if one.__module__ == errors.__name__)
        arguments = value.args if kind is type(value) else (value.code, value.message, value.advice)
        record = kind.__name__, arguments
        return msgspec.msgpack.Ext(
            _ERROR, msgspec.msgpack.encode(record, enc_hook=partial(_extension, shared))
        )
    raise TypeError(f"{type(value).__name__} cannot be sent")


class LostArraysError(ConnectionError):
    """A message came without its arrays, because this process has too many open files. The channel is whole. The
    argument has the other fields of the message."""

    #: For the request that the message is about.
    error = engine_error("A process has too many open files.", "Raise their limit (ulimit -n).")


class Channel(Generic[T]):
    """One end of a socket pair. `send` may be called from any thread, `receive` from one.

    `incoming`: the type of received messages, a `msgspec.Struct` or a union of tagged ones. `send` keeps the
    order of messages and does not block: it writes at once if the socket has room, else on a thread.
    """

    def __init__(self, connection: socket.socket, incoming: type[T] | Any) -> None:
        # Sending never waits; receiving does in one call, which costs less than to ask first whether there is data.
        connection.setblocking(True)
        self._connection = connection
        self._readable = select.poll()
        self._writable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._decode = msgspec.msgpack.Decoder(incoming, ext_hook=self._extended).decode
        self._buffer = bytearray()
        #: Descriptors of each message that has some and is not decoded yet, and of the one that is being decoded.
        self._descriptors = deque[list[int]]()
        self._shared = list[int]()
        #: Unsent messages with their descriptors; the first one may be partly sent.
        self._left = deque[tuple[memoryview, list[int]]]()
        self._changed = threading.Condition()
        self._error: OSError | None = None
        self._closed = False
        self._sender: threading.Thread | None = None

    def send(self, message: object, wait: bool = False) -> None:
        """Sends a message with its arrays and errors. `wait`: waits until everything is sent.

        Raises `ValueError` for a message that is too long, the encoder's errors, and `OSError` if the other
        end is closed (`ConnectionError`) or there is no memory or descriptor for large arrays.
        """
        shared = list[int]()
        try:
            data = msgspec.msgpack.encode(message, enc_hook=partial(_extension, shared))
            if len(data) > MAXIMUM_BYTES or len(shared) > MAXIMUM_DESCRIPTORS:
                raise ValueError(f"a message of {len(data)} bytes and {len(shared)} descriptors is too long")
            view = memoryview(_HEAD.pack(len(data), len(shared)) + data)
            with self._changed:
                if self._error is not None or self._closed:
                    raise self._error or BrokenPipeError("the channel is closed")
                if not self._left:
                    view = self._sent(view, shared)
                if view:
                    if self._sender is None:
                        sender = threading.Thread(target=self._send_left, name="sender", daemon=True)
                        sender.start()
                        self._sender = sender
                    self._left.append((view, shared.copy()))
                    shared.clear()
                    self._changed.notify_all()
                if wait:
                    self._changed.wait_for(lambda: not self._left or self._error or self._closed)
                    if self._error is not None:
                        raise self._error
        finally:
            for descriptor in shared:
                os.close(descriptor)

    def receive(self, seconds: float | None = None) -> T:
        """The next message. Raises `TimeoutError` after `seconds` without data, `EOFError` if the other end is
        closed, `LostArraysError` for a message without its arrays, and another `OSError` or `msgspec.MsgspecError`
        if the channel is broken."""
        self._fill(_HEAD.size, seconds)
        size, count = _HEAD.unpack_from(self._buffer)
        if size > MAXIMUM_BYTES:
            raise ConnectionError(f"a message of {size} bytes is too long")
        self._fill(_HEAD.size + size, seconds)
        data = self._buffer[_HEAD.size : _HEAD.size + size]
        del self._buffer[: _HEAD.size + size]
        # Descriptors arrive with the first byte of their message, and with no other message's.
        self._shared = self._descriptors.popleft() if count else []
        try:
            if len(self._shared) < count:
                raise LostArraysError(msgspec.msgpack.decode(data))
            return self._decode(data)
        finally:
            for descriptor in self._shared:
                os.close(descriptor)

    def shut_down(self) -> None:
        """Closes both directions, which wakes `send` and `receive` at both ends. May be called from any
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
        for descriptors in (*self._descriptors, *(shared for _, shared in self._left)):
            for descriptor in descriptors:
                os.close(descriptor)
        self._descriptors.clear()
        self._left.clear()

    def _fill(self, size: int, seconds: float | None) -> None:
        """Reads until the buffer holds `size` bytes."""
        while len(self._buffer) < size:
            room = max(_READ_BYTES, min(size - len(self._buffer), 1 << 20))
            if seconds is not None and not self._readable.poll(1000 * seconds):
                raise TimeoutError("the other end did not answer in time")
            # `socket.recv_fds` of Python 3.11 ignores its flags.
            data, attached, flags, _ = self._connection.recvmsg(
                room, _ATTACHED_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            if attached or flags & socket.MSG_CTRUNC:
                found = (memoryview(descriptors).cast("i") for _, _, descriptors in attached)
                self._descriptors.append([*chain(*found)])
            if not data:
                raise EOFError("the other end is closed")
            self._buffer += data

    def _extended(self, code: int, data: memoryview) -> object:
        """The array or the error of an extension in the message that is being decoded. Arrays are writable.

        Does not map the memory: in Python 3.11 a mapping keeps a descriptor open, and takes as long.
        """
        if code == _ERROR:
            kind, arguments = msgspec.msgpack.decode(data, type=tuple[str, list[Any]])
            return getattr(errors, kind)(*arguments)
        dtype, shape, content = _read_array(data)
        if not isinstance(content, int):
            return np.frombuffer(bytearray(content), dtype).reshape(shape)
        values = np.empty(shape, dtype)
        # `np.fromfile` needs another descriptor.
        with open(self._shared[content], "rb", closefd=False) as file:
            file.seek(0)
            file.readinto(values.data)
        return values

    def _send_left(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._closed)
                if self._closed or self._error is not None:
                    return
            self._writable.poll()
            with self._changed, suppress(OSError):
                while self._left:
                    view, shared = self._left[0]
                    left = self._sent(view, shared)
                    self._left[0] = left, shared
                    if left:
                        break
                    self._left.popleft()
                self._changed.notify_all()

    def _sent(self, view: memoryview, shared: list[int]) -> memoryview:
        """Sends as much as the socket accepts, and returns the rest. Descriptors are sent with the first byte,
        and then closed. Called inside the lock."""
        try:
            while view:
                attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", shared))] if shared else ()
                view = view[self._connection.sendmsg([view], attached, socket.MSG_DONTWAIT) :]
                while shared:
                    os.close(shared.pop())
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = error
            self._changed.notify_all()
            raise
        return view


def share(data: bytes | memoryview | NDArray[Any]) -> int:
    """Copies bytes or contiguous samples into anonymous shared memory. Returns its descriptor, which the
    caller closes.

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
