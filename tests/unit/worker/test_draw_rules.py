"""What decides over a draw: the text that it is compared with, its own time in the engine, and whether another seed may help."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from jobs.quality import Quality, quality_of
from jobs.repair import Mended, mend
from jobs.shard_file import ShardLine
from jobs.verify import Match, ObjectCheck, reproduce
from pipelines.request import Generation, Message, Speech, SynthesisRequest
from tests.support.fakes import SAMPLE_RATE, FakeClock, FakePipeline, sine
from tests.support.worker_rig import Build, Rig
from worker.leases import HeldLease
from worker.quality.pool import MeterTask
from worker.result_writer import EngineResult, ResultWriter
from worker.shard_progress import PlannedDraw, ShardProgress


@pytest.fixture
def rig(build: Build) -> Rig:
    return build(clock=FakeClock())


class Padded(FakePipeline):
    """Speaks after a second of silence, and before one."""

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        future: Future[Speech] = Future()
        samples = np.pad(sine("as long as this is", request.seed), SAMPLE_RATE)
        future.set_result(Speech(samples, SAMPLE_RATE, "as long as this is"))
        return future


def test_trimmed_audio_is_verified_and_made_again_as_it_was(build: Build) -> None:
    rig = build(pipeline=Padded())
    job = rig.submit(["one", "two"], quality=Quality(trim=True, trim_keep_ms=50))
    rig.run_next()
    spoken = len(sine("as long as this is", 0)) + 2 * SAMPLE_RATE * 50 // 1000
    kept = rig.audio()
    assert [row.artifact.samples for row in rig.items(job) if row.artifact] == pytest.approx([spoken] * 2, abs=SAMPLE_RATE // 50)
    assert [one.match for one in reproduce(rig.ledger, rig.store, job, rig.pipeline, 2)] == [Match.SAME] * 2
    rig.store.delete(next(iter(kept)))
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert mend(rig.ledger, rig.store, job, rig.pipeline, lost) == {Mended.SAME: 1}
    assert rig.audio() == kept


def held_of(rig: Rig, quality: Quality) -> HeldLease:
    rig.submit(["the line says this"], quality=quality)
    return rig.leases.hold(rig.claim_next())


def result_of(rig: Rig, held: HeldLease, made: Speech, **changes: Any) -> EngineResult:
    request = SynthesisRequest("one", (Message("user", "text", "the line says this"),), Generation(), 1)
    return EngineResult(held, rig.store, 0, "item-0", request, made, 5, text="the line says this", **changes)


@pytest.mark.parametrize(
    ("written", "spoken", "expected"),
    [("a written answer", "a spoken text", "a written answer"), (None, "a spoken text", "a spoken text"), (None, "", "the line says this")],
)
def test_words_are_counted_against_the_text_that_the_model_wrote(rig: Rig, written: str | None, spoken: str, expected: str) -> None:
    """Else against the one that it says it spoke, else against the line's."""
    asked: list[MeterTask] = []

    class Meters:
        def submit(self, task: MeterTask) -> Future[Any]:
            asked.append(task)
            return Future()

        def close(self) -> None:
            return

    held = held_of(rig, msgspec.structs.replace(Quality(), meters={"asr": {}}))
    writer = ResultWriter(meters=Meters())  # type: ignore[arg-type]
    writer.serve(rig.store, "wav")
    writer.submit(result_of(rig, held, Speech(sine("text", 1), SAMPLE_RATE, spoken, written)))
    writer.close()
    assert [task.utterance.text for task in asked] == [expected]


def test_an_items_own_time_begins_when_the_engine_has_taken_it(rig: Rig) -> None:
    """The wait for room is the engine's: an item that waited long is not late."""
    held = held_of(rig, Quality())
    line = ShardLine(0, 1, "item-0", (Message("user", "text", "text"),), Generation(), 0, "user")
    progress = ShardProgress(held, [line], clock=rig.clock, timer=_Timer(), wake_at=1)  # type: ignore[arg-type]
    planned = progress.next_draw()
    assert isinstance(planned, PlannedDraw)
    progress.enter(planned, "one")
    rig.clock.sleep(50)
    progress.submitted(0)
    rig.clock.sleep(20)
    assert progress.take_late(30) == ([], False)
    rig.clock.sleep(11)
    assert [late.index for late in progress.take_late(30)[0]] == [0]


class _Timer:
    def enter(self) -> float:
        return 0.0

    def leave(self, _entered_at: float) -> float:
        return 0.0


class Dumb(FakePipeline):
    """Never speaks, and remembers how it was asked."""

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        self.submitted.append(request.request_id)
        future: Future[Speech] = Future()
        future.set_result(Speech(np.zeros(0, np.float32), SAMPLE_RATE))
        return future


@pytest.mark.parametrize(("settings", "draws"), [({}, 5), ({"temperature": 0.7}, 5), ({"temperature": 0.0}, 2)])
def test_an_item_that_is_drawn_greedily_is_not_drawn_again_and_again(build: Build, settings: dict[str, Any], draws: int) -> None:
    """A second draw shows that nothing changes; of a model that samples the next one may speak."""
    rig = build(pipeline=Dumb())
    quality = msgspec.structs.replace(quality_of("basic") or Quality(), draws=5)
    rig.submit(["one"], quality=quality, generation=Generation(**settings))
    rig.run_next()
    assert len(rig.pipeline.submitted) == draws
