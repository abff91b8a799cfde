"""What a worker does where its engine cannot be opened, and when it says that it uses one of several GPUs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from jobs.ledger.records import ItemState, ShardState, Ticket
from jobs.settings import Settings
from jobs.worker_group import WorkerReport
from pipelines.errors import (
    ConfigError,
    EngineCrashError,
    ErrorCode,
    ModelError,
    NightjarError,
    SynthesisError,
)
from pipelines.ipc import Channel
from pipelines.registry import register_pipeline
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakeClock, FakePipeline
from tests.support.ledger_kit import execute
from tests.support.worker_rig import WORKER, Build, Rig
from worker import cli as commands
from worker.leases import LeaseGoneError
from worker.runtime import Runtime
from worker.supervisor import report

CRASH = EngineCrashError(ErrorCode.WORKER_CRASH, "The engine's process ended.")
FULL = SynthesisError(ErrorCode.SYNTH_OOM, "Another program fills the GPU.")
REFUSED = ConfigError(ErrorCode.CONFIG_INVALID, "The graph executor needs a CUDA device.")
AWAY = ModelError(ErrorCode.MODEL_UNREACHABLE, "The hub is away.")
FAILED = SynthesisError(ErrorCode.SYNTH_ENGINE, "vLLM could not start.")


def settings_of(rig: Rig) -> Settings:
    """Those of a rig whose worker is of another host, and leaves."""
    rig.ledger.retire_worker(WORKER.id)
    return rig.settings


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """The signals by which the worker asked its own process to end."""
    sent: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: sent.append(number))
    yield sent
    signal.signal(signal.SIGTERM, before)


def failing(*errors: NightjarError) -> None:
    """The model is opened with these errors, then without one."""
    left = list(errors)

    def open_fake(**_: object) -> FakePipeline:
        if not left:
            return FakePipeline()
        raise left.pop(0)

    register_pipeline("fake", fake_card(), open_fake)


@pytest.mark.parametrize(("error", "ends"), [(CRASH, True), (FULL, True), (FAILED, False)])
def test_a_watched_worker_ends_for_its_gpu_alone(
    build: Build, parent: Channel[WorkerReport], signals: list[int], error: NightjarError, ends: bool
) -> None:
    """A model that no worker can open ends no worker of others."""
    runtime_settings = settings_of(build())
    failing(error)
    runtime = Runtime(runtime_settings)
    try:
        runtime.start()
        with pytest.raises(LeaseGoneError if ends else SynthesisError), runtime.pipelines.use("fake"):
            pass
        assert (signals, runtime.failure) == (([signal.SIGTERM], error) if ends else ([], None))
    finally:
        runtime.drain()
        runtime.stop()


def test_a_worker_of_another_revision_takes_no_more_shards_and_ends(build: Build, signals: list[int]) -> None:
    """The message goes back, for a worker of the new version; the shards in flight are not given up."""
    rig = build()
    runtime = Runtime(settings_of(rig))
    try:
        runtime.start()
        job = rig.submit(["text"])
        ticket = rig.take_ticket()
        execute(rig.ledger, "UPDATE alembic_version SET version_num = '9999'")
        assert [runtime.handle(ticket) for _ in range(2)] == ["refused"] * 2
        assert rig.status(job).shards == {ShardState.QUEUED: 1}
        assert (signals, runtime.draining) == ([signal.SIGTERM], False)
        assert runtime.failure is not None
        assert runtime.failure.code is ErrorCode.LEDGER_SCHEMA
        assert "9999" in runtime.failure.message
        # An old message asks for no work, whatever the tables are.
        assert runtime.ledger.claim(Ticket(job.id, 0, 7), "w", 60) is None
    finally:
        runtime.drain()
        runtime.stop()


@pytest.mark.parametrize(("error", "starts"), [(CRASH, False), (FULL, False), (FAILED, True)])
def test_a_worker_of_one_model_does_not_wait_for_its_gpu(
    build: Build, error: NightjarError, starts: bool
) -> None:
    failing(error)
    runtime = Runtime(settings_of(build()), "fake")
    try:
        if starts:
            runtime.start()
        else:
            with pytest.raises(type(error)) as caught:
                runtime.start()
            assert caught.value is error
    finally:
        runtime.drain()
        runtime.stop()


@pytest.mark.parametrize(
    ("error", "options", "told"),
    [
        (REFUSED, {"private": True}, True),
        (REFUSED, {"model": "fake"}, True),
        (REFUSED, {}, False),
        (AWAY, {"private": True}, False),
    ],
)
def test_a_worker_says_what_no_start_of_it_can_open(
    build: Build,
    parent: Channel[WorkerReport],
    signals: list[int],
    error: NightjarError,
    options: dict[str, Any],
    told: bool,
) -> None:
    """A worker of many jobs goes on: the model that it cannot open is one job's."""
    failing(error)
    runtime = Runtime(settings_of(build()), **options)
    try:
        with pytest.raises(NightjarError if "model" in options or not told else LeaseGoneError):
            runtime.start()
            with runtime.pipelines.use("fake"):
                pass
        report(WorkerReport(finished=True))
        heard = [parent.receive(60)]
        while not heard[-1].finished:
            heard.append(parent.receive(60))
        refusals = [one.refusal for one in heard if one.refusal is not None]
        assert [(one.code, one.message) for one in refusals] == [(error.code, error.message)] * told
    finally:
        runtime.drain()
        runtime.stop()


def test_a_worker_leaves_a_job_that_it_cannot_run_to_the_others_and_tries_again_later(
    build: Build,
) -> None:
    """While another one may run it. Alone, it says what is wrong in the items that it fails."""
    failing(REFUSED, REFUSED, REFUSED)
    rig, clock = build(), FakeClock()
    settings = settings_of(rig)
    job = rig.submit(["one"])
    runtime = Runtime(settings, clock=clock)
    other = replace(runtime.worker, id="other")
    rig.ledger.register_worker(other)

    def opens() -> int:
        """How many of the refusals were met."""
        return len(list(rig.ledger.attempts(job.id)))

    try:
        runtime.start()
        ticket = rig.take_ticket()
        assert (runtime.handle(ticket), opens()) == ("ran", 1)
        ticket = rig.take_ticket()
        assert [runtime.handle(ticket) for _ in range(3)] == ["refused"] * 3
        assert opens() == 1, "it opens the model no more"
        clock.advance(settings.times.quarantine_seconds)
        assert (runtime.handle(ticket), opens()) == ("ran", 2)
        assert [row.state for row in rig.items(job)] == [ItemState.PENDING]
        rig.ledger.retire_worker(other.id)
        assert (runtime.handle(rig.take_ticket()), opens()) == ("ran", 3)
        (item,) = rig.items(job)
        assert (item.state, item.error_code) == (ItemState.FAILED, ErrorCode.CONFIG_INVALID)
    finally:
        runtime.drain()
        runtime.stop()


@pytest.mark.parametrize(
    ("gpus", "tensor_parallel", "watched", "says"),
    [("0,1", 1, False, True), ("0", 1, False, False), ("0,1", 2, False, False), ("0,1", 1, True, False)],
)
def test_only_a_worker_that_leaves_gpus_idle_says_so(
    gpus: str,
    tensor_parallel: int,
    watched: bool,
    says: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("SPEECH_VLLM__TENSOR_PARALLEL", str(tensor_parallel))
    if watched:
        request.getfixturevalue("parent").send(True)
    monkeypatch.setattr("worker.celery_app.run_worker", lambda *_: 0)
    logged = CliRunner().invoke(commands.cli, ["run"]).stderr
    assert ("uses one GPU" in logged) == says
