"""The files that a home keeps for itself, and the worker that a killed run left in its ledger."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.embedded import EmbeddedHome, open_log, write_own
from jobs.ledger import Ledger
from jobs.ledger.records import JobSpec, ShardState
from jobs.ledger.status import newest_jobs
from jobs.ledger.transaction import read_with_driver
from jobs.recent_jobs import homes_of, remember
from jobs.report import default_place
from jobs.settings import Settings, embedded_broker_url
from nightjar.inputs import written_input
from pipelines.errors import ErrorCode, ServiceError, StoreError
from tests.support.ledger_kit import execute, lease_next, submit, worker


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / ".nightjar"
    folder.mkdir(parents=True)
    (tmp_path / "precious").write_text("precious")
    return folder


def plant(path: Path, how: str) -> None:
    """Puts something in the place of a file of ours."""
    if how == "link":
        path.symlink_to(path.parents[2] / "precious")
    elif how == "dangling link":
        path.symlink_to(path.parents[2] / "new")
    elif how == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


PLANTED = pytest.mark.parametrize("how", ["link", "dangling link", "pipe", "folder"])


def check(state: Path, error: StoreError) -> None:
    assert error.code is ErrorCode.STORE_FORBIDDEN
    assert "not a regular file" in error.message
    assert "remove it" in error.advice
    assert (state.parents[1] / "precious").read_text() == "precious"
    assert not (state.parents[1] / "new").exists()


@PLANTED
def test_a_planted_lock_is_refused(state: Path, how: str) -> None:
    plant(state / "lock", how)
    with pytest.raises(StoreError) as caught, EmbeddedHome(Settings(home=state.parent)):
        pass
    check(state, caught.value)


@PLANTED
@pytest.mark.parametrize("name", ["worker.log", "broker.log"])
def test_a_planted_log_is_refused(state: Path, how: str, name: str) -> None:
    plant(state / name, how)
    with pytest.raises(StoreError) as caught:
        open_log(state / name)
    check(state, caught.value)


@PLANTED
@pytest.mark.parametrize("name", ["broker.json", "broker.json.unfinished"])
def test_a_planted_record_is_refused(state: Path, how: str, name: str) -> None:
    plant(state / name, how)
    with pytest.raises(StoreError) as caught:
        write_own(state / "broker.json", {"pid": 1})
    check(state, caught.value)


@PLANTED
@pytest.mark.parametrize("ending", ["", "-wal", "-shm", "-journal", ".migrate"])
def test_a_planted_file_of_the_ledger_is_refused(state: Path, how: str, ending: str) -> None:
    if ending:
        # Closed: SQLite removes `-wal` and `-shm` with its last connection, also a planted one.
        with closing(ledger_of(state)) as ledger:
            ledger.migrate()
        (state / f"ledger.sqlite{ending}").unlink(missing_ok=True)
    plant(state / f"ledger.sqlite{ending}", how)
    before = set(state.parents[1].iterdir())
    with pytest.raises(StoreError) as caught:
        ledger_of(state).migrate()
    check(state, caught.value)
    with pytest.raises(StoreError):
        list(ledger_of(state).jobs())
    with pytest.raises(StoreError):
        read_with_driver(Settings(home=state.parent).ledger_url, newest_jobs)
    assert set(state.parents[1].iterdir()) == before


@pytest.mark.parametrize("how", ["link", "dangling link", "file"])
def test_a_state_folder_that_is_a_link_is_refused(tmp_path: Path, how: str) -> None:
    """What is behind it is somebody else's: nothing is made there, read or waited for."""
    victim = tmp_path / "victim"
    if how == "link":
        victim.mkdir()
    elif how == "file":
        victim.write_text("")
    home = tmp_path / "home"
    home.mkdir()
    (home / ".nightjar").symlink_to(victim)
    settings = Settings(home=home)
    with pytest.raises(StoreError) as caught, EmbeddedHome(settings):
        pass
    assert caught.value.code is ErrorCode.STORE_FORBIDDEN
    for use in (
        Ledger.of(settings).migrate,
        Ledger.of(settings).jobs,
        lambda: embedded_broker_url(settings.state_folder),
        lambda: written_input(["one"], JobSpec("m"), settings.state_folder),
    ):
        with pytest.raises(StoreError) as caught:
            use()
        assert caught.value.code is ErrorCode.STORE_FORBIDDEN
    assert not victim.is_dir() or list(victim.iterdir()) == []


@PLANTED
def test_a_planted_report_is_refused(state: Path, how: str) -> None:
    reports = state.parent / "reports"
    reports.mkdir()
    plant(reports / "01J.html", how)
    with pytest.raises(StoreError) as caught:
        default_place(Settings(home=state.parent), "01J")
    check(state, caught.value)


def test_a_folder_of_reports_that_is_a_link_is_refused(state: Path, tmp_path: Path) -> None:
    (state.parent / "reports").symlink_to(tmp_path)
    with pytest.raises(StoreError) as caught:
        default_place(Settings(home=state.parent), "01J")
    check(state, caught.value)


