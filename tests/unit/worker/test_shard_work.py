"""The books of a shard's work: at no time is a line that was begun on none of them."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.ledger.records import Outcome
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import Speech
from tests.support.fakes import FakeClock
from worker.shard_work import EngineMeter, ShardWork


@pytest.mark.parametrize("how", ["refused", "broken", "late"])
def test_a_failure_is_awaited_until_it_is_settled(how: str) -> None:
    future: Future[Speech] = Future()
    clock = FakeClock()
    seen: list[bool] = []

    class Watched(ShardWork):
        def settle(self, outcome: Outcome) -> None:
            self.wind_down()
            seen.append(self.finished)
            super().settle(outcome)

    spec = SimpleNamespace(quality=None)
    held: Any = SimpleNamespace(lease=SimpleNamespace(shard_no=0, job=SimpleNamespace(spec=spec)), gone=None, on_gone=lambda _: None)
    pipeline: Any = SimpleNamespace(submit=lambda _: future, abort=lambda _: None)
    storer: Any = SimpleNamespace(full=False)
    line: Any = SimpleNamespace(index=0)
    request: Any = SimpleNamespace(request_id="one")
    work = Watched(
        held, [line], lambda *_: request, pipeline=pipeline, storer=storer, store=storer, clock=clock, meter=EngineMeter(clock), wake_at=9
    )
    work.start()
    work._feeder.join()
    if how == "late":
        clock.advance(10)
        work.expire(5)
    else:
        refusal: NightjarError = SynthesisError(ErrorCode.SYNTH_ENGINE, "Not this.")
        future.set_exception(refusal if how == "refused" else ValueError("no"))
    assert seen == [False]
    assert not work.finished
    assert [outcome.index for outcome in work.take(9, clock.monotonic(), 0)] == [0]
    assert work.finished
