"""Workers' parts with the fake voice among the models."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.worker_group import WorkerReport
from pipelines.ipc import Channel
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.worker_rig import Build, Rig


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Builds rigs that are closed after the test."""
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rigs: list[Rig] = []

    def build_rig(**options: object) -> Rig:
        rigs.append(Rig(tmp_path, **options))  # pyright: ignore[reportArgumentType]
        return rigs[-1]

    yield build_rig
    for one in rigs:
        one.close()
    forget()


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel[WorkerReport]]:
    """The end of a process that started this one as its worker."""
    ours, theirs = socket.socketpair()
    channel, own = Channel(ours, WorkerReport), Channel(theirs, bool)
    monkeypatch.setattr("worker.supervisor._parent", lambda: own)
    yield channel
    channel.close()
    own.close()
