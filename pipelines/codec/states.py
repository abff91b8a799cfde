"""What a decoder remembers of a stream: in a tensor of its own, or in a row of an arena that all streams
of a device share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor


class Written:
    """When and on which CUDA stream a tensor was written."""

    def __init__(self, device: torch.device) -> None:
        """The current CUDA stream of the device, after what it has to do now."""
        self._stream = torch.cuda.current_stream(device)
        self._event = self._stream.record_event()

    def reach(self, tensor: Tensor) -> None:
        """Lets the current CUDA stream read the tensor: not before it is written, and its memory stays as
        long."""
        current = torch.cuda.current_stream(tensor.device)
        if current != self._stream:
            current.wait_event(self._event)
            tensor.record_stream(current)


class Row:
    """A row of an arena. It goes back once: by `release`, or when nobody holds it any more.

    Nothing here takes a lock: the last reference may go in a garbage collection, on a thread that holds
    any lock.
    """

    __slots__ = ("_free", "_held", "number")

    def __init__(self, number: int, free: deque[int]) -> None:
        self.number = number
        self._free = free
        self._held = deque((number,))

    def release(self) -> None:
        """Gives the row back. May be called on any thread and more than once."""
        try:
            number = self._held.pop()
        except IndexError:
            return
        self._free.append(number)

    def __del__(self) -> None:
        self.release()


class Arena:
    """The states of many streams on one device.

    `values`: [rows + 1, size]. Rows start with anything in them: a stream at its beginning reads none of
    it. The last one is nobody's; it fills up batches.
    """

    def __init__(self, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty(rows + 1, size, dtype=dtype, device=device)
        self.rows = self.dead = rows
        self._free = deque(range(rows))

    @property
    def free(self) -> int:
        """Rows that no stream has."""
        return len(self._free)

    def take(self) -> Row | None:
        """A row for one stream; None where all are taken. Touches no device; may be called on any thread."""
        try:
            return Row(self._free.popleft(), self._free)
        except IndexError:
            return None


@dataclass(slots=True, eq=False)
class CodecState:
    """What a decoder remembers of one stream.

    It takes no memory until its first chunk is decoded. After that it has a row of the decoder's arena, or
    where that has none left `values`: [size] flat histories of all convolutions and the last keys and
    values of all layers.
    """

    #: Frames decoded so far.
    frames: int = 0
    #: Never changed in place, so that states may share them; None where there is no past, and for a state in
    #: an arena.
    values: Tensor | None = None
    #: On a CUDA device: when `values` were written.
    written: Written | None = None
    row: Row | None = None
    #: Whether the stream is over, so that no chunk of it is decoded any more.
    closed: bool = False

    def copy(self) -> CodecState:
        """A state that goes on from here by itself, so that a voice's warm state can start many streams.
        Touches no device.

        Raises ValueError for a state in an arena, which belongs to one stream.
        """
        if self.row is not None:
            raise ValueError("a state in an arena belongs to one stream and cannot be copied")
        return CodecState(self.frames, self.values, self.written)

    def own_values(self, like: CodecShape) -> Tensor:
        """[size], to be read on the current CUDA stream. Raises ValueError for a state in an arena."""
        if self.row is not None:
            raise ValueError("a state in an arena is read by the arena's graphs only")
        values = self._reached()
        return (
            torch.zeros(like.state_size, dtype=like.dtype, device=like.device) if values is None else values
        )

    def enter(self, arena: Arena) -> bool:
        """Gives a state without one a row, with its values in it, on the current CUDA stream; whether
        there was one."""
        if self.row is not None:
            return True
        row = arena.take()
        if row is None:
            return False
        if (values := self._reached()) is not None:
            arena.values[row.number].copy_(values)
        self.row, self.values, self.written = row, None, None
        if self.closed:  # meanwhile, on another thread, which saw no row
            row.release()
        return True

    def _reached(self) -> Tensor | None:
        """The values, to be read on the current CUDA stream."""
        if self.values is not None and self.written is not None:
            self.written.reach(self.values)
        return self.values

    def close(self) -> None:
        """Says that the stream is over, and gives back what it holds. May be called on any thread and more
        than once."""
        self.closed = True
        self.values = None
        if self.row is not None:
            self.row.release()


@dataclass(frozen=True, slots=True)
class CodecShape:
    """A decoder's sizes: values of a stream's state, codes of a frame, samples of a frame; and where and
    in which type it computes."""

    state_size: int
    codes_per_frame: int
    samples_per_frame: int
    dtype: torch.dtype
    device: torch.device
