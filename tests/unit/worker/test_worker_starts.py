"""How a worker starts: what it waits for, what ends the wait, and what fails at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.settings import Settings
from jobs.worker_group import WorkerReport
from pipelines.errors import ErrorCode, ServiceError
from pipelines.ipc import Channel
from worker.runtime import Runtime


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    runtime = Runtime(Settings(home=tmp_path))
    runtime.ledger.migrate()
    yield runtime
    runtime.stop()


def away() -> ServiceError:
    return ServiceError(ErrorCode.LEDGER_UNREACHABLE, "away")


def test_a_start_waits_for_a_ledger_that_is_away(
    parent: Channel[WorkerReport], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, register = runtime.ledger.check_schema, runtime.ledger.register_worker
    calls: list[str] = []

    def failing_once(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def tried(*arguments: object) -> None:
            calls.append(name)
            if calls.count(name) == 1:
                raise away()
            call(*arguments)

        return tried

    monkeypatch.setattr(runtime.ledger, "check_schema", failing_once("check", check))
    monkeypatch.setattr(runtime.ledger, "register_worker", failing_once("register", register))
    runtime.start()
    assert calls == ["check", "check", "register", "register"]
    assert [row.state for row in runtime.ledger.worker_statuses(include_ended=True)] == ["up"]
    assert parent.receive(60).message == WorkerReport(up=True)


def test_a_start_that_waits_ends_when_it_is_told_to(
    parent: Channel[WorkerReport], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()

    def fail() -> None:
        waiting.set()
        raise away()

    monkeypatch.setattr(runtime.ledger, "check_schema", fail)
    start = threading.Thread(target=runtime.start)
    start.start()
    assert waiting.wait(240)
    runtime.drain()
    start.join(240)
    assert not start.is_alive()
    assert runtime.ledger.worker_statuses(include_ended=True) == []
    with pytest.raises(TimeoutError):
        parent.receive(0)
    runtime.stop()


def test_a_start_that_no_wait_mends_fails_at_once(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ServiceError(ErrorCode.LEDGER_SCHEMA, "old")

    monkeypatch.setattr(runtime.ledger, "check_schema", fail)
    with pytest.raises(ServiceError, match="old"):
        runtime.start()
