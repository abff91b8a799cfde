"""Our scheduler beside vLLM's own, both real and without a model: the same steps and blocks, and newcomers in groups."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.vllm_kit import checkpoint, require_vllm

require_vllm()

from pipelines.spark_tts.config import SparkConfig  # noqa: E402
from pipelines.spark_tts.lm import model_spec  # noqa: E402
from pipelines.vllm_engine.library import load_vllm  # noqa: E402
from pipelines.vllm_engine.options import AT_ONCE, TokenRequest, TokenSampling, VllmOptions  # noqa: E402

load_vllm()

from vllm import SamplingParams  # noqa: E402
from vllm.config import SchedulerConfig  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from pipelines.vllm_engine import adapter, group_scheduler  # noqa: E402
from pipelines.vllm_engine.adapter import engine_arguments, sampling_params  # noqa: E402
from pipelines.vllm_engine.group_scheduler import (  # noqa: E402
    GATHER_SECONDS,
    GROUP_SHARE,
    QUIET_SECONDS,
    AsyncGroupScheduler,
    GroupScheduler,
    quick_allocation,
)

BLOCK = 16
#: A token that is drawn now and then, and one that never is.
END, NEVER = 7, 99


def scheduler(
    kind: type[Any], sequences: int, blocks: int, step_tokens: int, caching: bool = False, groups: int = 1, window: int | None = None
) -> Any:
    spec = model_spec(SparkConfig.from_folder(checkpoint()))
    arguments = {**engine_arguments(spec, VllmOptions(max_sequences=sequences, max_context=512)), "enable_prefix_caching": caching}
    chunked = {"max_num_batched_tokens": step_tokens, "enable_chunked_prefill": True}
    config = AsyncEngineArgs(**{**arguments, **chunked}).create_engine_config()
    config.scheduler_config.async_scheduling = issubclass(kind, AsyncScheduler)
    config.cache_config.num_gpu_blocks = blocks
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    attention = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
    kv_groups = [KVCacheGroupSpec([f"layer{group}"], attention) for group in range(groups)]
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=kv_groups)
    return kind(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def newcomer(name: str, prompt: int, most: int = 400, stop: int = NEVER, **extra: Any) -> Any:
    parameters = SamplingParams(temperature=0.8, seed=1, max_tokens=most, stop_token_ids=[stop], detokenize=False, extra_args=extra or None)
    return Request(request_id=name, prompt_token_ids=list(range(10, 10 + prompt)), sampling_params=parameters, pooling_params=None)


class Run:
    """A scheduler, and a model whose draws depend on the sequence and the position alone."""

    def __init__(self, scheduler: Any, late: bool) -> None:
        self.scheduler = scheduler
        self._late = late
        self._last: tuple[Any, Any] | None = None

    def step(self) -> tuple[Any, ...]:
        """One step; what was decided in it."""
        planned = self.scheduler.schedule()
        made = planned, self._model(planned)
        before, self._last = (self._last, made) if self._late else (made, None)
        if before is not None:
            self.scheduler.update_from_output(*before)
        cached = planned.scheduled_cached_reqs
        blocks = [(name, new) for name, new in zip(cached.req_ids, cached.new_block_ids)]
        new = [(one.req_id, one.block_ids) for one in planned.scheduled_new_reqs]
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return dict(planned.num_scheduled_tokens), blocks, new, sorted(planned.finished_req_ids), free

    def _model(self, planned: Any) -> Any:
        names = list(planned.num_scheduled_tokens)
        ids: list[list[int]] = []
        for name in names:
            request = self.scheduler.requests[name]
            # A chunk that is not a prompt's last draws nothing.
            whole = request.num_computed_tokens >= request.num_prompt_tokens
            ids.append([random.Random(f"{name} {request.num_computed_tokens}").randrange(60)] if whole else [])
        return ModelRunnerOutput(req_ids=names, req_id_to_index={name: n for n, name in enumerate(names)}, sampled_token_ids=ids)


@pytest.mark.parametrize(
    ("ours", "plain", "blocks"),
    [(AsyncGroupScheduler, AsyncScheduler, 400), (AsyncGroupScheduler, AsyncScheduler, 60), (GroupScheduler, Scheduler, 60)],
)
def test_steps_and_blocks_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch, ours: Any, plain: Any, blocks: int) -> None:
    """Prompts in chunks, ends, aborts, and with few blocks preemptions; nobody waits for company here."""
    monkeypatch.setattr(group_scheduler, "GATHER_SECONDS", 0.0)
    runs = [Run(scheduler(kind, 24, blocks, 128), issubclass(kind, AsyncScheduler)) for kind in (ours, plain)]
    asked = [counted(run.scheduler.kv_cache_manager.coordinator) for run in runs]
    dice = random.Random(5)
    preempted = steps = 0
    for moment in range(400):
        if moment < 250 and dice.random() < 0.35:
            make = partial(newcomer, f"s{moment}", dice.randrange(1, 200), dice.randrange(1, 90), END)
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
    assert bool(preempted) == (blocks == 60)
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


@pytest.mark.parametrize("other", [{"caching": True}, {"groups": 2}, {"window": 64}])
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
def test_engines_run_on_it(monkeypatch: pytest.MonkeyPatch, cpu: bool, chosen: dict[str, Any], kind: Any) -> None:
    monkeypatch.setattr(adapter, "on_cpu", lambda: cpu)
    spec = replace(model_spec(SparkConfig.from_folder(checkpoint())), engine=chosen)
    arguments = engine_arguments(spec, VllmOptions())
    assert SchedulerConfig.default_factory(scheduler_cls=arguments["scheduler_cls"]).get_scheduler_cls() is kind
    assert arguments["async_scheduling"] is (not cpu and "async_scheduling" not in chosen)


def test_streams_are_told_apart() -> None:
    plain = TokenRequest("a", [1], TokenSampling(3))
    assert sampling_params(plain, 1, streamed=False).extra_args is None
    assert sampling_params(plain, 1, streamed=True).extra_args == {AT_ONCE: True}
    assert sampling_params(replace(plain, extra={"key": 5}), 1, streamed=True).extra_args == {"key": 5, AT_ONCE: True}


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(group_scheduler, "time", clock)
    return clock


def full(clock: Clock, slots: int, running: int) -> Run:
    """A run with so many endless sequences under way, the last of which entered now."""
    run = Run(scheduler(AsyncGroupScheduler, slots, 4000, 8192), late=True)
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
