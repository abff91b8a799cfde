"""Two real engine cores behind one face: the same results, work for both, and what happens when one dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import REGISTRY

from tests.vllm_kit import PATIENCE_SECONDS, Waiter, checkpoint, core_pids, held_start, require_vllm, sequence

require_vllm()

from pipelines.errors import ErrorCode, SynthesisError  # noqa: E402
from pipelines.spark_tts import pipeline as spark  # noqa: E402
from pipelines.spark_tts.config import SparkConfig  # noqa: E402
from pipelines.spark_tts.lm import model_spec  # noqa: E402
from pipelines.spark_tts.pipeline import open_host  # noqa: E402
from pipelines.vllm_engine.cores import VllmCores  # noqa: E402
from pipelines.vllm_engine.library import load_vllm  # noqa: E402
from pipelines.vllm_engine.options import ModelSpec, TokenRequest, VllmOptions  # noqa: E402

#: Tokens of a sequence that is not over before a test ends it.
ENDLESS = 6_000
OPTIONS = VllmOptions(max_context=8192, max_sequences=16, waiting_room=8)


@pytest.fixture(scope="module")
def cores() -> Iterator[VllmCores]:
    load_vllm()
    before = core_pids(os.getpid())
    cores = open_host(model_spec(SparkConfig.from_folder(checkpoint())), OPTIONS, 2)
    assert isinstance(cores, VllmCores)
    assert len(core_pids(os.getpid())) == len(before) + 2
    yield cores
    cores.close()
    cores.close()
    assert core_pids(os.getpid()) == before


def ask(cores: VllmCores, request: TokenRequest) -> Waiter:
    waiter = Waiter()
    cores.submit(request, waiter)
    return waiter


def ids(waiter: Waiter) -> list[int]:
    return waiter.future.result(PATIENCE_SECONDS).ids


def one(number: int, tokens: int = 20) -> TokenRequest:
    return sequence(f"s{number}", [11 + number, 12, 13 + number % 7], tokens, seed=number + 1)


def generated() -> dict[str, float]:
    """Tokens by engine core, as vLLM counts them."""
    found = [sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name == "vllm:generation_tokens_total"]
    return {sample.labels["engine"]: sample.value for sample in found}


def test_sequences_spread_over_the_cores_and_are_the_same_on_each(cores: VllmCores) -> None:
    twice = [ask(cores, one(number)) for number in range(8) for _ in range(2)]
    made = [ids(waiter) for waiter in twice]
    assert made[::2] == made[1::2]
    assert len({tuple(row) for row in made}) == 8
    counted = generated()
    assert set(counted) == {"0", "1"}
    assert all(value >= 6 * 20 for value in counted.values()), "both work"
    stats = cores.stats()
    assert (stats.running, stats.waiting, stats.requests_done, stats.state) == (0, 0, 16, "ready")


def test_an_abort_finds_its_sequence_on_any_core(cores: VllmCores) -> None:
    flying = [ask(cores, one(number, ENDLESS)) for number in range(4)]
    cores.abort("s1")
    fourth = one(9, ENDLESS)
    last = ask(cores, fourth)
    cores.cancel(fourth)
    for waiter in (flying[1], last):
        with pytest.raises(SynthesisError) as caught:
            waiter.future.result(PATIENCE_SECONDS)
        assert caught.value.code is ErrorCode.SYNTH_ABORTED
    assert not any(flying[number].future.done() for number in (0, 2, 3))
    for number in (0, 2, 3):
        cores.abort(f"s{number}")
        with pytest.raises(SynthesisError):
            flying[number].future.result(PATIENCE_SECONDS)


def test_the_other_core_goes_on_when_one_dies(cores: VllmCores) -> None:
    before = ids(ask(cores, one(3)))
    flying = [ask(cores, one(number, ENDLESS)) for number in range(6)]
    with held_start():
        os.kill(core_pids(os.getpid())[0], signal.SIGKILL)
        until(lambda: sum(waiter.future.done() for waiter in flying) == 3)
        for waiter in flying:
            if waiter.future.done():
                error = waiter.future.exception()
                assert isinstance(error, SynthesisError)
                assert error.code is ErrorCode.SYNTH_ENGINE
        until(lambda: cores.stats().state == "starting")
        assert ids(ask(cores, one(3))) == before, "served by the core that lives"
        assert sum(waiter.future.done() for waiter in flying) == 3
    until(lambda: cores.stats().state == "ready")
    for number in range(6):
        cores.abort(f"s{number}")
    until(lambda: all(waiter.future.done() for waiter in flying))
    counted = generated()
    again = [ask(cores, one(3)) for _ in range(8)]
    assert [ids(waiter) for waiter in again] == [before] * 8
    assert all(generated()[core] > counted[core] for core in ("0", "1")), "the new core works and is counted"


@pytest.mark.parametrize(
    ("on_cpu", "slots", "asked", "cores"),
    [(True, 512, None, 1), (False, None, None, 2), (False, 512, None, 2), (False, 127, None, 1), (False, 512, 1, 1), (True, 8, 3, 3)],
)
def test_how_many_cores_there_are(monkeypatch: pytest.MonkeyPatch, on_cpu: bool, slots: int | None, asked: int | None, cores: int) -> None:
    opened: list[int] = []
    monkeypatch.setattr(spark, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(spark, "VllmHost", lambda spec, options: opened.append(1))
    monkeypatch.setattr(spark, "VllmCores", lambda spec, options, count: opened.append(count))
    open_host(ModelSpec(checkpoint()), VllmOptions(max_sequences=slots), asked)
    assert opened == [cores]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
