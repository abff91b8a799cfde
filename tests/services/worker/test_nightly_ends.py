"""How nights end: jobs that failed, were cancelled or paused, nights that are run again, and datasets of
jobs that went on."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from jobs.delete import delete_job
from jobs.export.dataset import FolderDestination
from jobs.ledger import Ledger
from jobs.ledger.records import JobState
from jobs.ledger.status import JobStatus
from jobs.recent_jobs import homes_of
from pipelines.audio import encode
from pipelines.errors import ErrorCode, ServiceError
from tests.support.fakes import SAMPLE_RATE, sine
from tests.support.night_kit import EXPORTS, NIGHT, House, line
from worker import cli as command
from worker import nightly
from worker.nightly import Night


@pytest.mark.parametrize("bad", [("no json", "nor this"), ()])
def test_a_night_without_items_is_an_error_and_stays_due(house: House, bad: tuple[str, ...]) -> None:
    house.write(*bad)
    for _ in range(2):
        report = house.report()
        (night,) = report
        assert any(one.bad for one in report)
        assert (night.end, night.code, night.state, night.datasets) == (
            "failed",
            ErrorCode.INPUT_NO_ITEMS,
            JobState.FAILED,
            (),
        )
        assert "input.no_items" in str(night)
        assert "run the night again" in str(night)
        assert (night.view["end"], night.view["code"], night.view["state"]) == (
            "failed",
            "input.no_items",
            "failed",
        )
    assert len(house.ledger.jobs()) == 1
    assert not house.sets.exists()
    assert house.ledger.schedule_history("news") == []

    house.write(line("a"), line("b"))
    night = house.run()
    assert (night.end, night.state) == ("submitted", JobState.READY)
    assert len(house.ledger.jobs()) == 2
    house.make(night)
    after = house.run()
    assert (after.end, after.job_id, [one.reason for one in after.datasets]) == (
        "ran",
        night.job_id,
        [None] * 4,
    )
    assert house.exported() == ["a", "b"]
    assert house.ledger.schedule_history("news") == [NIGHT.isoformat()]


def test_the_command_ends_with_1_for_a_failed_night(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    house.write("no json")
    of_news = house.settings.schedules["news"].model_dump(include={"input", "exports", "export_to"})
    monkeypatch.setenv("SPEECH_HOME", str(house.settings.home))
    monkeypatch.setenv("SPEECH_SCHEDULES", json.dumps({"news": {"model": "fake", "qa": "off", **of_news}}))
    for arguments, code in (([], 1), (["--json"], 1)):
        with pytest.raises(SystemExit) as ended:
            command.cli(["nightly", "--night", NIGHT.isoformat(), *arguments])
        assert ended.value.code == code
        assert "input.no_items" in capsys.readouterr().out
    house.write(line("a"))
    for arguments, code in (([], 0), (["--wait", "0.000001"], 7)):
        with pytest.raises(SystemExit) as ended:
            command.cli(["nightly", "--night", NIGHT.isoformat(), *arguments])
        assert ended.value.code == code
        assert "its job is ready" in capsys.readouterr().out


def test_the_same_file_of_a_failed_night_is_read_once_more_only_if_asked(house: House) -> None:
    house.write(
        json.dumps(
            {"example_id": "a", "messages": [["user", "audio", "voice.wav"], ["user", "text", "Hello."]]}
        )
    )
    assert house.run().code is ErrorCode.INPUT_NO_ITEMS
    (house.folder / "voice.wav").write_bytes(encode(sine("voice", 1), SAMPLE_RATE, "wav"))
    night = house.run()
    assert (night.end, "--again" in night.reason) == ("failed", True)
    assert house.run(again=True).end == "submitted"


def test_a_night_goes_on_without_its_deleted_first_job(house: House) -> None:
    numbers = lambda: list(Night(house.settings, house.ledger, "news", NIGHT).jobs())  # noqa: E731
    house.write("no json")
    first = house.run()
    house.write("nor this")
    second = house.run()
    delete_job(house.ledger, house.store, first.job_id)
    assert numbers() == [2]
    assert house.run().job_id == second.job_id, "the night's last job is known"
    house.write(line("a"))
    third = house.run()
    assert (third.end, numbers()) == ("submitted", [2, 3])
    delete_job(house.ledger, house.store, second.job_id)
    house.make(third)
    after = house.run()
    assert (after.end, after.job_id, [one.reason for one in after.datasets]) == (
        "ran",
        third.job_id,
        [None] * 4,
    )
    assert house.exported() == ["a"]


def test_a_cancelled_night_stays_due_until_its_file_changes(house: House) -> None:
    house.write(line("a"), line("b"))
    first = house.run()
    house.ledger.cancel(first.job_id)
    for _ in range(2):
        night = house.run()
        assert (night.end, night.code, night.job_id, night.datasets) == (
            "failed",
            ErrorCode.LEDGER_STATE,
            first.job_id,
            (),
        )
        assert "was cancelled" in night.reason
    assert not house.sets.exists()
    house.write(line("c"))
    second = house.run()
    assert (second.end, second.job_id == first.job_id) == ("submitted", False)
    house.ledger.cancel(second.job_id)
    assert house.run().end == "failed"
    third = house.run(again=True)
    assert (third.end, house.job(third).input_sha256) == ("submitted", house.job(second).input_sha256)
    house.make(third)
    assert house.run(again=True).job_id == third.job_id
    assert house.exported() == ["c"]


def test_a_job_cancelled_while_the_night_waits_is_an_error(house: House) -> None:
    house.write(line("a"))
    night = house.run()
    canceller = threading.Thread(target=house.ledger.cancel, args=(night.job_id,))
    canceller.start()
    waited = house.run(wait_seconds=400)
    canceller.join()
    assert (waited.end, waited.state, waited.code) == (
        "failed",
        JobState.CANCELLED,
        ErrorCode.LEDGER_STATE,
    )


def test_a_paused_night_is_told_and_not_finished(house: House) -> None:
    house.write(line("a"))
    night = house.run()
    house.ledger.pause(night.job_id)
    report = house.report()
    (paused,) = report
    assert (paused.end, paused.state, paused.datasets) == ("ran", JobState.PAUSED, ())
    assert "nightjar resume" in paused.reason
    assert (any(one.bad for one in report), any(one.unfinished for one in report)) == (False, True)
    assert not house.sets.exists()
    house.ledger.resume(night.job_id)
    house.make(night)
    report = house.report()
    assert (
        any(one.bad for one in report),
        any(one.unfinished for one in report),
        len(report[0].datasets),
    ) == (False, False, 4)


def test_a_night_that_waits_holds_no_other_back(house: House) -> None:
    later = date(2026, 11, 21)
    house.write(line("a"))
    house.write(line("b"), night=later)
    first, second = house.report(later, 1)
    house.ledger.pause(first.job_id)
    house.make(second)
    waiting, done = house.report(later, 1, wait_seconds=0.01)
    assert (waiting.state, waiting.datasets) == (JobState.PAUSED, ())
    assert [one.items for one in done.datasets] == [1, 0, 1, 1]


def test_errors_of_a_night_that_ended_well_are_counted(house: House) -> None:
    house.write(line("a"), "no json", line("fails-1"), line("b"), line("a"))
    house.make(house.run())
    report = house.report()
    (night,) = report
    assert (night.end, night.state, any(one.bad for one in report)) == (
        "ran",
        JobState.COMPLETED_WITH_ERRORS,
        False,
    )
    assert (night.failed_items, night.rejected_lines) == (1, 2)
    assert f"1 item failed, 2 lines refused; see why with: nightjar errors {night.job_id}" in str(night)
    assert [one.items for one in night.datasets] == [2, 3, 2, 2]


def test_a_night_that_made_nothing_is_no_success(house: House) -> None:
    house.write(line("fails-1"), "no json")
    house.make(house.run())
    report = house.report()
    (night,) = report
    assert (night.end, night.state, night.done_items, any(one.bad for one in report)) == (
        "ran",
        JobState.COMPLETED_WITH_ERRORS,
        0,
        True,
    )
    house.ledger.retry(night.job_id, None)
    house.make(night, mended=True)
    report = house.report()
    assert (report[0].done_items, any(one.bad for one in report)) == (1, False)


def test_a_night_that_is_looked_at_again_changes_nothing(house: House) -> None:
    house.write(line("a"))
    night = house.run()
    # Its job is found from any folder, as every other.
    assert homes_of(night.job_id) == {house.settings.home.absolute()}
    house.make(night)
    house.run()
    before = house.contents()
    times = {path: path.stat().st_mtime_ns for path in house.sets.rglob("*") if path.is_file()}
    with capture_logs() as logs:
        again = house.run()
    assert (again.end, [(one.items, one.reason) for one in again.datasets]) == (
        "ran",
        [(1, None), (0, None), (1, None), (1, None)],
    )
    assert (house.contents(), {path: path.stat().st_mtime_ns for path in times}) == (before, times)
    assert logs == []


def test_a_retry_makes_the_datasets_of_its_night_anew(house: House) -> None:
    house.write(line("a"), line("fails-1"), line("b"))
    night = house.run()
    house.make(night)
    house.run()
    first = house.contents()
    assert house.exported() == ["a", "b"]
    assert house.ledger.retry(night.job_id, None) == 1
    running = house.run()
    assert (running.end, running.state, running.datasets) == ("ran", JobState.RUNNING, ())
    assert house.contents() == first
    house.make(night, mended=True)
    after = house.run()
    assert [(one.items, one.reason) for one in after.datasets] == [(3, None), (0, None), (3, None), (3, None)]
    assert house.exported() == ["a", "fails-1", "b"]
    files = {
        file["name"]: file["sha256"]
        for file in json.loads((house.sets / "webdataset" / "export.json").read_text())["files"]
    }
    stands = {name.removeprefix("webdataset/") for name in house.contents() if name.startswith("webdataset/")}
    assert stands == {"export.json", *files}
    second = house.contents()
    house.run()
    assert house.contents() == second


class StoppedError(BaseException):
    """The process is killed: no handler of errors sees it."""


def stop_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Ends the process, as it were, after so many files were published or removed."""
    left = iter(range(calls))
    for name in ("remove", "publish"):
        whole = getattr(FolderDestination, name)

        def some(*arguments: Any, whole: Any = whole) -> None:
            if next(left, None) is None:
                raise StoppedError
            whole(*arguments)

        monkeypatch.setattr(FolderDestination, name, some)


