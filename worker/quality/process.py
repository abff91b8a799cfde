"""Separate processes for meters, so that they share neither the interpreter lock nor the GPU with the engine, and
a crash of a meter does not end the worker; and their pool, in which draws wait without blocking the engine.

This module has the code of the worker and of the child process. One call opens the meters of a batch of draws, another
one measures it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import structlog

from jobs.checks import METERS, Bound, Option
from jobs.gpus import count_gpus
from pipelines.child_process import CalledChild, ChildEndedError, answer_calls
from pipelines.daemon_threads import DaemonThreads
from pipelines.errors import ErrorCode, ModelError, NightjarError
from worker.quality.meters import Reading, Readings, Utterance, check_weights, open_meter

log = structlog.get_logger(__name__)

#: Time limit for opening the meters, which may download their weights.
OPENING_SECONDS = 600.0
#: Time limit for one draw, and its increase per second of audio.
DRAW_SECONDS, DRAW_SECONDS_PER_SECOND = 60.0, 10.0
#: Maximum number of waiting draws, and of the samples of all draws in the pool (1 GiB). When either is reached, the
#: engine is not fed.
MAX_WAITING, MAX_SAMPLES = 1024, 1 << 28
#: With a GPU: maximum number of draws that a process measures at once, the number that waits for no more, and how long they
#: wait for it: a process takes the GPU from the engine nearly as long for one draw as for four.
BATCH, LEAST_BATCH, GATHER_SECONDS = 16, 4, 1.0
#: Maximum number of processes by default. With a GPU each takes `GPU_BYTES` of it.
MAX_PROCESSES = 8
#: Unless they are set: each process runs on one core, and glibc keeps up to 256 MiB that is freed, since new memory for
#: each batch takes 1 ms a draw.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "268435456",
}
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


class _Draws(msgspec.Struct, frozen=True):
    """A call to the child process: draws to measure, or meters to open or to find."""

    meters: Mapping[str, Mapping[str, Option]]
    #: None: the meters are only opened, not run. A number is the place of an utterance in the last call.
    utterances: Sequence[Utterance | int] = ()
    #: If not None, the meters' weights are only looked for, and downloaded if this is True (`jobs.checks`).
    fetch: bool | None = None


@dataclass(eq=False)
class MeterProcess:
    """A child process that measures one batch of draws at a time, started by the first one and restarted after a crash
    or hang."""

    draw_seconds: float = DRAW_SECONDS
    seconds_per_second: float = DRAW_SECONDS_PER_SECOND
    opening_seconds: float = OPENING_SECONDS
    _child: CalledChild[list[dict[str, Reading]]] | None = None
    _stopped: bool = False
    #: The draws of the last call, which are not sent again for the next meter -> their places.
    _kept: WeakKeyDictionary[Utterance, int] = field(default_factory=WeakKeyDictionary)

    def measure(
        self, meters: Mapping[str, Mapping[str, Option]], utterances: Sequence[Utterance]
    ) -> Sequence[Readings]:
        """Measures at least one draw. Raises `MeterError` if a meter fails or crashes, `MeterHangError` if it takes longer than the
        longest draw may, and `ModelError` if one cannot be opened (`model.unreachable` if that takes too long)."""
        longest = max(len(one.samples) / one.sample_rate for one in utterances)
        seconds = self.draw_seconds + self.seconds_per_second * longest
        child = self._child if self._child is not None and not self._child.ended else self._start()
        given = [self._kept.get(one, one) for one in utterances]
        self._kept.clear()
        opened = False
        try:
            child.call(_Draws(meters)).result(self.opening_seconds)
            opened = True
            found = child.call(_Draws(meters, given)).result(seconds)
            self._kept.update(zip(utterances, range(len(given))))
            return found
        except TimeoutError as error:
            self.close()
            if opened:
                raise MeterHangError(f"The meters took more than {seconds:.0f} s.") from error
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
        self._kept.clear()
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _start(self) -> CalledChild[list[dict[str, Reading]]]:
        self.close()
        program, environment = ("-m", "worker.quality.process"), ENVIRONMENT | os.environ
        child = self._child = CalledChild(program, list[dict[str, Reading]], environment)
        if self._stopped:
            # `stop` was called while this process was being started.
            child.kill()
        return child


class MeterTask(NamedTuple):
    """A draw to measure."""

    #: In the order in which they run.
    meters: Mapping[str, Mapping[str, Option]]
    utterance: Utterance
    #: Whether the result is no longer needed.
    abandoned: Callable[[], bool] = lambda: False
    #: The item of the draw, the same in all attempts.
    item: str = ""
    #: Name of a score -> its bound. The meters after the first one with a score out of bounds do not run.
    bounds: Mapping[str, Bound] = {}


#: A draw and its future.
_Waiting = tuple[MeterTask, Future[Readings]]


class MeterPool:
    """Meter processes, with one thread each. `submit` never waits, so a slow meter delays items but not the engine.

    With a GPU, draws wait up to `GATHER_SECONDS` to be measured in batches. If a batch fails, each of its draws is
    measured alone, so a draw never fails because of another one; if it takes too long, these meters get no batches any
    more.

    The engine is not fed while the pool is `full`. After meters hang on `HANGS_IN_A_ROW` consecutive items, each hang is
    an outage (`model.unreachable`), until the meters answer again or `OUTAGES_IN_A_ROW` outages were reported.
    """

    def __init__(
        self, processes: int | None = 1, *, open_host: Callable[[], MeterProcess] = MeterProcess
    ) -> None:
        """`processes`: their maximum; None: by the cores."""
        self._batch, self._least = (BATCH, LEAST_BATCH) if count_gpus() else (1, 1)
        self.processes = processes or max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2))
        self._threads = DaemonThreads(self.processes, "meter")
        self._hosts = [open_host() for _ in range(self.processes)]
        # The process that was used last comes first, so no more are started than are needed.
        self._idle: queue.LifoQueue[MeterProcess] = queue.LifoQueue()
        for host in self._hosts:
            self._idle.put(host)
        #: Draws that wait, their futures, and the times until which they wait for a batch.
        self._waiting = deque[tuple[MeterTask, Future[Readings], float]]()
        #: Meters whose batches took too long.
        self._one_by_one = set[bytes]()
        #: Meters -> (items on which they hung since their last answer, number of reported outages).
        self._hung: dict[bytes, tuple[set[str], int]] = {}
        self._changed = threading.Condition()
        #: Number of samples of all draws that wait or are being measured.
        self._samples = 0
        self._closing = False

    @property
    def full(self) -> bool:
        return len(self._waiting) >= MAX_WAITING or self._samples >= MAX_SAMPLES

    def submit(self, task: MeterTask) -> Future[Readings]:
        """Measures a draw. The future raises the errors of `MeterProcess.measure`, `ModelError` for an outage, and
        `CancelledError` if the task is abandoned or the pool is closed first. Raises `CancelledError` if the pool is
        already closed."""
        future, samples = Future[Readings](), len(task.utterance.samples)
        with self._changed:
            if self._closing:
                raise CancelledError
            self._waiting.append((task, future, time.monotonic() + GATHER_SECONDS))
            self._changed.notify()
            self._samples += samples
            self._threads.submit(self._measure_some)
        future.add_done_callback(lambda _: self._count_samples(-samples))
        return future

    def close(self) -> None:
        """Cancels all tasks, and ends the processes."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for host in self._hosts:
            host.stop()
        self._threads.shutdown(wait=True)
        for host in self._hosts:
            host.close()

    def _count_samples(self, more: int) -> None:
        with self._changed:
            self._samples += more

    def _measure_some(self) -> None:
        """Measures waiting draws that have the same meters; none if an earlier call took them."""
        some = list[_Waiting]()
        with self._changed:
            while (
                0 < len(self._waiting) < self._least
                and not self._closing
                and (seconds := self._waiting[0][2] - time.monotonic()) > 0
            ):
                self._changed.wait(seconds)
            # The processes share what waits.
            count = min(self._batch, max(self._least, -(-len(self._waiting) // self.processes)))
            meters = self._waiting[0][0].meters if self._waiting else {}
            if msgspec.json.encode(meters) in self._one_by_one:
                count = 1
            while len(some) < count and self._waiting and self._waiting[0][0].meters == meters:
                some.append(self._waiting.popleft()[:2])
        for task, future in some:
            if self._closing or task.abandoned():
                future.cancel()
        host = self._idle.get()
        try:
            self._measure([one for one in some if not one[1].done()], host)
        finally:
            self._idle.put(host)

    def _measure(self, some: Sequence[_Waiting], host: MeterProcess) -> None:
        """Measures draws that have the same meters, and sets their futures."""
        if not some:
            return
        task, future = some[0]
        meters, found = msgspec.json.encode(task.meters), [dict[str, Any]() for _ in some]
        passing = list(zip((task for task, _ in some), found, strict=True))
        try:
            for name, options in task.meters.items():
                given = [task.utterance for task, _ in passing]
                for (_, readings), more in zip(passing, host.measure({name: options}, given), strict=True):
                    readings.update(more)
                passing = [
                    (task, readings)
                    for task, readings in passing
                    if all(
                        Reading(*one).passes(task.bounds.get(score)) is not False
                        for score, one in readings.items()
                    )
                ]
                if not passing:
                    break
        except Exception as error:  # noqa: BLE001 - the futures report it
            if self._closing:
                # `close` interrupted the measurement, which is not a fault of the draws.
                for _, future in some:
                    future.cancel()
            elif len(some) == 1 or isinstance(error, ModelError):
                if isinstance(error, MeterHangError):
                    error = self._counted_hang(meters, task, error)
                elif not isinstance(error, ModelError):
                    self._hung.pop(meters, None)
                for _, future in some:
                    future.set_exception(error)
            else:
                if isinstance(error, MeterHangError):
                    self._one_by_one.add(meters)
                for one in some:
                    self._measure([one], host)
            return
        self._hung.pop(meters, None)
        for (_, future), readings in zip(some, found, strict=True):
            future.set_result(readings)

    def _counted_hang(
        self, meters: bytes, task: MeterTask, error: MeterHangError
    ) -> MeterHangError | ModelError:
        """Counts a hang. Returns an outage instead if the meters hung on too many items since their last answer."""
        with self._changed:
            items, outages = self._hung.get(meters, (set[str](), 0))
            items.add(task.item)
            is_outage = len(items) >= HANGS_IN_A_ROW and outages < OUTAGES_IN_A_ROW
            self._hung[meters] = items, outages + is_outage
        if not is_outage:
            return error
        log.error("meters hang", meters=list(task.meters), error=error.message)
        return ModelError(
            ErrorCode.MODEL_UNREACHABLE,
            f"The meters {', '.join(task.meters)} hung on {HANGS_IN_A_ROW} items in a row: {error.message}",
            "Items wait until the meters answer again. Use a smaller model or more cores.",
        )


#: In the child process: the draws of the last call that had some. All meters share their samples.
_KEPT = list[Utterance]()


def _answer(draws: _Draws) -> list[dict[str, Reading]]:
    """The readings of each draw. Raises `ModelError` for a meter that cannot be opened."""
    if draws.fetch is not None:
        check_weights(draws.meters, fetch=draws.fetch)
        return []
    utterances = [_KEPT[one] if isinstance(one, int) else one for one in draws.utterances]
    _KEPT[:] = utterances or _KEPT
    for one in utterances:
        one.samples.flags.writeable = False
    opened = [_opened(name, msgspec.json.encode(options)) for name, options in draws.meters.items()]
    answers = [dict[str, Reading]() for _ in utterances]
    for measure in opened if answers else ():
        for readings, scores in zip(answers, measure(utterances), strict=False):
            for name, found in scores.items():
                # Numbers such as those of NumPy are converted for the message.
                reading = found if isinstance(found, Reading) else Reading(*found)
                readings[name] = Reading(
                    float(reading.value), str(reading.detail), bool(reading.judged), reading.words
                )
    return answers


@cache
def _opened(name: str, options: bytes) -> Callable[[Sequence[Utterance]], Iterable[Readings]]:
    """What measures draws by the meter with these options as JSON, opened at first use."""
    try:
        meter = open_meter(name, msgspec.json.decode(options))
    except ModelError as error:
        # Without this optional meter, the scores that the worker measured itself remain, and their details say so.
        if name in METERS and METERS[name].optional and error.code is ErrorCode.CONFIG_MISSING_LIBRARY:
            return lambda _: ()
        raise
    return getattr(meter, "measure_batch", partial(map, meter.measure))


if __name__ == "__main__":
    os.nice(5)
    answer_calls(
        _Draws, _answer, lambda error: MeterError(f"A meter failed: {type(error).__name__}: {error}"[:500])
    )
