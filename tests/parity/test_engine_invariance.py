"""Alone equals in any mix, bit for bit: modes, lengths, arrivals, aborts, waiting, making way."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from pipelines.engine.scheduler import GenerationRequest
from pipelines.errors import ErrorCode
from tests.support.qwen3_golden import KINDS, Recorder, golden_model, make_core, random_request, run_alone

POOL = 16
#: All codebooks mix in the conformance run; here a few make room for many mixes.
CODEBOOKS = 5
MIXES = {"base": 40, "custom": 20, "design": 40}


@cache
def pool(kind: str) -> list[tuple[GenerationRequest, np.ndarray, str]]:
    """Requests with what each gives alone."""
    rng = random.Random(f"pool {kind}")
    model = golden_model(kind, codebooks=CODEBOOKS)
    requests = [random_request(rng, model, f"{kind}-{index}") for index in range(POOL)]
    return [(request, *run_alone(model, request)) for request in requests]


@pytest.mark.parametrize(
    ("kind", "seed"), [(kind, seed) for kind in KINDS for seed in range(MIXES[kind] // 10)]
)
def test_ten_random_mixes(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    for _ in range(10):
        run_mix(rng, kind)


def run_mix(rng: random.Random, kind: str) -> None:
    heard = Recorder()
    core = make_core(
        golden_model(kind, codebooks=CODEBOOKS),
        heard,
        slots=rng.randint(1, 8),
        pages=rng.choice((16, 24, 64)),
        frames_per_turn=rng.choice((1, 1, 2, 5)),
    )
    core.executor.lag = rng.choice((0, 0, 1))
    members = rng.sample(pool(kind), rng.randint(2, 8))
    arrivals = {request: rng.randint(0, 12) for request, _, _ in members}
    aborts = {request: rng.randint(0, 20) for request, _, _ in members if rng.random() < 0.15}
    step = 0
    while core.busy or any(at >= step for at in arrivals.values()):
        for request, at in arrivals.items():
            if at == step:
                core.add(request)
        for request, at in aborts.items():
            if at == step:
                core.abort(request.request_id)
        core.step()
        step += 1
    for request, codes, finish in members:
        if request in heard.errors:
            assert request in aborts
            assert heard.errors[request].code is ErrorCode.SYNTH_ABORTED
            continue
        assert heard.finish[request] == finish
        np.testing.assert_array_equal(heard.codes[request], codes)
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages


def test_alone_equals_in_a_batch_of_more_rows_than_the_default_has() -> None:
    """More requests than slots, all of different lengths; a few of those in the first, the last and the
    later places are run alone."""
    slots = 1000
    rng = random.Random(slots)
    model = golden_model("custom", codebooks=2)
    members = [
        replace(random_request(rng, model, str(index)), max_tokens=rng.randint(2, 5))
        for index in range(slots + 40)
    ]
    heard = Recorder()
    core = make_core(model, heard, slots=slots, pages=16 * slots, prefill_tokens=8 * slots, frames_per_turn=2)
    core.executor.lag = 1
    for request in members:
        core.add(request)
    core.step()
    assert len(core.scheduler.running) == slots
    running = slots
    while core.busy:
        core.step()
        running = max(running, len(core.scheduler.running))
    assert running == slots
    assert not heard.errors
    assert len(heard.codes) == len(members)
    for request in [*members[:4], *members[510:516], *members[slots - 4 :: 5]]:
        codes, finish = run_alone(model, request)
        np.testing.assert_array_equal(heard.codes[request], codes)
        assert heard.finish[request] == finish
    assert len(core.scheduler.kv.free) == core.scheduler.kv.pages
    assert len(core.scheduler.free_slots) == slots
