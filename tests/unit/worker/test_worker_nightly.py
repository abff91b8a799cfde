"""Nightly schedules on a real ledger, a folder store and the fake engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import date, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from jobs.delete import delete_job
from jobs.ledger import Ledger
from jobs.settings import Schedule, Settings
from jobs.store import open_store
from pipelines.errors import ConfigError
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.night_kit import changed_schedule
from worker.nightly import NightEnd, input_of, run_nights


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    schedule = changed_schedule(None, input=str(tmp_path / "in-{date}.jsonl"), model="fake", seed=4)
    settings = Settings(home=tmp_path / "home", schedules={"evening": schedule})
    ledger = Ledger(settings.ledger_url)
    ledger.migrate()
    ledger.close()
    yield settings
    forget()


def write_night(tmp_path: Path, night: str) -> None:
    line = {"example_id": "one", "messages": [["user", "text", f"good night {night}"]]}
    (tmp_path / f"in-{night}.jsonl").write_text(json.dumps(line) + "\n")


def ends(settings: Settings, night: str | None, catch_up: int = 0) -> list[NightEnd]:
    return [one.end for one in run_nights(settings, night, catch_up)]


def test_a_night_is_submitted_once(tmp_path: Path, settings: Settings) -> None:
    write_night(tmp_path, "2026-11-20")
    assert ends(settings, "2026-11-20") == ["submitted"]
    assert ends(settings, "2026-11-20") == ["ran"]
    ledger = Ledger(settings.ledger_url)
    (job,) = ledger.jobs()
    ledger.close()
    assert (job.name, job.spec.model, job.spec.seed) == ("evening 2026-11-20", "fake", 4)
    assert job.labels == {"schedule": "evening", "night": "2026-11-20"}


def test_a_night_that_ran_does_not_run_again_when_its_job_is_deleted(
    tmp_path: Path, settings: Settings
) -> None:
    write_night(tmp_path, "2026-11-20")
    assert ends(settings, "2026-11-20") == ["submitted"]
    with closing(Ledger(settings.ledger_url)) as ledger:
        (job,) = ledger.jobs()
        ledger.cancel(job.id)
        delete_job(ledger, open_store(job.store_url), job.id)
        assert ends(settings, "2026-11-20") == ["ran"]
        assert ledger.jobs() == []


def test_a_cancelled_night_is_due_again_after_it_was_reported(tmp_path: Path, settings: Settings) -> None:
    write_night(tmp_path, "2026-11-20")
    assert ends(settings, "2026-11-20") == ["submitted"]
    with closing(Ledger(settings.ledger_url)) as ledger:
        (job,) = ledger.jobs()
        ledger.cancel(job.id)
        assert ends(settings, "2026-11-20") == ["failed"]
        delete_job(ledger, open_store(job.store_url), job.id)
        assert ends(settings, "2026-11-20") == ["submitted"]


def test_a_second_submit_that_was_interrupted_goes_on(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    write_night(tmp_path, "2026-11-20")
    assert ends(settings, "2026-11-20") == ["submitted"]
    with closing(Ledger(settings.ledger_url)) as ledger:
        (job,) = ledger.jobs()
        ledger.cancel(job.id)
        (tmp_path / "in-2026-11-20.jsonl").write_text(
            '{"example_id": "two", "messages": [["user", "text", "x"]]}\n'
        )
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Ledger, "seal_job", interrupted)
            ends(settings, "2026-11-20")
        assert ends(settings, "2026-11-20") == ["submitted"]
        assert len(ledger.jobs()) == 2


@pytest.mark.parametrize("wrong", [{"format": "mp4"}, {"sample_rate": 7_999}])
def test_audio_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Schedule.model_validate({"input": "in.jsonl", **wrong})


def test_equal_files_of_two_nights_are_two_jobs(tmp_path: Path, settings: Settings) -> None:
    for night in ("2026-11-19", "2026-11-20"):
        write_night(tmp_path, "x")
        (tmp_path / "in-x.jsonl").rename(tmp_path / f"in-{night}.jsonl")
    assert ends(settings, "2026-11-20", 1) == ["submitted", "submitted"]
    ledger = Ledger(settings.ledger_url)
    assert len(ledger.jobs()) == 2
    ledger.close()


def test_a_missing_file_is_reported_and_caught_up_later(tmp_path: Path, settings: Settings) -> None:
    report = run_nights(settings, "2026-11-20", 0)
    assert [one.end for one in report] == ["missing"]
    assert any(one.bad for one in report)
    assert "in-2026-11-20.jsonl" in str(report[0])
    write_night(tmp_path, "2026-11-20")
    write_night(tmp_path, "2026-11-22")
    assert ends(settings, "2026-11-22", 2) == ["submitted", "missing", "submitted"]


def test_a_crash_before_the_night_was_recorded_makes_no_second_job(
    tmp_path: Path, settings: Settings
) -> None:
    write_night(tmp_path, "2026-11-20")
    ends(settings, "2026-11-20")
    ledger = Ledger(settings.ledger_url)
    ledger.schedule_forget("evening", "2026-11-20")
    assert ends(settings, "2026-11-20") == ["submitted"]
    assert len(ledger.jobs()) == 1
    ledger.close()


def test_a_bad_file_fails_the_night(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "in-2026-11-20.jsonl").write_text("not json\n")
    strict = settings.model_copy(
        update={"schedules": {"evening": changed_schedule(settings.schedules["evening"], on_error="abort")}}
    )
    assert ends(strict, "2026-11-20") == ["failed"]


@pytest.mark.parametrize(("night", "names"), [("20-11-2026", ()), ("2026-11-20", ("morning",))])
def test_wrong_names_are_refused(settings: Settings, night: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        run_nights(settings, night, 0, names)


def test_nights_of_no_schedule_are_refused(settings: Settings) -> None:
    """As where cron runs the command in a folder that has no nightjar.toml."""
    with pytest.raises(ConfigError, match="No schedule is set"):
        run_nights(settings.model_copy(update={"schedules": {}}), "2026-11-20", 0)


def test_inputs_name_their_night() -> None:
    assert (
        input_of(Schedule(input="s3://b/{date}/in.jsonl"), date(2026, 1, 2)) == "s3://b/2026-01-02/in.jsonl"
    )
    assert input_of(Schedule(input="/in/%Y/%m/%d.jsonl"), date(2026, 1, 2)) == "/in/2026/01/02.jsonl"


@pytest.mark.parametrize("zone", ["Etc/GMT-14", "Etc/GMT+12"])
def test_the_night_is_the_date_where_the_worker_runs(
    settings: Settings, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment, one of these zones has another date than UTC."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        before = datetime.now(ZoneInfo(zone)).date()
        (one,) = run_nights(settings, None, 0)
        assert before <= one.night <= datetime.now(ZoneInfo(zone)).date()
    finally:
        monkeypatch.undo()
        time.tzset()
