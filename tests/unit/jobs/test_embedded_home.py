"""The files that a home keeps for itself, and the worker that a killed run left in its ledger."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from jobs.embedded import EmbeddedHome, _open_log, _write_own
from jobs.ledger import Ledger
from jobs.ledger.records import ShardState
from jobs.settings import Settings
from pipelines.errors import ErrorCode, StoreError
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
        _open_log(state / name)
    check(state, caught.value)


@PLANTED
@pytest.mark.parametrize("name", ["broker.json", "broker.json.unfinished"])
def test_a_planted_record_is_refused(state: Path, how: str, name: str) -> None:
    plant(state / name, how)
    with pytest.raises(StoreError) as caught:
        _write_own(state / "broker.json", {"pid": 1})
    check(state, caught.value)


def test_a_record_is_there_whole_while_it_is_written(state: Path) -> None:
    class Unwritable:
        """JSON has no word for it."""

    _write_own(state / "worker.json", {"pids": [1]})
    with pytest.raises(TypeError):
        _write_own(state / "worker.json", {"pids": [2, Unwritable()]})
    assert json.loads((state / "worker.json").read_text()) == {"pids": [1]}
    _write_own(state / "worker.json", {"pids": [3]})
    assert json.loads((state / "worker.json").read_text()) == {"pids": [3]}


def test_the_worker_of_a_killed_run_is_known_and_its_leases_end_at_once(state: Path) -> None:
    settings = Settings(home=state.parent)
    ledger = Ledger.open(settings.ledger_url)
    ledger.migrate()
    dead, other = worker("dead", socket.gethostname()), worker("other", socket.gethostname())
    for info, pid in ((dead, 41), (other, 42)):
        ledger.register_worker(type(info)(**{**{name: getattr(info, name) for name in info.__dataclass_fields__}, "pid": pid}))
    job = submit(ledger, (2, 2, 2))
    for worker_id in ("dead", "dead", "other"):
        lease_next(ledger, worker_id)
    execute(ledger, "UPDATE shards SET heartbeat_at = heartbeat_at - 1 WHERE state = 'leased'")
    (state / "worker.json").write_text(json.dumps({"host": socket.gethostname(), "pids": [41, 43]}))
    with EmbeddedHome(settings) as home:
        assert home.lost_workers == [(socket.gethostname(), 41), (socket.gethostname(), 43)]
        assert [ledger.lose_worker(*lost) for lost in home.lost_workers] == [2, 0]
        assert ledger.reconcile(queued_timeout_seconds=0).expired_leases == 2
    assert ledger.status(job.id).shards == {ShardState.READY: 2, ShardState.LEASED: 1}
    assert {row.id: row.state for row in ledger.worker_statuses(everyone=True)} == {"dead": "lost", "other": "up"}
    ledger.close()


def test_the_record_of_a_version_with_one_worker_is_read(state: Path) -> None:
    (state / "worker.json").write_text(json.dumps({"host": "here", "pid": 41}))
    with EmbeddedHome(Settings(home=state.parent)) as home:
        assert home.lost_workers == [("here", 41)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": "x", "pid": "y"}', '{"host": "x", "pids": 3}', '{"host": "x"'])
def test_a_record_that_says_nothing_is_no_worker(state: Path, text: str) -> None:
    (state / "worker.json").write_text(text)
    with EmbeddedHome(Settings(home=state.parent)) as home:
        assert home.lost_workers == []


def test_a_home_that_was_moved_or_replaced_is_noticed(tmp_path: Path) -> None:
    home, moved = tmp_path / "home", tmp_path / "moved"
    with EmbeddedHome(Settings(home=home)) as held:
        held.check_place()
        home.rename(moved)
        for _ in range(2):
            with pytest.raises(StoreError) as caught:
                held.check_place()
            assert (caught.value.code, str(home) in caught.value.message) == (ErrorCode.STORE_UNREACHABLE, True)
            (home / ".nightjar").mkdir(parents=True, exist_ok=True)
            (home / ".nightjar" / "lock").touch()
    assert (moved / ".nightjar" / "lock").exists()