def test_a_planted_note_of_a_job_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note is a convenience: what cannot be written costs no job."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    victim = tmp_path / "precious"
    victim.write_text("precious")
    notes = tmp_path / "state" / "nightjar" / "jobs"
    notes.mkdir(parents=True)
    (notes / "01j").symlink_to(victim)
    remember("01j", tmp_path)
    assert victim.read_text() == "precious"
    assert homes_of("01j") == set()
    (tmp_path / ".nightjar").mkdir()
    (tmp_path / ".nightjar" / "ledger.sqlite").touch()
    remember("01k", tmp_path)
    assert homes_of("01") == {tmp_path}, "a note that cannot be read hides another one"


def test_the_database_of_another_program_is_left_untouched(state: Path) -> None:
    with closing(sqlite3.connect(state / "ledger.sqlite")) as other, other:
        other.execute("CREATE TABLE bookmarks (url TEXT)")
    before = (state / "ledger.sqlite").read_bytes()
    with pytest.raises(ServiceError) as caught:
        ledger_of(state).migrate()
    assert caught.value.code is ErrorCode.LEDGER_SCHEMA
    assert "another program" in caught.value.message
    assert (state / "ledger.sqlite").read_bytes() == before
    assert not (state / "ledger.sqlite-wal").exists()


def test_a_file_that_is_no_database_is_left_untouched(state: Path) -> None:
    (state / "ledger.sqlite").write_text("a diary\n" * 999)
    with pytest.raises(ServiceError):
        ledger_of(state).migrate()
    assert (state / "ledger.sqlite").read_text() == "a diary\n" * 999


def ledger_of(state: Path) -> Ledger:
    return Ledger.of(Settings(home=state.parent))


def test_a_record_is_there_whole_while_it_is_written(state: Path) -> None:
    class Unwritable:
        """JSON has no word for it."""

    write_own(state / "broker.json", {"pids": [1]})
    with pytest.raises(TypeError):
        write_own(state / "broker.json", {"pids": [2, Unwritable()]})
    assert json.loads((state / "broker.json").read_text()) == {"pids": [1]}
    write_own(state / "broker.json", {"pids": [3]})
    assert json.loads((state / "broker.json").read_text()) == {"pids": [3]}


def test_leases_of_workers_that_are_dead_end_at_once(state: Path) -> None:
    with closing(ledger_of(state)) as ledger:
        ledger.migrate()
        for number, name in enumerate(("dead", "home:own", "gone", "fleet")):
            ledger.register_worker(replace(worker(name, "here"), pid=41 + number))
        ledger.retire_worker("gone")
        job = submit(ledger, (2, 2, 2))
        for worker_id in ("dead", "dead", "home:own"):
            lease_next(ledger, worker_id)
        execute(ledger, "UPDATE shards SET heartbeat_at = heartbeat_at - 1 WHERE state = 'leased'")
        assert (ledger.end_dead_workers("here", 41), ledger.end_dead_workers("here", 45)) == (2, 0)
        assert ledger.reconcile(queued_timeout_seconds=0).expired_leases == 2
        assert ledger.status(job.id).shards == {ShardState.READY: 2, ShardState.LEASED: 1}
        states = lambda: {row.id: row.state for row in ledger.worker_statuses(include_ended=True)}  # noqa: E731
        assert states() == {"dead": "lost", "home:own": "up", "gone": "retired", "fleet": "up"}
        # The run of a home has killed its own workers alone.
        assert ledger.end_dead_workers() == 1
        assert states() == {"dead": "lost", "home:own": "lost", "gone": "retired", "fleet": "up"}


def test_a_home_that_was_moved_or_replaced_is_noticed(tmp_path: Path) -> None:
    home, moved = tmp_path / "home", tmp_path / "moved"
    with EmbeddedHome(Settings(home=home)) as held:
        held.check_place()
        home.rename(moved)
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                held.check_place()
            assert (caught.value.code, str(home) in caught.value.message) == (
                ErrorCode.STORE_UNREACHABLE,
                True,
            )
            (home / ".nightjar").mkdir(parents=True, exist_ok=True)
            (home / ".nightjar" / "lock").touch()
    assert (moved / ".nightjar" / "lock").exists()


@pytest.mark.parametrize("left", ["nothing", "a mount point"])
def test_nothing_is_written_where_a_home_was(tmp_path: Path, left: str) -> None:
    home = tmp_path / "home"
    with EmbeddedHome(Settings(home=home)) as held:
        home.rename(tmp_path / "moved")
        if left == "a mount point":
            home.mkdir()
        for write in (
            lambda: write_own(held.state / "broker.json", {}),
            lambda: os.close(open_log(held.worker_log)),
        ):
            with pytest.raises(FileNotFoundError):
                write()
    assert [path for path in tmp_path.rglob("*") if path.is_relative_to(home)] == (
        [home] if left == "a mount point" else []
    )


def test_a_home_that_is_left_early_does_not_open_its_ledger(tmp_path: Path) -> None:
    with EmbeddedHome(Settings(home=tmp_path / "home")) as held:
        pass
    assert not (held.state / "ledger.sqlite").exists()
    assert "ledger" not in vars(held)
