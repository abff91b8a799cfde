"""A process of its own for meters: they share neither the interpreter lock nor the GPU with the engine, and may crash.

Both ends are here. A message is its length in four bytes and that many bytes of MessagePack; after a task come its samples as
float32. A task has two answers: its meters are open, and what they read. Nothing that is decoded can run code.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import msgspec

from jobs.checks import METERS, Option
from pipelines.errors import ErrorCode, ModelError, NightjarError
from worker.quality.metrics import Meter, Reading, Readings, Sample, open_meter

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LENGTH = struct.Struct(">I")
_KILL_SECONDS = 5.0
#: Bytes that a pipe which can be written takes without waiting.
_PIPE_BYTES = select.PIPE_BUF
#: What a meter may take to open, fetching its weights too.
OPENING_SECONDS = 600.0
#: What the meters may take for one draw, and more of it for each second of audio.
DRAW_SECONDS, DRAW_SECONDS_PER_SECOND = 60.0, 10.0


class MeterError(NightjarError):
    """A meter failed on a draw (`qa.meter`)."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.QA_METER, message, "See the worker's log.")


class MeterHangError(MeterError):
    """A meter did not answer in time (`qa.meter`); its process was killed."""


class _Task(msgspec.Struct, frozen=True):
    meters: dict[str, dict[str, Option]]
    sample_rate: int
    samples: int
    text: str
    language: str
    reference: bytes | None


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    readings: dict[str, tuple[float, str, bool]] = {}
    #: Code, message and advice of what no other draw would mend.
    model_error: tuple[ErrorCode, str, str] | None = None
    #: What failed on this draw.
    error: str = ""


_decode_task = msgspec.msgpack.Decoder(_Task).decode
_decode_answer = msgspec.msgpack.Decoder(_Answer).decode


class Meters:
    """The meters of this process or thread, opened at first use."""

    def __init__(self) -> None:
        self._open: dict[bytes, Meter | None] = {}

    def open(self, meters: Mapping[str, Mapping[str, Option]]) -> list[Meter]:
        """These meters. Raises `ModelError` for one that cannot be opened."""
        opened: list[Meter] = []
        for name, options in meters.items():
            key = msgspec.json.encode([name, options])
            if key not in self._open:
                self._open[key] = _opened(name, options)
            if (meter := self._open[key]) is not None:
                opened.append(meter)
        return opened


def _opened(name: str, options: Mapping[str, Option]) -> Meter | None:
    try:
        return open_meter(name, options)
    except ModelError as error:
        # The worker has measured these scores already, and their details say so.
        if name in METERS and METERS[name].optional and error.code is ErrorCode.MODEL_MISSING_EXTRA:
            return None
        raise