@pytest.mark.parametrize("begun", [None, 4])
def test_a_dataset_that_was_being_written_anew_goes_on(
    house: House, monkeypatch: pytest.MonkeyPatch, begun: int | None
) -> None:
    schedule = house.settings.schedules["news"].model_copy(update={"exports": ("webdataset",)})
    house.settings = house.settings.model_copy(update={"schedules": {"news": schedule}})
    house.write(line("a"), line("fails-1"), line("b"))
    night = house.run()
    house.make(night)
    if begun is None:
        house.run()
    else:
        with monkeypatch.context() as patch, pytest.raises(StoppedError):
            stop_after(patch, begun)
            house.run()
    house.ledger.retry(night.job_id, None)
    house.make(night, mended=True)
    shutil.copytree(house.sets, house.folder / "before")
    found: list[dict[str, bytes]] = []
    for calls in (0, 1, 2, 3, 5, 7, 9, 1000):
        shutil.rmtree(house.sets)
        shutil.copytree(house.folder / "before", house.sets)
        with monkeypatch.context() as patch, suppress(StoppedError):
            stop_after(patch, calls)
            house.run()
            assert calls == 1000
        told = house.sets / "webdataset" / "export.json"
        assert not told.exists() or all(
            (told.parent / file["name"]).exists() for file in json.loads(told.read_text())["files"]
        )
        (dataset,) = house.run().datasets
        assert (dataset.items, dataset.reason) == (3, None)
        found.append(house.contents())
    assert all(one == found[-1] for one in found)
    assert not [name for name in found[-1] if "_export" in name]


