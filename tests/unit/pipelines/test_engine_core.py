"""The frame loop: waiting, making way, aborts, limits, NaN, and running out of memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.reference import FrameOutput
from pipelines.engine.executor import FrameSettings, PrefillRun
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import PagedKV, SamplingParams, SlotState
from pipelines.errors import ErrorCode, SynthesisError
from tests.support.listened import ListenedCore
from tests.support.qwen3_golden import Recorder, golden_model, make_core, random_request, run_alone
from tests.support.rounds import turn_until

GREEDY = SamplingParams(temperature=0.0, residual_temperature=0.0)


@cache
def requests(count: int, seed: int = 0, **changes: Any) -> Sequence[GenerationRequest]:
    rng = random.Random(seed)
    return [
        replace(random_request(rng, golden_model("base"), f"r{index}"), **changes) for index in range(count)
    ]


@cache
def alone(request: GenerationRequest) -> np.ndarray:
    return run_alone(golden_model("base"), request)[0]


@cache
def crowded_pair() -> Sequence[GenerationRequest]:
    """Two requests that need more pages together than one has."""
    sampling = replace(GREEDY, min_new_tokens=40)
    return [replace(request, max_tokens=40, sampling=sampling) for request in requests(2, seed=3)]


def run(core: ListenedCore, limit: int = 2000) -> None:
    turn_until(lambda: not core.busy, core.step, limit)


def test_what_can_never_fit_is_refused_and_the_rest_runs() -> None:
    heard = Recorder()
    core = make_core(golden_model("base"), heard, pages=8)
    small, large = requests(2)
    large = replace(large, max_tokens=64)
    core.add(replace(small, max_tokens=2) if len(small.prompt) > 50 else small)
    with pytest.raises(SynthesisError) as caught:
        core.add(large)
    assert caught.value.code is ErrorCode.SYNTH_OOM
    run(core)
    assert len(heard.codes) == 1


def test_a_context_beyond_the_limit_is_refused() -> None:
    core = make_core(golden_model("base"), Recorder(), pages=512)
    with pytest.raises(SynthesisError, match="positions"):
        core.add(replace(requests(1)[0], max_tokens=4000))


def test_what_does_not_fit_now_waits_and_comes_out_the_same() -> None:
    heard = Recorder()
    many = requests(12, max_tokens=20)
    core = make_core(golden_model("base"), heard, slots=3, pages=24)
    for request in many:
        core.add(request)
    running: list[int] = []
    turn_until(lambda: not core.busy, lambda: (core.step(), running.append(len(core.scheduler.running))))
    assert 1 < max(running) <= 3
    assert set(heard.codes) == set(many)


def test_out_of_pages_makes_the_youngest_start_again() -> None:
    heard = Recorder()
    pair = crowded_pair()
    needed = max(-(-(len(request.prompt) + request.max_tokens - 1) // 8) for request in pair)
    core = make_core(golden_model("base"), heard, pages=needed + 1, reserve_frames=0)
    for request in pair:
        core.add(request)
    utterances = list(core.scheduler.waiting)
    run(core)
    runs = [utterance.run for utterance in utterances]
    assert runs[0] == 1
    assert runs[1] > 1, "nobody had to make way: the test has too many pages"
    for request in pair:
        np.testing.assert_array_equal(heard.codes[request], alone(request))
    assert not heard.chunks, "whole utterances are handed on at their end"
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages


@pytest.mark.parametrize("step", [0, 1, 3, 6])
def test_abort_ends_one_and_frees_its_place(step: int) -> None:
    heard = Recorder()
    doomed, other = requests(2, seed=1, max_tokens=20)
    core = make_core(golden_model("base"), heard, slots=1 if step == 0 else 2)
    core.add(other)
    core.add(doomed)
    for _ in range(step):
        core.step()
    core.abort(doomed.request_id)
    core.abort("unknown")
    run(core)
    assert heard.errors[doomed].code is ErrorCode.SYNTH_ABORTED
    np.testing.assert_array_equal(heard.codes[other], alone(other))
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages


def test_the_limit_is_reported() -> None:
    heard = Recorder()
    core = make_core(golden_model("base"), heard)
    request = replace(requests(1)[0], max_tokens=2, sampling=GREEDY)
    core.add(request)
    run(core)
    assert heard.finish[request] == "length"
    assert heard.codes[request].shape == (1, 16)


def test_one_token_may_be_all_there_is() -> None:
    heard = Recorder()
    core = make_core(golden_model("base"), heard)
    request = replace(requests(1)[0], max_tokens=1)
    core.add(request)
    run(core)
    assert len(heard.codes[request]) == 0


class Wrapped:
    """A golden model with a fault in it."""

    def __init__(self) -> None:
        self._model = golden_model("base")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class PoisonedPrompt(Wrapped):
    """Turns the prompts of one length into NaN."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def embed(self, prompt: Any) -> Tensor:
        embeddings = self._model.embed(prompt)
        return embeddings * float("nan") if len(prompt) == self.length else embeddings


