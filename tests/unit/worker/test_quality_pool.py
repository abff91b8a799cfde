"""The pool of meters: what waits, what is dropped, what a hang leads to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from jobs.checks import Option
from jobs.settings import load_settings
from pipelines.errors import ErrorCode, ModelError, NightjarError
from worker.quality.meters import Readings, Utterance
from worker.quality.process import (
    HANGS_IN_A_ROW,
    MAX_SAMPLES,
    MAX_WAITING,
    OUTAGES_IN_A_ROW,
    MeterHangError,
    MeterPool,
    MeterProcess,
    MeterTask,
)

RATE = 16_000


class Blocked(MeterProcess):
    """A host that waits to be let go."""

    def __init__(self, go: threading.Event, fail: NightjarError | None = None) -> None:
        super().__init__()
        self._go = go
        self.fail = fail
        self.measured = 0

    def measure(
        self, meters: Mapping[str, Mapping[str, Option]], utterances: Sequence[Utterance]
    ) -> Sequence[Readings]:
        assert self._go.wait(240)
        self.measured += len(utterances)
        if self.fail is not None:
            raise self.fail
        return [{"sum": (float(one.samples.sum()), "")} for one in utterances]

    def stop(self) -> None:
        """Is let go by its test."""

    def close(self) -> None:
        """Nothing to end."""


class TestPool:
    def test_submitting_never_waits_and_a_full_pool_says_so(self) -> None:
        go = threading.Event()
        host = Blocked(go)
        pool = MeterPool(open_host=lambda: host)
        measured = [
            pool.submit(
                MeterTask({"sum": {}}, Utterance(np.full(100 + number, number, np.float32), RATE, ""))
            )
            for number in range(MAX_WAITING + 1)
        ]
        assert (host.measured, pool.full) == (0, True)
        go.set()
        for number, future in enumerate(measured):
            assert future.result(240) == {"sum": (number * (100.0 + number), "")}
        assert not pool.full
        pool.close()

    def test_a_few_long_draws_fill_it_too(self) -> None:
        go = threading.Event()
        pool = MeterPool(open_host=lambda: Blocked(go))
        # One value in memory, seen as many samples.
        long = np.broadcast_to(np.float32(0), MAX_SAMPLES // 2)
        task, full, measured = MeterTask({"sum": {}}, Utterance(long, RATE, "")), [], []
        for _ in range(2):
            measured.append(pool.submit(task))
            full.append(pool.full)
        assert full == [False, True]
        go.set()
        for future in measured:
            future.result(240)
        pool.close()
        assert not pool.full

    @pytest.mark.parametrize(("cores", "processes"), [(1, 1), (6, 3), (64, 8)])
    def test_their_number_is_by_the_cores_unless_it_is_set(
        self, monkeypatch: pytest.MonkeyPatch, cores: int, processes: int
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        unset = load_settings().worker.meter_processes
        for given, wanted in ((unset, processes), (5, 5)):
            pool = MeterPool(given)
            assert pool.processes == wanted
            pool.close()

    def test_no_more_processes_are_used_than_are_needed(self) -> None:
        go, hosts = threading.Event(), list[Blocked]()
        go.set()

        def open_host() -> Blocked:
            hosts.append(Blocked(go))
            return hosts[-1]

        pool = MeterPool(3, open_host=open_host)
        for _ in range(6):
            pool.submit(MeterTask({"sum": {}}, Utterance(np.zeros(4, np.float32), RATE, ""))).result(240)
            # The process is idle again after the result.
            time.sleep(0.2)
        pool.close()
        assert sorted(host.measured for host in hosts) == [0, 0, 6]

    def test_what_nobody_waits_for_is_dropped_and_closing_drops_the_rest(self) -> None:
        go = threading.Event()
        host = Blocked(go)
        pool = MeterPool(open_host=lambda: host)
        utterance = Utterance(np.zeros(4, np.float32), RATE, "")
        measured = [
            pool.submit(MeterTask({"sum": {}}, utterance, lambda number=number: number == 1))
            for number in range(4)
        ]
        closer = threading.Thread(target=pool.close)
        closer.start()
        go.set()
        closer.join(240)
        assert not closer.is_alive()
        dropped = [
            number
            for number, future in enumerate(measured)
            if future.cancelled() or future.exception() is not None
        ]
        assert 1 in dropped
        assert host.measured + len(dropped) == 4


class TestPoolFaults:
    def results(self, pool: MeterPool, items: list[str]) -> list[Readings | NightjarError]:
        """What comes back for one draw of each item, in turn."""
        found: list[Readings | NightjarError] = []
        for item in items:
            try:
                found.append(
                    pool.submit(
                        MeterTask({"asr": {}}, Utterance(np.zeros(4, np.float32), RATE, ""), item=item)
                    ).result(240)
                )
            except (ModelError, MeterHangError) as error:
                found.append(error)
        return found

    def test_meters_that_hang_on_everything_are_an_outage_and_one_item_is_none(self) -> None:
        go = threading.Event()
        go.set()
        host = Blocked(go, MeterHangError("It took long."))
        pool = MeterPool(open_host=lambda: host)
        codes = [
            found.code
            for found in self.results(pool, ["a"] * 2 * HANGS_IN_A_ROW)
            if isinstance(found, NightjarError)
        ]
        assert codes == [ErrorCode.QA_METER] * 2 * HANGS_IN_A_ROW
        codes = [
            found.code
            for found in self.results(pool, ["b", "c", "d", "a"])
            if isinstance(found, NightjarError)
        ]
        assert codes == [ErrorCode.QA_METER, *[ErrorCode.MODEL_UNREACHABLE] * 3]
        host.fail = None
        assert self.results(pool, ["e"]) == [{"sum": (0.0, "")}]
        host.fail = MeterHangError("It took long.")
        (found,) = self.results(pool, ["f"])
        assert isinstance(found, MeterHangError)
        pool.close()

    def test_outages_in_a_row_are_told_so_often_and_anew_after_an_answer(self) -> None:
        go = threading.Event()
        go.set()
        host = Blocked(go, MeterHangError("It took long."))
        pool = MeterPool(open_host=lambda: host)
        for _ in range(2):
            host.fail = MeterHangError("It took long.")
            items = ["a", "b", "c"] * OUTAGES_IN_A_ROW
            codes = [found.code for found in self.results(pool, items) if isinstance(found, NightjarError)]
            outages = [ErrorCode.MODEL_UNREACHABLE] * OUTAGES_IN_A_ROW
            assert (
                codes[: HANGS_IN_A_ROW - 1 + OUTAGES_IN_A_ROW]
                == [ErrorCode.QA_METER] * (HANGS_IN_A_ROW - 1) + outages
            )
            assert set(codes[HANGS_IN_A_ROW - 1 + OUTAGES_IN_A_ROW :]) == {ErrorCode.QA_METER}
            host.fail = None
            assert self.results(pool, ["d"]) == [{"sum": (0.0, "")}]
        pool.close()


#: A process that ends by an error while one draw is measured and another waits.
ENDS_EARLY = """
import threading
import numpy as np
from worker.quality.meters import Utterance
from worker.quality.process import MeterPool, MeterTask

begun = threading.Event()

class Stuck:
    def measure(self, meters, utterance):
        begun.set()
        threading.Event().wait()

    def stop(self):
        pass

    def close(self):
        pass

pool = MeterPool(1, open_host=Stuck)
for _ in range(2):
    pool.submit(MeterTask({"sum": {}}, Utterance(np.zeros(8, np.float32), 16_000, "Hello.", "English", None)))
begun.wait()
raise SystemExit(3)
"""


def test_a_process_that_ends_without_closing_its_pool_measures_nothing_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 3, done.stderr
