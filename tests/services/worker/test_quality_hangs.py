"""Items that meters hang on, on their whole way: they end, their neighbours are made, and so does their
job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jobs.checks import Option, quality_of
from jobs.ingest import SubmitOptions
from jobs.ledger.records import JobState
from pipelines.errors import ErrorCode
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.ledger_kit import wake
from tests.support.quality_kit import TextMeter
from tests.support.worker_rig import Rig
from worker.quality.meters import Readings, Utterance
from worker.quality.process import HANGS_IN_A_ROW, OUTAGES_IN_A_ROW, MeterHangError, MeterPool
from worker.result_writer import ResultWriter


class Hanging(TextMeter):
    """Never answers on a text that begins with "Hang"."""

    def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
        if utterance.text.startswith("Hang"):
            raise MeterHangError("It took long.")
        return super().measure_one(meters, utterance)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A worker whose meters hang."""
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rig = Rig(tmp_path)
    rig.writer = ResultWriter(meters=MeterPool(open_host=Hanging))
    rig.runner = rig.runner_on(rig.ledger)
    yield rig
    rig.close()
    forget()


@pytest.mark.parametrize("hanging", [1, HANGS_IN_A_ROW + 1])
def test_items_that_meters_hang_on_spend_their_attempts_and_the_job_ends(rig: Rig, hanging: int) -> None:
    made, attempts = 4, HANGS_IN_A_ROW + 1
    texts = [*(f"text {n}" for n in range(made)), *(f"Hang {n}" for n in range(hanging))]
    job = rig.submit(
        texts, quality=quality_of("basic", None, ["vad=silero"]), options=SubmitOptions(max_attempts=attempts)
    )
    # Each lease tells an outage, so often after each answer, or is one of the attempts of every item that is
    # left.
    for _ in range(OUTAGES_IN_A_ROW * (made + 1) + attempts):
        if not rig.status(job).job.state.final:
            wake(rig.ledger)
            rig.run_next()
    assert rig.status(job).job.state is JobState.COMPLETED_WITH_ERRORS
    rows = rig.items(job)
    assert [row.error_code for row in rows] == [None] * made + [ErrorCode.QA_METER] * hanging
    assert {row.attempts for row in rows[made:]} == {attempts}