@pytest.mark.parametrize("change", ["new", "changed", "link"])
def test_a_persons_file_in_a_dataset_is_never_touched(house: House, change: str) -> None:
    house.write(line("a"), line("fails-1"))
    night = house.run()
    house.make(night)
    house.run()
    mine = house.sets / "webdataset" / ("provenance.json" if change == "changed" else "notes.txt")
    if change == "link":
        mine.symlink_to(house.folder)
    else:
        mine.write_text("mine")
    (house.sets / "espnet.jsonl").write_text("mine")
    before = house.contents()
    house.ledger.retry(night.job_id, None)
    house.make(night, mended=True)
    report = house.report()
    assert any(one.bad for one in report)
    assert {one.format: bool(one.reason) for one in report[0].datasets} == {
        "espnet": True,
        "openai-batch-errors": False,
        "webdataset": True,
        "report": False,
    }
    kept = {
        name: data
        for name, data in house.contents().items()
        if name == "espnet.jsonl" or name.startswith("webdataset/")
    }
    assert kept == {name: data for name, data in before.items() if name in kept}
    mine.unlink()
    (house.sets / "espnet.jsonl").unlink()
    assert not any(one.bad for one in house.report())
    assert house.exported() == ["a", "fails-1"]


def test_a_file_that_was_there_before_is_never_written_over(house: House) -> None:
    house.write(line("a"))
    house.make(house.run())
    house.sets.mkdir(parents=True)
    for name in ("espnet.jsonl", "report.html"):
        (house.sets / name).write_text("mine")
    night = house.run()
    assert {one.format for one in night.datasets if one.reason} == {"espnet", "report"}
    assert {(house.sets / name).read_text() for name in ("espnet.jsonl", "report.html")} == {"mine"}


