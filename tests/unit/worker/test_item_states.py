"""The states of a shard's items: at no time is an item that was begun in no state."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from jobs.shard_file import read_shard
from pipelines.errors import ErrorCode, NightjarError, SynthesisError
from pipelines.request import Speech, SynthesisRequest
from tests.support.fakes import FakeClock, FakePipeline
from tests.support.worker_rig import Build
from worker.result_writer import Answer, ItemDraw
from worker.shard_run import ShardRun


@pytest.mark.parametrize("how", ["refused", "broken", "late"])
def test_a_failure_is_awaited_until_it_is_settled(build: Build, how: str) -> None:
    future: Future[Speech] = Future()
    clock = FakeClock()
    seen: list[bool] = []

    class Held(FakePipeline):
        def submit(self, request: SynthesisRequest) -> Future[Speech]:
            return future

    class Watched(ShardRun):
        def settle(self, draw: ItemDraw, answer: Answer) -> None:
            self.wind_down()
            seen.append(self.finished)
            super().settle(draw, answer)

    rig = build(clock=clock, pipeline=Held(), lease_seconds=1000, item_timeout_seconds=5)
    rig.submit(["text"])
    lease = rig.claim_next()
    run = Watched(rig.runner, rig.leases.hold(lease))
    run.store = rig.store
    run.begin(rig.pipeline, read_shard(rig.store, lease.input_key, lease.input_sha256), {})
    run.feed_all()
    if how == "late":
        clock.advance(10)
        run.expire()
    else:
        refusal: NightjarError = SynthesisError(ErrorCode.SYNTH_ENGINE, "Not this.")
        future.set_exception(refusal if how == "refused" else ValueError("no"))
    assert seen == [False]
    assert not run.finished
    assert [outcome.index for outcome in run.take(clock.monotonic(), 0)] == [0]
    assert run.finished
