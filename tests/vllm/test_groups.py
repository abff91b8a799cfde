"""Our scheduler beside vLLM's own, both real and without a model: the same steps and blocks, and newcomers
in groups."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.support.vllm_kit import require_vllm, wide_checkpoint

require_vllm()

from pipelines.options import TokenModelOptions  # noqa: E402
from pipelines.spark_tts.config import SparkConfig  # noqa: E402
from pipelines.spark_tts.pipeline import model_spec  # noqa: E402
from pipelines.tokens import TokenPrompt, TokenRequest, TokenSampling  # noqa: E402
from pipelines.vllm_engine.library import AT_ONCE, ModelSpec  # noqa: E402
from tests.support.scheduler_rig import END, Run, hashed, newcomer, scheduler  # noqa: E402

from vllm.config import SchedulerConfig  # noqa: E402  # isort: skip
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402  # isort: skip
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402  # isort: skip
from vllm.v1.request import RequestStatus  # noqa: E402  # isort: skip

from pipelines.vllm_engine.host import engine_arguments, sampling_params  # noqa: E402
from pipelines.vllm_engine.scheduler import (  # noqa: E402
    GATHER_SECONDS,
    GROUP_SHARE,
    QUIET_SECONDS,
    AsyncGroupScheduler,
    GroupScheduler,
    quick_allocation,
)


@pytest.mark.parametrize(
    ("ours", "plain", "blocks", "caching"),
    [
        (AsyncGroupScheduler, AsyncScheduler, 400, False),
        (AsyncGroupScheduler, AsyncScheduler, 60, False),
        (AsyncGroupScheduler, AsyncScheduler, 30, True),
        (GroupScheduler, Scheduler, 60, False),
    ],
)
def test_steps_and_blocks_are_those_of_vllm(ours: Any, plain: Any, blocks: int, caching: bool) -> None:
    """Prompts in chunks that begin alike, ends, aborts, and with few blocks preemptions; nobody waits for
    company here."""
    runs = [
        Run(scheduler(kind, 24, blocks, 128, caching, gather_seconds=0.0), issubclass(kind, AsyncScheduler))
        for kind in (ours, plain)
    ]
    asked = [counted(run.scheduler.kv_cache_manager.coordinator) for run in runs]
    dice = random.Random(5)
    preempted = steps = 0
    for moment in range(400):
        if moment < 250 and dice.random() < 0.35:
            prompt = list(range(10, 10 + dice.randrange(1, 200)))
            make = partial(hashed, f"s{moment}", prompt, dice.randrange(1, 90), END)
            for run in runs:
                run.scheduler.add_request(make())
        if dice.random() < 0.05 and runs[1].scheduler.running:
            name = dice.choice(runs[1].scheduler.running).request_id
            for run in runs:
                run.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        ours_step, plain_step = (run.step() for run in runs)
        assert ours_step == plain_step, f"step {moment}"
        steps += bool(plain_step[0])
        preempted += sum(one.num_preemptions > 0 for one in runs[1].scheduler.running)
    assert steps > 250
    assert bool(preempted) == (blocks < 400)
    assert not runs[0].scheduler.running
    assert sum(asked[0]) < sum(asked[1]) / 4, "few sequences are asked for new blocks"
    assert runs[0].scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1


def counted(coordinator: Any) -> list[int]:
    """A one for each time that somebody is asked how many blocks it needs."""
    calls: list[int] = []
    plain = coordinator.get_num_blocks_to_allocate

    def get_num_blocks_to_allocate(*arguments: Any, **keys: Any) -> Any:
        calls.append(1)
        return plain(*arguments, **keys)

    coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate
    return calls


@pytest.mark.parametrize("other", [{"groups": 2}, {"window": 64}])
def test_where_vllm_does_more_than_blocks_it_is_asked(other: dict[str, Any]) -> None:
    assert quick_allocation(scheduler(Scheduler, 4, 64, 64).kv_cache_manager) is not None
    assert quick_allocation(scheduler(Scheduler, 4, 64, 64, **other).kv_cache_manager) is None


@pytest.mark.parametrize(
    ("cpu", "chosen", "kind"),
    [
        (True, {}, GroupScheduler),
        (False, {}, AsyncGroupScheduler),
        (False, {"async_scheduling": False}, GroupScheduler),
        (False, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, Scheduler),
    ],
)
def test_engines_run_on_it(
    cpu: bool, chosen: dict[str, Any], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.vllm_engine.host.on_cpu", lambda: cpu)
    spec = replace(model_spec(SparkConfig.from_folder(wide_checkpoint())), engine=chosen)
    arguments = engine_arguments(spec, TokenModelOptions())
    assert (
        SchedulerConfig.default_factory(scheduler_cls=arguments["scheduler_cls"]).get_scheduler_cls() is kind
    )
    assert arguments["async_scheduling"] is (not cpu and "async_scheduling" not in chosen)


def told(asked: TokenSampling, streamed: bool = False, **extra: Any) -> Any:
    return sampling_params(
        ModelSpec(wide_checkpoint()), TokenRequest("a", TokenPrompt([1]), asked, extra), streamed
    )


def test_settings_of_a_request_are_those_that_vllm_is_told() -> None:
    asked = told(
        TokenSampling(31, 0.7, 13, 0.85, repetition_penalty=1.2, seed=99, stop_ids=(5, 8), ignore_end=True)
    )
    assert (asked.max_tokens, asked.temperature, asked.top_k, asked.top_p) == (31, 0.7, 13, 0.85)
    assert (asked.repetition_penalty, asked.seed, asked.stop_token_ids, asked.ignore_eos) == (
        1.2,
        99,
        [5, 8],
        True,
    )


def test_streams_are_told_apart() -> None:
    assert told(TokenSampling(3)).extra_args is None
    assert told(TokenSampling(3), streamed=True).extra_args == {AT_ONCE: True}
    assert told(TokenSampling(3), streamed=True, key=5).extra_args == {"key": 5, AT_ONCE: True}


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def full(clock: Clock, slots: int, running: int) -> Run:
    """A run with so many endless sequences under way, the last of which entered now."""
    run = Run(scheduler(AsyncGroupScheduler, slots, 4000, 8192, monotonic=clock.monotonic), late=True)
    for number in range(running):
        run.scheduler.add_request(newcomer(f"a{number}", 3))
    clock.now += GATHER_SECONDS
    run.step()
    assert len(run.scheduler.running) == running
    return run


def entered(run: Run, *names: str) -> bool:
    run.step()
    running = {one.request_id for one in run.scheduler.running}
    found = {name in running for name in names}
    assert len(found) == 1
    return found.pop()


def test_few_sequences_never_wait(clock: Clock) -> None:
    run = full(clock, 2 * GROUP_SHARE, 1)
    for number in range(2 * GROUP_SHARE - 2):
        run.scheduler.add_request(newcomer(f"b{number}", 3))
        assert entered(run, f"b{number}")


def test_under_load_newcomers_wait_for_a_group(clock: Clock) -> None:
    run = full(clock, 8 * GROUP_SHARE, 4 * GROUP_SHARE)
    for number in range(3):
        run.scheduler.add_request(newcomer(f"b{number}", 3))
        assert not entered(run, "b0")
    run.scheduler.add_request(newcomer("b3", 3))
    assert entered(run, "b0", "b1", "b2", "b3")


def test_a_group_is_no_larger_than_the_slots_that_are_free(clock: Clock) -> None:
    run = full(clock, 4 * GROUP_SHARE, 4 * GROUP_SHARE)
    for number in range(9):
        run.scheduler.add_request(newcomer(f"b{number}", 3))
    run.scheduler.finish_requests(["a1", "a2"], RequestStatus.FINISHED_ABORTED)
    assert not entered(run, "b0")
    run.scheduler.finish_requests(["a5"], RequestStatus.FINISHED_ABORTED)
    assert entered(run, "b0", "b1", "b2"), "three are a sixteenth of those that are left"
    assert not entered(run, "b3")


def test_nobody_waits_for_company_that_does_not_come(clock: Clock) -> None:
    run = full(clock, 8 * GROUP_SHARE, 4 * GROUP_SHARE)
    for name in ("late", "later"):
        run.scheduler.add_request(newcomer(name, 3))
        assert not entered(run, name)
        clock.now += QUIET_SECONDS * 0.9
        assert not entered(run, name)
        clock.now += QUIET_SECONDS * 0.2
        assert entered(run, name)


def test_nobody_waits_for_long(clock: Clock) -> None:
    run = full(clock, 64 * GROUP_SHARE, 32 * GROUP_SHARE)
    names = [f"b{number}" for number in range(31)]
    waited = 0.0
    for name in names:
        run.scheduler.add_request(newcomer(name, 3))
        if entered(run, "b0"):
            break
        clock.now += QUIET_SECONDS / 2
        waited += QUIET_SECONDS / 2
    assert GATHER_SECONDS <= waited < GATHER_SECONDS + QUIET_SECONDS


def test_a_stream_enters_at_once_with_all_before_it(clock: Clock) -> None:
    run = full(clock, 8 * GROUP_SHARE, 4 * GROUP_SHARE)
    run.scheduler.add_request(newcomer("first", 3))
    assert not entered(run, "first")
    run.scheduler.add_request(newcomer("stream", 3, **{AT_ONCE: True}))
    assert entered(run, "first", "stream")