def test_an_error_that_nobody_foresaw_keeps_no_other_dataset_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = nightly.export_jobs

    def export(*given: Any, **options: Any) -> Any:
        if given[1] == "espnet":
            raise ValueError("a surprise")
        return write(*given, **options)

    monkeypatch.setattr(nightly, "export_jobs", export)
    house.write(line("a"))
    house.make(house.run())
    night = house.run()
    assert [(one.format, "a surprise" in (one.reason or "")) for one in night.datasets] == [
        (name, name == "espnet") for name in EXPORTS
    ]
    assert {one.items for one in night.datasets if not one.reason} == {0, 1}


def test_a_night_run_again_takes_the_place_of_its_own_datasets(house: House) -> None:
    house.write(line("a"), line("fails-1"))
    first = house.run()
    house.make(first)
    house.run()
    house.ledger.retry(first.job_id, None)
    house.ledger.cancel(first.job_id)
    house.write(line("c"))
    second = house.run()
    assert house.exported() == ["a"]
    house.make(second)
    assert [one.reason for one in house.run().datasets] == [None] * 4
    assert house.exported() == ["c"]
    assert (
        json.loads((house.sets / "webdataset" / "export.json").read_text())["identity"]["job"]
        == second.job_id
    )


def test_a_file_changed_after_its_submit_was_stopped_names_the_job(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.write(line("a"))
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "seal_job", lambda *_: (_ for _ in ()).throw(StoppedError))
        with pytest.raises(StoppedError):
            house.run()
    (job,) = house.ledger.jobs()
    house.write(line("b"))
    night = house.run()
    assert (night.end, job.id in night.reason) == ("failed", True)
    house.ledger.cancel(job.id)
    assert house.run().end == "submitted"


def test_a_ledger_that_is_away_for_a_moment_ends_no_wait(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.write(line("a"))
    house.make(house.run())
    whole, away = Ledger.status, iter([True])

    def status(self: Ledger, job_id: str) -> JobStatus:
        if next(away, False):
            raise ServiceError(ErrorCode.LEDGER_UNREACHABLE, "The ledger is away.")
        return whole(self, job_id)

    monkeypatch.setattr(Ledger, "status", status)
    assert len(house.run(wait_seconds=400).datasets) == 4
    away = iter([True])
    with pytest.raises(ServiceError):
        house.run()


def test_what_names_hold_cannot_forge_a_line(house: House) -> None:
    news = house.settings.schedules["news"].model_copy(update={"export_to": None})
    names = ("../../up", "a/b", "\u202enews\nnews 2026-11-20 ran")
    house.settings = house.settings.model_copy(update={"schedules": dict.fromkeys(names, news)})
    house.write(line("../../x"), line("\u202eabc\n"))
    for night in house.report():
        house.make(night)
    nights = house.report()
    assert [len(str(one).splitlines()) for one in nights] == [5, 5, 5]
    assert not any("\u202e" in str(one) for one in nights)
    assert all(
        Path(one.to).is_relative_to(house.settings.home.absolute() / "datasets")
        for night in nights
        for one in night.datasets
    )
