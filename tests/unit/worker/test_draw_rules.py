"""What decides over a draw: the text that it is compared with, its own time in the engine, and whether
another seed may help."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from jobs.checks import Quality, quality_of
from jobs.repair import repair_objects, reproduce
from jobs.verify import ObjectCheck
from pipelines.request import Generation, Speech, SynthesisRequest
from tests.support.fakes import SAMPLE_RATE, FakeClock, FakePipeline, sine
from tests.support.worker_rig import Build, wait_for
from worker.quality.process import MeterTask
from worker.result_writer import ResultWriter


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
    assert [row.artifact.samples for row in rig.items(job) if row.artifact] == pytest.approx(
        [spoken] * 2, abs=SAMPLE_RATE // 50
    )
    assert [one.match for one in reproduce(rig.ledger, rig.store, job, rig.pipeline, 2)] == ["same"] * 2
    rig.store.delete(next(iter(kept)))
    lost = [expected for expected, _ in ObjectCheck(rig.ledger, rig.store, job)]
    assert repair_objects(rig.ledger, rig.store, job, rig.pipeline, lost) == {"same": 1}
    assert rig.audio() == kept


@pytest.mark.parametrize(
    ("written", "spoken", "expected"),
    [
        ("a written answer", "a spoken text", "a written answer"),
        (None, "a spoken text", "a spoken text"),
        (None, "", "the line says this"),
    ],
)
def test_words_are_counted_against_the_text_that_the_model_wrote(
    build: Build, written: str | None, spoken: str, expected: str
) -> None:
    """Else against the one that it says it spoke, else against the line's."""
    asked: list[MeterTask] = []

    class Meters:
        full = False

        def submit(self, task: MeterTask) -> Future[Any]:
            asked.append(task)
            measured: Future[Any] = Future()
            measured.set_result({})
            return measured

        def close(self) -> None:
            return

    class Writes(FakePipeline):
        def submit(self, request: SynthesisRequest) -> Future[Speech]:
            future: Future[Speech] = Future()
            future.set_result(Speech(sine("text", 1), SAMPLE_RATE, spoken, written))
            return future

    rig = build(pipeline=Writes())
    rig.writer = ResultWriter(meters=Meters())  # type: ignore[arg-type]
    rig.runner = rig.runner_on(rig.ledger)
    rig.submit(["the line says this"], quality=msgspec.structs.replace(Quality(), meters={"asr": {}}))
    assert rig.run_next() == "finished"
    assert [task.utterance.text for task in asked] == [expected]


def test_an_items_own_time_begins_when_the_engine_has_taken_it(build: Build, tmp_path: Path) -> None:
    """The wait for room is the engine's: an item that waited long is not late."""
    clock, gates = FakeClock(), [tmp_path / str(n) for n in range(3)]
    rig = build(
        pipeline=FakePipeline(slots=1, waiting_room=1),
        clock=clock,
        item_timeout_seconds=30,
        lease_seconds=1000,
    )
    job = rig.submit([f"[[until:{gate}]] {n}" for n, gate in enumerate(gates)])
    thread = threading.Thread(target=rig.run_next)
    thread.start()
    # One runs, one waits for it, and one waits to be let in.
    wait_for(lambda: len(rig.pipeline.submitted) == 3)
    for number, seconds in enumerate((20, 5)):
        clock.advance(seconds)
        gates[number].touch()
        wait_for(lambda done=number + 1: rig.pipeline.stats().requests_done == done)
    wait_for(lambda: not any(one.name.startswith("feeder-") for one in threading.enumerate()))
    clock.advance(20)
    time.sleep(0.6)
    gates[2].touch()
    thread.join(240)
    assert [row.error_code for row in rig.items(job)] == [None, None, None]


class Dumb(FakePipeline):
    """Never speaks, and remembers how it was asked."""

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        self.submitted.append(request.request_id)
        future: Future[Speech] = Future()
        future.set_result(Speech(np.zeros(0, np.float32), SAMPLE_RATE))
        return future


@pytest.mark.parametrize(
    ("settings", "draws"), [({}, 5), ({"temperature": 0.7}, 5), ({"temperature": 0.0}, 2)]
)
def test_an_item_that_is_drawn_greedily_is_not_drawn_again_and_again(
    build: Build, settings: dict[str, Any], draws: int
) -> None:
    """A second draw shows that nothing changes; of a model that samples the next one may speak."""
    rig = build(pipeline=Dumb())
    quality = msgspec.structs.replace(quality_of("basic") or Quality(), draws=5)
    rig.submit(["one"], quality=quality, generation=Generation(**settings))
    rig.run_next()
    assert len(rig.pipeline.submitted) == draws
