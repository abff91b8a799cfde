"""A process of its own for meters: they share neither the interpreter lock nor the GPU with the engine,
and they may crash.

Both ends are here, joined by a channel. A task comes with its samples, float32 in shared memory. It has
two answers: the meters are open, then their readings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec
import numpy as np

from jobs.checks import METERS, Option
from pipelines.errors import ErrorCode, ModelError, NightjarError
from pipelines.ipc import Child, ErrorRecord, beside_the_engine, parent_channel, read_shared, share
from worker.quality.meters import Meter, Reading, Readings, Utterance, open_meter

#: Time limit for opening the meters, which may fetch their weights.
OPENING_SECONDS = 600.0
#: Time limit for one draw, and how much longer it is for each second of audio.
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
    text: str
    language: str
    reference: bytes | None


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    readings: dict[str, tuple[float, str, bool]] = {}
    #: An error that every draw would have.
    model_error: ErrorRecord | None = None
    #: What failed on this draw.
    error: str = ""


class MeterProcess:
    """A child process that measures one draw at a time. It starts with the first draw, and again after a
    crash or a hang."""

    def __init__(
        self,
        draw_seconds: float = DRAW_SECONDS,
        seconds_per_second: float = DRAW_SECONDS_PER_SECOND,
        opening_seconds: float = OPENING_SECONDS,
    ) -> None:
        self._draw_seconds = draw_seconds
        self._seconds_per_second = seconds_per_second
        self._opening_seconds = opening_seconds
        self._child: Child[_Answer] | None = None
        self._stopped = False

    def measure(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
        """Raises `MeterError` where a meter fails or crashes, `MeterHangError` where it takes too long,
        and `ModelError` where one cannot be opened (`model.unreachable` where that takes too long)."""
        child = self._child if self._child is not None and self._child.alive else self._start()
        options = {name: dict(chosen) for name, chosen in meters.items()}
        task = _Task(options, utterance.sample_rate, utterance.text, utterance.language, utterance.reference)
        samples = share(np.ascontiguousarray(utterance.samples, np.float32))
        seconds = (
            self._draw_seconds + self._seconds_per_second * len(utterance.samples) / utterance.sample_rate
        )
        opened = False
        try:
            child.channel.send(task, [samples])
            answer = child.channel.receive(self._opening_seconds).message
            if answer.model_error is None and not answer.error:
                opened = True
                answer = child.channel.receive(seconds).message
        except TimeoutError as error:
            self.close()
            if opened:
                raise MeterHangError(f"The meters took more than {seconds:.0f} s for one draw.") from error
            raise ModelError(
                ErrorCode.MODEL_UNREACHABLE,
                f"The meters {', '.join(meters)} were not open after {self._opening_seconds:g} s.",
                "See the worker's log. Fetch large weights before the job starts.",
            ) from error
        except (OSError, EOFError) as error:
            self.close()
            raise MeterError(f"The meters' process ended: {child.wait()}.") from error
        finally:
            os.close(samples)
        if answer.model_error is not None:
            raise answer.model_error.error
        if answer.error:
            raise MeterError(f"A meter failed: {answer.error}")
        return {name: Reading(*reading) for name, reading in answer.readings.items()}

    def stop(self) -> None:
        """Kills the process, and each that is started later; safe from another thread than the one that
        measures."""
        self._stopped = True
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """Ends the process. May be called more than once."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            child.channel.close()

    def _start(self) -> Child[_Answer]:
        self.close()
        # Meters run on the CPU, each process on one core, at a lower priority than what feeds the engine.
        child = self._child = Child[_Answer](("-m", "worker.quality.process"), _Answer, beside_the_engine())
        if self._stopped:
            # `stop` came while this process was started.
            child.kill()
        return child


class _Meters:
    """The meters of this process, opened at first use."""

    def __init__(self) -> None:
        self._open: dict[bytes, Meter | None] = {}

    def open(self, meters: Mapping[str, Mapping[str, Option]]) -> list[Meter]:
        """These meters. Raises `ModelError` for one that cannot be opened."""
        keys = {msgspec.json.encode([name, options]): (name, options) for name, options in meters.items()}
        for key, (name, options) in keys.items():
            if key not in self._open:
                self._open[key] = _opened(name, options)
        return [meter for key in keys if (meter := self._open[key]) is not None]


def _opened(name: str, options: Mapping[str, Option]) -> Meter | None:
    try:
        return open_meter(name, options)
    except ModelError as error:
        # The worker has measured these scores already, and their details say so.
        if name in METERS and METERS[name].optional and error.code is ErrorCode.CONFIG_MISSING_LIBRARY:
            return None
        raise


def _answers(meters: _Meters, task: _Task, utterance: Utterance) -> Iterator[_Answer]:
    """One without readings when the meters are open, then the readings; or one with the error, and nothing
    after it."""
    try:
        opened = meters.open(task.meters)
        yield _Answer()
        readings: dict[str, tuple[float, str, bool]] = {}
        for meter in opened:
            for name, found in meter.measure(utterance).items():
                # A number of any kind, such as NumPy's, travels as a plain one.
                reading = Reading.of(found)
                readings[name] = float(reading.value), str(reading.detail), bool(reading.judged)
        yield _Answer(readings)
    except ModelError as error:
        yield _Answer(model_error=ErrorRecord.of(error))
    except Exception as error:  # noqa: BLE001 - whatever a meter raises belongs to this draw
        yield _Answer(error=f"{type(error).__name__}: {error}"[:500])


def main() -> None:
    """The child's side. Answers tasks until the other end is closed, as it is when the worker ends in any
    way."""
    os.nice(5)
    meters = _Meters()
    channel = parent_channel(_Task, die_with_parent=True)
    with suppress(EOFError, OSError):
        while True:
            task, (samples,) = channel.receive()
            utterance = Utterance(
                read_shared(samples), task.sample_rate, task.text, task.language, task.reference
            )
            for answer in _answers(meters, task, utterance):
                channel.send(answer)


if __name__ == "__main__":
    main()