def test_nan_fails_its_own_request_only() -> None:
    heard = Recorder()
    many = requests(6, seed=5, max_tokens=12)
    bad = many[2]
    assert sum(len(request.prompt) == len(bad.prompt) for request in many) == 1
    core = make_core(PoisonedPrompt(len(bad.prompt)), heard, slots=4)
    for request in many:
        core.add(request)
    run(core)
    assert list(heard.errors) == [bad]
    assert heard.errors[bad].code is ErrorCode.SYNTH_NAN
    for request in set(many) - {bad}:
        np.testing.assert_array_equal(heard.codes[request], alone(request))
    assert torch.isfinite(core.executor.kv.k[:, 1:]).all(), "NaN was left in free pages"


class Unembeddable(PoisonedPrompt):
    """Cannot embed the prompts of one length."""

    def embed(self, prompt: Any) -> Tensor:
        if len(prompt) == self.length:
            raise IndexError("no such row")
        return self._model.embed(prompt)


def test_a_prompt_that_cannot_be_embedded_fails_alone() -> None:
    heard = Recorder()
    many = requests(6, seed=5, max_tokens=6)
    core = make_core(Unembeddable(len(many[2].prompt)), heard, slots=4)
    for request in many:
        core.add(request)
    run(core)
    assert list(heard.errors) == [many[2]]
    assert heard.errors[many[2]].code is ErrorCode.SYNTH_ENGINE
    assert len(heard.codes) == 5
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages


class Tight(Wrapped):
    """Runs out of device memory when more than `room` prompts are prefilled or framed at once."""

    def __init__(self, room: int, error: RuntimeError) -> None:
        super().__init__()
        self.room, self.error = room, error

    def prefill(self, runs: Sequence[PrefillRun], state: SlotState, kv: PagedKV) -> None:
        self._model.prefill(runs, state, kv)

    def frame(self, rows: Tensor, settings: FrameSettings, state: SlotState, kv: PagedKV) -> FrameOutput:
        if int((rows != state.dead).sum()) > self.room:
            raise type(self.error)(*self.error.args)
        return self._model.frame(rows, settings, state, kv)


#: As PyTorch's allocator says it, and as a driver does.
NO_ROOM = [torch.OutOfMemoryError("no room"), torch.AcceleratorError("CUDA error: out of memory")]


@pytest.mark.parametrize("error", NO_ROOM, ids=["allocator", "driver"])
def test_out_of_device_memory_shrinks_the_batch(error: RuntimeError) -> None:
    heard = Recorder()
    many = requests(7, seed=2, max_tokens=8)
    core = make_core(Tight(2, error), heard)
    for request in many:
        core.add(request)
    run(core)
    assert not heard.errors
    for request in many:
        np.testing.assert_array_equal(heard.codes[request], alone(request))


@pytest.mark.parametrize("error", NO_ROOM, ids=["allocator", "driver"])
def test_out_of_device_memory_alone_fails_the_request(error: RuntimeError) -> None:
    heard = Recorder()
    core = make_core(Tight(0, error), heard)
    for request in requests(2):
        core.add(request)
    run(core)
    assert [error.code for error in heard.errors.values()] == [ErrorCode.SYNTH_OOM] * 2
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


def test_same_seed_same_codes_other_seed_other_codes(one_thread: None) -> None:
    request = replace(requests(1, seed=8)[0], max_tokens=10, sampling=SamplingParams())
    model = golden_model("base")
    first, again = run_alone(model, request)[0], run_alone(model, request)[0]
    other = run_alone(model, replace(request, seed=request.seed ^ 1))[0]
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or (first != other).any()


def test_a_request_that_starts_again_takes_no_place_in_the_waiting_room() -> None:
    pair = crowded_pair()
    needed = max(-(-(len(request.prompt) + request.max_tokens - 1) // 8) for request in pair)
    core = make_core(golden_model("base"), heard := Recorder(), pages=needed + 1, reserve_frames=0)
    for request in pair:
        core.add(request)
    turn_until(lambda: core.scheduler.preempted or not core.busy, core.step)
    assert core.busy, "nobody had to make way: the test has too many pages"
    assert (core.scheduler.preempted, len(core.scheduler.waiting)) == (1, 1)
    core.abort(core.scheduler.waiting[0].request.request_id)
    assert (core.scheduler.preempted, len(core.scheduler.waiting)) == (0, 0)
    core.add(pair[1])
    run(core)
    assert core.scheduler.preempted == 0
    assert len(heard.codes) == 2
