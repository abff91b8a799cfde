"""Separate processes for meters, so that they share neither the interpreter lock nor the GPU with the engine, and
a crash of a meter does not end the worker; and their pool, in which draws wait without blocking the engine.

This module has the code of the worker and of the child process. One call opens the meters of a draw, another one
measures it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import structlog

from jobs.checks import METERS, Bound, Option
from pipelines.child_process import CalledChild, ChildEndedError, answer_calls, helper_environment
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, ModelError, NightjarError
from worker.quality.meters import Meter, Reading, Readings, Utterance, missing_weights, open_meter

log = structlog.get_logger(__name__)

#: Time limit for opening the meters, which may download their weights.
OPENING_SECONDS = 600.0
#: Time limit for one draw, and its increase per second of audio.
DRAW_SECONDS, DRAW_SECONDS_PER_SECOND = 60.0, 10.0
#: Maximum number of waiting draws, and of the samples of all draws in the pool (1 GiB). When either is reached, the
#: engine is not fed.
MAX_WAITING, MAX_SAMPLES = 1024, 1 << 28
#: If meters hang on this number of consecutive items, the meters are assumed to be the cause, not the items.
HANGS_IN_A_ROW = 3
#: Maximum number of consecutive outages. Later hangs count as failures of the items again, because otherwise a job whose
#: last items all hang would never end.
OUTAGES_IN_A_ROW = 5


class MeterError(NightjarError):
    """A meter failed on a draw (`qa.meter`)."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.QA_METER, message, "See the worker's log.")


class MeterHangError(MeterError):
    """A meter did not answer in time (`qa.meter`); its process was killed."""


class _Draw(msgspec.Struct, frozen=True):
    """A call to the child process: a draw to measure, or meters to open or to find."""

    meters: Mapping[str, Mapping[str, Option]]
    #: None: the meters are only opened, not run.
    utterance: Utterance | None = None
    #: If not None, the meters' weights are only looked for, and downloaded if this is True (`jobs.checks`).
    fetch: bool | None = None


