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


@pytest.fixture
def answered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Lets a call of the runtime's ledger be preceded by another one, which may fail."""

    def before(name: str, ask: Callable[[], None]) -> None:
        call = getattr(runtime.ledger, name)
        monkeypatch.setattr(runtime.ledger, name, lambda *arguments: (ask(), call(*arguments))[1])

    return before


def test_a_start_waits_for_a_ledger_that_is_away(
    parent: Channel[WorkerReport], runtime: Runtime, answered: Callable[[str, Callable[[], None]], None]
) -> None:
    calls: list[str] = []
    for name in ("check_schema", "register_worker"):

        def fail_once(name: str = name) -> None:
            calls.append(name)
            if calls.count(name) == 1:
                raise away()

        answered(name, fail_once)
    runtime.start()
    assert calls == ["check_schema"] * 2 + ["register_worker"] * 2
    assert [row.state for row in runtime.ledger.worker_statuses(include_ended=True)] == ["up"]
    assert parent.receive(60) == WorkerReport(up=True)


def test_a_start_that_waits_ends_when_it_is_told_to(
    parent: Channel[WorkerReport], runtime: Runtime, answered: Callable[[str, Callable[[], None]], None]
) -> None:
    waiting = threading.Event()

    def fail() -> None:
        waiting.set()
        raise away()

    answered("check_schema", fail)
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


def test_a_start_that_no_wait_mends_fails_at_once(
    runtime: Runtime, answered: Callable[[str, Callable[[], None]], None]
) -> None:
    def fail() -> None:
        raise ServiceError(ErrorCode.LEDGER_SCHEMA, "old")

    answered("check_schema", fail)
    with pytest.raises(ServiceError, match="old"):
        runtime.start()
