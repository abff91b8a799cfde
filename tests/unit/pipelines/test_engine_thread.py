"""The engine's thread: what receivers may do, and that no fault stops it."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine
from pipelines.engine.executor import EagerExecutor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from tests.support.qwen3_golden import MAX_CONTEXT, golden_model, random_request, run_alone
from tests.support.rounds import wait_until

OPTIONS = EngineOptions(pages=64, page_size=8, max_context=MAX_CONTEXT, prefill_chunk=16)


SECONDS = 240


class Waiter:
    """Keeps the outcome of one request; `then` runs on the engine's thread when it has come."""

    def __init__(self, then: Any = None) -> None:
        self.codes: np.ndarray | None = None
        self.error: NightjarError | None = None
        self._then = then
        self._done = threading.Event()

    def frames(self, codes: np.ndarray) -> None:
        """Not needed here."""

    def finished(self, codes: np.ndarray, finish: str, log_probabilities: np.ndarray) -> None:
        self.codes = codes
        self._end()

    def failed(self, error: NightjarError) -> None:
        self.error = error
        self._end()

    def wait(self) -> Waiter:
        assert self._done.wait(SECONDS)
        return self

    def _end(self) -> None:
        try:
            if self._then:
                self._then()
        finally:
            self._done.set()


class Backlog:
    """A codec stage that is backlogged while this is set; `thread` is its own."""

    def __init__(self) -> None:
        self._full, self.asked = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def is_backlogged(self) -> bool:
        self.asked.set()
        return self._full.is_set()

    @is_backlogged.setter
    def is_backlogged(self, value: bool) -> None:
        (self._full.set if value else self._full.clear)()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self.thread


def make_engine(
    waiting_room: int = 8, model: Any = None, slots: int = 4, stage: Backlog | None = None
) -> Engine:
    model = model or golden_model("base")
    executor = EagerExecutor(model, replace(OPTIONS, slots=slots))
    return Engine(executor, OPTIONS, waiting_room, stage)  # type: ignore[arg-type]


def some_requests(count: int) -> list[GenerationRequest]:
    rng = random.Random(4)
    return [random_request(rng, golden_model("base"), f"t{index}") for index in range(count)]


def test_requests_from_many_threads_come_out_as_alone() -> None:
    engine = make_engine(waiting_room=2)
    many = some_requests(12)
    waiters = {request: Waiter() for request in many}
    threads = [threading.Thread(target=engine.submit, args=(request, waiters[request])) for request in many]
    for thread in threads:
        thread.start()
    for request, waiter in waiters.items():
        codes = waiter.wait().codes
        assert codes is not None
        np.testing.assert_array_equal(codes, run_alone(golden_model("base"), request)[0])
    assert engine.stats().requests_done == 12
    engine.close()


def test_a_receiver_may_submit_although_the_room_is_full() -> None:
    engine = make_engine(waiting_room=2, slots=1)
    first, *others, last = (
        replace(request, max_tokens=20, sampling=SamplingParams(min_new_tokens=20))
        for request in some_requests(4)
    )
    later, full = Waiter(), threading.Event()

    def submit_last() -> None:
        assert full.wait(SECONDS)
        engine.submit(last, later)

    engine.submit(first, Waiter(submit_last))
    for request in others:
        engine.submit(request, Waiter())
    assert engine.stats().waiting == 2
    full.set()
    assert later.wait().codes is not None
    engine.close()


def test_an_engine_rests_while_its_stage_is_backlogged() -> None:
    stage = Backlog()
    stage.is_backlogged = True
    engine = make_engine(stage=stage)
    first, second, third = some_requests(3)
    waiters = {request: Waiter() for request in (first, second, third)}
    engine.submit(first, waiters[first])
    engine.submit(second, waiters[second])
    for _ in range(20):
        stage.asked.clear()
        assert stage.asked.wait(300)
    assert engine.core.frames_made == 0
    engine.cancel(second)  # an abort is heard meanwhile
    error = waiters[second].wait().error
    assert error is not None
    assert error.code is ErrorCode.SYNTH_ABORTED
    stage.is_backlogged = False
    np.testing.assert_array_equal(waiters[first].wait().codes, run_alone(golden_model("base"), first)[0])
    stage.is_backlogged = True
    engine.submit(third, waiters[third])
    engine.close()  # so is the end
    error = waiters[third].wait().error
    assert error is not None
    assert error.code is ErrorCode.SYNTH_ABORTED