@dataclass(eq=False)
class MeterProcess:
    """A child process that measures one draw at a time, started by the first draw and restarted after a crash or
    hang."""

    draw_seconds: float = DRAW_SECONDS
    seconds_per_second: float = DRAW_SECONDS_PER_SECOND
    opening_seconds: float = OPENING_SECONDS
    _child: CalledChild[dict[str, Reading]] | None = None
    _stopped: bool = False
    #: Whether a meter has asked for another device than the CPU.
    _has_gpu: bool = False

    def measure(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
        """Measures a draw. Raises `MeterError` if a meter fails or crashes, `MeterHangError` if it takes too long, and
        `ModelError` if one cannot be opened (`model.unreachable` if that takes too long)."""
        seconds = self.draw_seconds + self.seconds_per_second * len(utterance.samples) / utterance.sample_rate
        if any(chosen.get("device", "cpu") != "cpu" for chosen in meters.values()) and not self._has_gpu:
            self._has_gpu = True
            self.close()
        child = self._child if self._child is not None and not self._child.ended else self._start()
        opened = False
        try:
            child.call(_Draw(meters)).result(self.opening_seconds)
            opened = True
            return child.call(_Draw(meters, utterance)).result(seconds)
        except TimeoutError as error:
            self.close()
            if opened:
                raise MeterHangError(f"The meters took more than {seconds:.0f} s for one draw.") from error
            raise ModelError(
                ErrorCode.MODEL_UNREACHABLE,
                f"The meters {', '.join(meters)} were not open after {self.opening_seconds:g} s.",
                "See the worker's log. Download large weights before the job starts.",
            ) from error
        except (OSError, ChildEndedError) as error:
            self._child = None
            raise MeterError(f"The meters' process ended {child.close()}.") from error

    def stop(self) -> None:
        """Kills the process and any process that is started later. Can be called from any thread."""
        self._stopped = True
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """Ends the process. Idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _start(self) -> CalledChild[dict[str, Reading]]:
        self.close()
        # Each process runs on one core, with a lower priority than the worker, and without a GPU unless a meter wants
        # one.
        program = ("-m", "worker.quality.process")
        environment = {} if self._has_gpu else helper_environment()
        child = self._child = CalledChild(program, dict[str, Reading], environment)
        if self._stopped:
            # `stop` was called while this process was being started.
            child.kill()
        return child


@dataclass(frozen=True, slots=True)
class MeterTask:
    """A draw to measure."""

    #: In the order in which they run.
    meters: Mapping[str, Mapping[str, Option]]
    utterance: Utterance
    #: Whether the result is no longer needed.
    abandoned: Callable[[], bool] = lambda: False
    #: The item of the draw, the same in all attempts.
    item: str = ""
    #: Name of a score -> its bound. The meters after the first one with a score out of bounds do not run.
    bounds: Mapping[str, Bound] = field(default_factory=dict[str, Bound])


class MeterPool:
    """Meter processes, with one thread each. `submit` never waits, so a slow meter delays items but not the engine.

    The engine is not fed while the pool is `full`. After meters hang on `HANGS_IN_A_ROW` consecutive items, each hang is
    an outage (`model.unreachable`), until the meters answer again or `OUTAGES_IN_A_ROW` outages were reported.
    """

    def __init__(self, processes: int = 1, *, open_host: Callable[[], MeterProcess] = MeterProcess) -> None:
        self._threads = DaemonThreads(processes, "meter")
        self._hosts = [open_host() for _ in range(processes)]
        self._idle: queue.SimpleQueue[MeterProcess] = queue.SimpleQueue()
        for host in self._hosts:
            self._idle.put(host)
        #: Meters -> (items on which they hung since their last answer, number of reported outages).
        self._hung: dict[bytes, tuple[set[str], int]] = {}
        self._lock = threading.Lock()
        #: Number of samples of all draws that wait or are being measured.
        self._samples = 0
        self._closing = False

    @property
    def full(self) -> bool:
        return self._threads.waiting >= MAX_WAITING or self._samples >= MAX_SAMPLES

    def submit(self, task: MeterTask) -> Future[Readings]:
        """Measures a draw. The future raises the errors of `MeterProcess.measure`, `ModelError` for an outage, and
        `CancelledError` if the task is abandoned or the pool is closed first. Raises `CancelledError` if the pool is
        already closed."""
        try:
            future = self._threads.submit(self._measured, task)
        except RuntimeError:
            raise CancelledError from None
        samples = len(task.utterance.samples)
        self._count_samples(samples)
        future.add_done_callback(lambda _: self._count_samples(-samples))
        return future

    def close(self) -> None:
        """Cancels all tasks, and ends the processes."""
        self._closing = True
        for host in self._hosts:
            host.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for host in self._hosts:
            host.close()

    def _count_samples(self, more: int) -> None:
        with self._lock:
            self._samples += more

    def _measured(self, task: MeterTask) -> Readings:
        if self._closing or task.abandoned():
            raise CancelledError
        meters, host = msgspec.json.encode(task.meters), self._idle.get()
        readings: dict[str, Any] = {}
        try:
            for name, options in task.meters.items():
                readings |= host.measure({name: options}, task.utterance)
                if any(
                    Reading(*one).passes(task.bounds.get(score)) is False for score, one in readings.items()
                ):
                    break
        except Exception as error:
            if self._closing:
                # `close` interrupted the measurement, which is not a fault of the draw.
                raise CancelledError from error
            if isinstance(error, MeterHangError):
                self._count_hang(meters, task, error)
            elif not isinstance(error, ModelError):
                self._hung.pop(meters, None)
            raise
        finally:
            self._idle.put(host)
        self._hung.pop(meters, None)
        return readings

    def _count_hang(self, meters: bytes, task: MeterTask, error: MeterHangError) -> None:
        """Counts a hang. Raises an outage instead if the meters hung on too many items since their last answer."""
        with self._lock:
            items, outages = self._hung.get(meters, (set[str](), 0))
            items.add(task.item)
            is_outage = len(items) >= HANGS_IN_A_ROW and outages < OUTAGES_IN_A_ROW
            self._hung[meters] = items, outages + is_outage
        if is_outage:
            log.error("meters hang", meters=list(task.meters), error=error.message)
            raise ModelError(
                ErrorCode.MODEL_UNREACHABLE,
                f"The meters {', '.join(task.meters)} hung on {HANGS_IN_A_ROW} items in a row: {error.message}",
                "Items wait until the meters answer again. Use a smaller model or more cores.",
            ) from error


def _answer(draw: _Draw) -> dict[str, Reading]:
    """The readings of the meters. Raises `ModelError` for one that cannot be opened."""
    if draw.fetch is not None:
        if (error := missing_weights(draw.meters, fetch=draw.fetch)) is not None:
            raise error
        return {}
    meters = [_opened(name, msgspec.json.encode(options)) for name, options in draw.meters.items()]
    readings: dict[str, Reading] = {}
    for meter in meters:
        if draw.utterance is not None and meter is not None:
            for name, found in meter.measure(draw.utterance).items():
                # Numbers such as those of NumPy are converted for the message.
                reading = found if isinstance(found, Reading) else Reading(*found)
                plain = float(reading.value), str(reading.detail), bool(reading.judged)
                readings[name] = Reading(*plain, reading.words)
    return readings


@cache
def _opened(name: str, options: bytes) -> Meter | None:
    """The meter with these options as JSON, opened at first use."""
    try:
        return open_meter(name, msgspec.json.decode(options))
    except ModelError as error:
        # Without this optional meter, the scores that the worker measured itself remain, and their details say so.
        if name in METERS and METERS[name].optional and error.code is ErrorCode.CONFIG_MISSING_LIBRARY:
            return None
        raise


if __name__ == "__main__":
    os.nice(5)
    answer_calls(
        _Draw, _answer, lambda error: MeterError(f"A meter failed: {type(error).__name__}: {error}"[:500])
    )
