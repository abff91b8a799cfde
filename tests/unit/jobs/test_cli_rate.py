"""The progress that `nightjar run`, `submit` and `watch` show."""

from __future__ import annotations

import pytest

from jobs import progress as follow
from jobs.ingest import IngestProgress
from jobs.ledger.records import Job, JobSpec, JobState
from jobs.ledger.status import ItemCounts, JobStatus
from jobs.progress import RATE_SECONDS, Progress, RecentRate

DAY = 86_400.0


def status(now: float, done: int, *, state: JobState = JobState.RUNNING, failed: int = 0) -> JobStatus:
    """A job of 1000 items that was begun at 0; each item done has 2 s of audio."""
    ended = now if state.final else None
    job = Job(
        JobSpec(model="m"),
        "",
        "in",
        "",
        "",
        "out",
        id="j",
        state=state,
        state_reason="",
        total_items=1000,
        total_shards=4,
        rejected_lines=0,
        lines_read=1000,
        created_at=0.0,
        started_at=0.0,
        finished_at=ended,
    )
    counts = ItemCounts(1000, done, failed, 0)
    return JobStatus(job, counts, {}, done * 2000, 0, 0, now, busy_seconds=ended or now)


def test_a_pause_of_a_day_does_not_slow_the_rate() -> None:
    rate = RecentRate()
    assert rate.facts(status(DAY, 500)) == ""
    assert rate.facts(status(DAY + 10, 600)) == ", 10.00 items/s, RTFx 20.0, 40 s left"


def test_the_rate_is_that_of_the_last_minute() -> None:
    rate = RecentRate()
    for second in range(0, 61, 10):
        rate.facts(status(DAY + second, second // 10))
    for second in range(70, 120, 10):
        rate.facts(status(DAY + second, 6 + (second - 60) * 2))
    assert (
        rate.facts(status(DAY + 2 * RATE_SECONDS, 126, failed=4))
        == ", 4 failed, 2.07 items/s, RTFx 4.0, 7 min 1 s left"
    )


def test_nothing_is_promised_of_a_job_that_stands_still() -> None:
    rate = RecentRate()
    rate.facts(status(DAY, 500))
    assert rate.facts(status(DAY + 30, 500)) == ""
    paused = rate.facts(status(DAY + 40, 520, state=JobState.PAUSED))
    assert "items/s" in paused
    assert " left" not in paused


def test_the_end_tells_of_the_whole_job() -> None:
    rate = RecentRate()
    rate.facts(status(90.0, 990))
    assert rate.facts(status(100.0, 1000, state=JobState.COMPLETED)) == ", 10.00 items/s, RTFx 20.0"


@pytest.mark.parametrize(
    ("first_line_seconds", "said"), [(0.0, "reading: 10 lines, 16 % of the input\n"), (60.0, "")]
)
def test_only_a_long_ingest_tells_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, first_line_seconds: float, said: str
) -> None:
    monkeypatch.setattr(follow, "FIRST_LINE_SECONDS", first_line_seconds)
    with Progress(quiet=False) as progress:
        for lines in (10, 20, 30):
            progress.reading(IngestProgress(lines, lines * 5, 300))
    assert capsys.readouterr().err == said


def test_a_narrow_terminal_shows_all_of_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    bar = follow._bar()  # pyright: ignore[reportPrivateUsage]
    bar.add_task("running", total=1000, completed=997, facts="2 failed, 10.00 items/s, RTFx 20.0, 5 s left")
    with bar.console.capture() as shown:
        bar.console.print(bar.get_renderable())
    (line,) = shown.get().splitlines()
    assert "997/1000 2 failed" in line