def test_a_stage_may_submit_although_the_room_is_full_and_the_engine_rests() -> None:
    stage = Backlog()
    stage.is_backlogged = True
    engine = make_engine(waiting_room=2, stage=stage)
    stage.thread = threading.Thread(
        target=lambda: [engine.submit(request, Waiter()) for request in some_requests(6)]
    )
    stage.thread.start()
    stage.thread.join(300)
    assert not stage.thread.is_alive()
    assert engine.stats().waiting == 6
    engine.close()


def test_a_receiver_that_raises_harms_nobody() -> None:
    def fail() -> None:
        raise RuntimeError("a bad receiver")

    engine = make_engine()
    first, second = some_requests(2)
    bad, other = Waiter(fail), Waiter()
    engine.submit(first, bad)
    engine.submit(second, other)
    assert other.wait().codes is not None
    assert bad.wait().codes is not None
    engine.close()
    assert bad.error is not None, "whoever waits for it must hear that it failed"
    assert (bad.error.code, "a bad receiver" in bad.error.message) == (ErrorCode.SYNTH_ENGINE, True)


class Breaks:
    """A model that fails once."""

    def __init__(self) -> None:
        self._model = golden_model("base")
        self.left = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def frame(self, *arguments: Any) -> Any:
        if self.left:
            self.left -= 1
            raise RuntimeError("a fault of the device")
        return self._model.frame(*arguments)


def test_a_fault_fails_those_that_run_and_the_engine_goes_on() -> None:
    engine = make_engine(model=Breaks())
    first, second = some_requests(2)
    broken, whole = Waiter(), Waiter()
    engine.submit(first, broken)
    error = broken.wait().error
    assert error is not None
    assert error.code is ErrorCode.SYNTH_ENGINE
    assert "a fault of the device" in error.message
    engine.submit(second, whole)
    np.testing.assert_array_equal(whole.wait().codes, run_alone(golden_model("base"), second)[0])
    engine.close()


class Held:
    """A model that makes no frame until it may."""

    def __init__(self) -> None:
        self._model = golden_model("base")
        self.asked, self.may = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def frame(self, *arguments: Any) -> Any:
        self.asked.set()
        assert self.may.wait(SECONDS)
        return self._model.frame(*arguments)


def test_close_fails_what_runs_and_refuses_what_comes() -> None:
    model = Held()
    engine = make_engine(model=model)
    waiters = [Waiter() for _ in range(6)]
    for request, waiter in zip(some_requests(6), waiters):
        engine.submit(replace(request, max_tokens=100), waiter)
    assert model.asked.wait(SECONDS)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: engine.closing)
    model.may.set()
    closing.join()
    engine.close()
    assert all(isinstance(waiter.wait().error, SynthesisError) for waiter in waiters)
    assert {waiter.error.code for waiter in waiters if waiter.error} == {ErrorCode.SYNTH_ABORTED}
    with pytest.raises(SynthesisError):
        engine.submit(some_requests(1)[0], Waiter())


def test_an_idle_engine_prepares_for_later_batches_step_by_step_and_serves_requests_meanwhile() -> None:
    model = golden_model("base")
    rng = random.Random(3)
    steps: list[int] = []
    done = threading.Event()

    class Preparing(EagerExecutor):
        def prepare(self) -> bool:
            steps.append(len(steps))
            if len(steps) == 2:
                first.submitted = True
                running.submit(request, first)
            if len(steps) < 6:
                return True
            done.set()
            raise RuntimeError("the last step fails")

    class Submitted(Waiter):
        submitted = False

    first = Submitted()
    request = random_request(rng, model, "a")
    running = Engine(Preparing(model, OPTIONS), OPTIONS)
    try:
        assert done.wait(SECONDS)
        assert first.submitted
        first.wait()
        assert first.error is None
        later = Waiter()
        running.submit(replace(request, request_id="b"), later)
        assert later.wait().error is None
        assert len(steps) == 6, "what failed, or has nothing left, is not asked again"
    finally:
        running.close()


def test_what_arrives_while_an_idle_engine_rests_is_served() -> None:
    model = golden_model("base")
    stage, waiter = Backlog(), Waiter()
    stage.is_backlogged = True
    executor = EagerExecutor(model, OPTIONS)
    running = Engine(executor, OPTIONS, stage=stage)  # type: ignore[arg-type]
    try:
        assert stage.asked.wait(SECONDS)
        running.submit(random_request(random.Random(3), model, "a"), waiter)
        stage.is_backlogged = False
        assert waiter.wait().error is None
    finally:
        running.close()
