"""The feeder and the progress of its shard: at no time is an item that was begun in no state."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.ledger.records import Outcome
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import Speech
from tests.support.fakes import FakeClock
from worker.feeder import Feeder
from worker.shard_progress import EngineTimer, ShardProgress


@pytest.mark.parametrize("how", ["refused", "broken", "late"])
def test_a_failure_is_awaited_until_it_is_settled(how: str) -> None:
    future: Future[Speech] = Future()
    clock = FakeClock()
    seen: list[bool] = []

    class Watched(ShardProgress):
        def settle(self, outcome: Outcome) -> None:
            self.wind_down()
            seen.append(self.finished)
            super().settle(outcome)

    spec = SimpleNamespace(quality=None)
    held: Any = SimpleNamespace(lease=SimpleNamespace(shard_no=0, job=SimpleNamespace(spec=spec)), gone=None, on_gone=lambda _: None)
    pipeline: Any = SimpleNamespace(submit=lambda _: future, abort=lambda _: None)
    writer: Any = SimpleNamespace(full=False)
    line: Any = SimpleNamespace(index=0)
    request: Any = SimpleNamespace(request_id="one")
    progress = Watched(held, [line], clock=clock, timer=EngineTimer(clock), wake_at=9)
    feeder = Feeder(held, progress, lambda *_: request, pipeline=pipeline, writer=writer, store=writer, clock=clock)
    feeder.start()
    feeder.join()
    if how == "late":
        clock.advance(10)
        feeder.expire(5)
    else:
        refusal: NightjarError = SynthesisError(ErrorCode.SYNTH_ENGINE, "Not this.")
        future.set_exception(refusal if how == "refused" else ValueError("no"))
    assert seen == [False]
    assert not progress.finished
    assert [outcome.index for outcome in progress.take(9, clock.monotonic(), 0)] == [0]
    assert progress.finished
