"""The state of a stream in a decoder: in its own tensor, or in a row of an arena that all streams of a device
share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class WriteEvent:
    """An event after the write of a tensor, and the CUDA stream of the write."""

    def __init__(self, device: torch.device) -> None:
        """Records an event on the device's current CUDA stream."""
        self._stream = torch.cuda.current_stream(device)
        self._event = self._stream.record_event()

    def wait(self, tensor: Tensor) -> None:
        """Makes the current CUDA stream wait for the write, and keeps the tensor's memory until it has read
        it."""
        current = torch.cuda.current_stream(tensor.device)
        if current != self._stream:
            current.wait_event(self._event)
            tensor.record_stream(current)


class Row:
    """A row of an arena. It is returned once: by `release`, or when it is no longer referenced.

    Takes no lock: the last reference may be dropped by a garbage collection on a thread that already holds a
    lock.
    """

    __slots__ = ("_free", "_held", "number")

    def __init__(self, number: int, free: deque[int]) -> None:
        self.number = number
        self._free = free
        self._held = deque((number,))

    def release(self) -> None:
        """Returns the row. May be called on any thread and more than once."""
        try:
            number = self._held.pop()
        except IndexError:
            return
        self._free.append(number)

    def __del__(self) -> None:
        self.release()


class Arena:
    """The states of many streams on one device.

    `values`: [rows + 1, size]. Rows are not initialized, since a new stream does not read its row. The last
    row is unused and pads batches.
    """

    def __init__(self, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty(rows + 1, size, dtype=dtype, device=device)
        self.dead = rows
        self._free = deque(range(rows))

    @property
    def free(self) -> int:
        """The number of free rows."""
        return len(self._free)

    def take(self) -> Row | None:
        """Takes a row for one stream; None if all are taken. Does not use the device; may be called on any
        thread."""
        try:
            return Row(self._free.popleft(), self._free)
        except IndexError:
            return None


@dataclass(slots=True, eq=False)
class CodecState:
    """The state of one stream in a decoder.

    It takes no memory until its first chunk is decoded. Then it has a row of the decoder's arena, or `values`
    if no row is free: [size] flat histories of all convolutions and the last keys and values of all layers.
    """

    #: Frames decoded so far.
    frames: int = 0
    #: Never changed in place, so that states can share it; None for a new state, and for one in an arena.
    values: Tensor | None = None
    #: Codes [frames, codebooks] that `values` are made from when a decoder needs them.
    codes: Tensor | None = None
    #: The event of the write of `values`, on a CUDA device.
    written: WriteEvent | None = None
    row: Row | None = None
    #: Whether the stream has ended, so that no further chunk of it is decoded.
    closed: bool = False

    def copy(self) -> CodecState:
        """An independent copy, so that many streams can start from a voice's state. Does not use the device.

        Raises ValueError for a state in an arena, because its row belongs to one stream.
        """
        if self.row is not None:
            raise ValueError("a state in an arena belongs to one stream and cannot be copied")
        return CodecState(self.frames, self.values, self.codes, self.written)

    def own_values(self, like: CodecShape) -> Tensor:
        """The values [size] of the state, which the current CUDA stream can read. Raises ValueError for a
        state in an arena."""
        if self.row is not None:
            raise ValueError("a state in an arena is read by the arena's graphs only")
        values = self._readable_values()
        return (
            torch.zeros(like.state_size, dtype=like.dtype, device=like.device) if values is None else values
        )

    def enter(self, arena: Arena) -> bool:
        """Moves the state into a row of the arena, on the current CUDA stream. Returns False if none is free."""
        if self.row is not None:
            return True
        row = arena.take()
        if row is None:
            return False
        if (values := self._readable_values()) is not None:
            arena.values[row.number].copy_(values)
        self.row = row
        self.values = None
        self.codes = None
        self.written = None
        if self.closed:  # another thread closed the state before it had the row
            row.release()
        return True

    def _readable_values(self) -> Tensor | None:
        """`values`, after making the current CUDA stream wait for their write."""
        if self.values is not None and self.written is not None:
            self.written.wait(self.values)
        return self.values

    def close(self) -> None:
        """Ends the stream and releases its memory. May be called on any thread and more than once."""
        self.closed = True
        self.values = None
        if self.row is not None:
            self.row.release()


class CodecShape(NamedTuple):
    """A decoder's sizes (values of a stream's state, codes and samples of a frame), and its type and
    device."""

    state_size: int
    codes_per_frame: int
    samples_per_frame: int
    dtype: torch.dtype
    device: torch.device