class MeterProcess:
    """A child process that measures one draw at a time; started at the first, and anew after a crash or a hang."""

    def __init__(
        self,
        draw_seconds: float = DRAW_SECONDS,
        seconds_per_second: float = DRAW_SECONDS_PER_SECOND,
        opening_seconds: float = OPENING_SECONDS,
    ) -> None:
        self._draw_seconds = draw_seconds
        self._seconds_per_second = seconds_per_second
        self._opening_seconds = opening_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def measure(self, meters: Mapping[str, Mapping[str, Option]], sample: Sample) -> Readings:
        """Raises `MeterError` where a meter fails or crashes, `MeterHangError` where it takes too long, and `ModelError` where one
        cannot be opened (`model.unreachable` where that takes too long)."""
        child = self._child if self._child is not None and self._child.poll() is None else self._start()
        task = _Task(
            {name: dict(options) for name, options in meters.items()},
            sample.sample_rate,
            len(sample.samples),
            sample.text,
            sample.language,
            sample.reference,
        )
        seconds = self._draw_seconds + self._seconds_per_second * len(sample.samples) / sample.sample_rate
        opened = False
        try:
            deadline = time.monotonic() + self._opening_seconds
            _write_until(child, _framed(msgspec.msgpack.encode(task)), deadline)
            _write_until(child, _as_floats(sample.samples).tobytes(), deadline)
            answer = _receive_until(child, deadline)
            if answer.model_error is None and not answer.error:
                opened = True
                answer = _receive_until(child, time.monotonic() + seconds)
        except TimeoutError as error:
            self.close()
            if opened:
                raise MeterHangError(f"The meters took more than {seconds:.0f} s for one draw.") from error
            raise ModelError(
                ErrorCode.MODEL_UNREACHABLE,
                f"The meters {', '.join(meters)} were not open after {self._opening_seconds:g} s.",
                "See the worker's log; weights that are fetched slowly are better fetched before.",
            ) from error
        except (OSError, EOFError) as error:
            self.close()
            raise MeterError(f"The meters' process ended with status {child.returncode}.") from error
        if answer.model_error is not None:
            raise ModelError(*answer.model_error)
        if answer.error:
            raise MeterError(f"A meter failed: {answer.error}")
        return {name: Reading(*reading) for name, reading in answer.readings.items()}

    def stop(self) -> None:
        """Kills the process, and each that is started later; safe from another thread than the one that measures."""
        self._stopped = True
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """Ends the process. May be called more than once."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait(_KILL_SECONDS)
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                _close(stream)

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        # Meters run on the CPU, each process on one core, behind what feeds the engine.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "worker.quality.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        if self._stopped:
            # It was stopped while this process was started.
            self._child.kill()
        return self._child


def _as_floats(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    import numpy

    return numpy.ascontiguousarray(samples, dtype=numpy.float32)


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _write_until(child: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
    """All of `data`, past the stream's buffer. A child that does not read cannot hold it up: raises `TimeoutError` after the deadline."""
    assert child.stdin is not None
    left = memoryview(data)
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0 or not select.select([], [child.stdin], [], seconds)[1]:
            raise TimeoutError
        left = left[os.write(child.stdin.fileno(), left[:_PIPE_BYTES]) :]


def _receive_until(child: subprocess.Popen[bytes], deadline: float) -> _Answer:
    assert child.stdout is not None
    length = _LENGTH.unpack(_read_until(child.stdout, _LENGTH.size, deadline))[0]
    return _decode_answer(_read_until(child.stdout, length, deadline))


def _read_until(stream: IO[bytes], size: int, deadline: float) -> bytes:
    """Exactly `size` bytes. Raises `EOFError` at the end of the stream, `TimeoutError` after the deadline."""
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            raise TimeoutError
        chunk = os.read(stream.fileno(), size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def _close(stream: IO[bytes]) -> None:
    # What is still buffered for a process that is gone cannot be written.
    with suppress(BrokenPipeError):
        stream.close()


def _serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answers tasks until the other end is closed, as it is when the worker ends in any way."""
    import numpy

    meters = Meters()
    while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
        task = _decode_task(requests.read(_LENGTH.unpack(head)[0]))
        samples = numpy.frombuffer(requests.read(task.samples * 4), numpy.float32)
        sample = Sample(samples, task.sample_rate, task.text, task.language, task.reference)
        for answer in _answers(meters, task, sample):
            replies.write(_framed(msgspec.msgpack.encode(answer)))
            replies.flush()


def _answers(meters: Meters, task: _Task, sample: Sample) -> Iterator[_Answer]:
    """One without readings once the meters are open, and then the readings; or one that says what failed, and nothing after it."""
    try:
        opened = meters.open(task.meters)
        yield _Answer()
        readings: dict[str, tuple[float, str, bool]] = {}
        for meter in opened:
            for name, found in meter.measure(sample).items():
                # Whatever number a meter returns, NumPy's too, travels as a plain one.
                reading = Reading.of(found)
                readings[name] = float(reading.value), str(reading.detail), bool(reading.judged)
        yield _Answer(readings)
    except ModelError as error:
        yield _Answer(model_error=(error.code, error.message, error.advice))
    except Exception as error:  # noqa: BLE001 - whatever a meter raises belongs to this draw
        yield _Answer(error=f"{type(error).__name__}: {error}"[:500])


def main() -> None:
    """The child's side: standard input and output are the pipe, so what libraries print goes to standard error."""
    replies: Any = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(5)
    _serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
