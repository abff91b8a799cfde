"""The host of vLLM on a real engine core: threads, streams, aborts, pairs, and what happens when the core
dies."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.vllm_kit import (
    PATIENCE_SECONDS,
    Waiter,
    kill_core,
    require_vllm,
    sequence,
    wide_checkpoint,
)

require_vllm()

from pipelines.errors import ConfigError, EngineCrashError, ErrorCode, SynthesisError  # noqa: E402
from pipelines.options import TokenModelOptions  # noqa: E402
from pipelines.spark_tts.config import SparkConfig  # noqa: E402
from pipelines.spark_tts.pipeline import model_spec  # noqa: E402
from pipelines.tokens import TokenPrompt, TokenRequest  # noqa: E402
from pipelines.vllm_engine.host import VllmHost  # noqa: E402
from pipelines.vllm_engine.library import (  # noqa: E402
    ModelSpec,
    load_vllm,
)

ROOM = 40
CODES = 3
#: Tokens of a sequence that is not over before a test ends it.
ENDLESS = 30_000


@pytest.fixture(scope="module")
def host() -> Iterator[VllmHost]:
    """One engine core for most of the module."""
    host = opened()
    yield host
    host.close()
    host.close()


def opened() -> VllmHost:
    """Hands on three codes a step: the sampled token and the two likeliest."""
    load_vllm()
    spec = model_spec(SparkConfig.from_folder(wide_checkpoint()))
    spec = ModelSpec(spec.folder, spec.config, codes_per_step=CODES)
    return VllmHost(spec, TokenModelOptions(max_context=32_768, slots=16, waiting_room=ROOM - 16))


def prompt(number: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(10, 390) for _ in range(dice.randrange(5, 120))]


def ask(host: VllmHost, request: TokenRequest, streamed: bool = False) -> Waiter:
    waiter = Waiter(streamed)
    host.submit(request, waiter)
    return waiter


def settled(host: VllmHost) -> bool:
    stats = host.stats()
    return (stats.running, stats.waiting) == (0, 0)


def test_it_says_how_it_was_opened(host: VllmHost) -> None:
    info = host.info
    assert (info.slots, info.waiting_room, info.max_context) == (16, ROOM - 16, 32_768)
    assert (info.device, info.dtype, info.executor, info.kernels) == ("cpu", "float32", "vllm eager", "")
    assert info.kv_pages * info.page_size >= info.max_context
    assert not info.reproducible


def test_alone_equals_any_mix(host: VllmHost) -> None:
    asked = [sequence(f"s{n}", prompt(n), 4 + 3 * (n % 6), seed=n if n % 4 else None) for n in range(24)]
    alone = [ask(host, one).future.result(PATIENCE_SECONDS).ids for one in asked]
    dice = random.Random(7)
    for _ in range(40):
        picked = dice.sample(range(len(asked)), dice.randrange(2, 9))
        mixed = [(n, ask(host, asked[n])) for n in picked]
        for n, waiter in mixed:
            assert waiter.future.result(PATIENCE_SECONDS).ids == alone[n], f"sequence {n} in {picked}"


def test_more_prompts_than_a_step_has_room_for(host: VllmHost) -> None:
    """Cutting a prompt that has a seed would end the CPU's engine core."""
    asked = [sequence(f"long{n}", prompt(n) * 500, 3, seed=n + 1) for n in range(16)]
    asked = [replace(one, prompt=TokenPrompt(one.prompt.ids[:2100])) for one in asked]
    assert sum(len(one.prompt) for one in asked) > host._arguments["max_num_batched_tokens"]
    together = [ask(host, one) for one in asked]
    ids = [waiter.future.result(PATIENCE_SECONDS).ids for waiter in together]
    assert ids[-1] == ask(host, asked[-1]).future.result(PATIENCE_SECONDS).ids


def test_codes_of_a_step_come_with_its_token(host: VllmHost) -> None:
    greedy = ask(host, sequence("codes", prompt(1), 12)).future.result(PATIENCE_SECONDS)
    assert greedy.codes is not None
    assert greedy.codes.shape == (12, CODES)
    assert greedy.codes[:, 0].tolist() == greedy.ids
    assert greedy.codes[:, 1].tolist() == greedy.ids


def test_equal_codes_survive_the_merging_of_outputs() -> None:
    """vLLM merges what a slow reader of a stream has not read yet, step by step as dictionaries by id."""
    from vllm.logprobs import FlatLogprobs

    from pipelines.vllm_engine.frames import FrameSampler
    from pipelines.vllm_engine.host import codes_of

    steps = torch.tensor([[150_000, 7, 7, 0], [5, 5, 5, 5]])
    state: Any = SimpleNamespace(
        model=SimpleNamespace(width=3, drawn_from=None),
        device=steps.device,
        step=lambda batch: SimpleNamespace(whole=torch.ones(2, dtype=torch.bool)),
        draw=lambda logits, hidden, step: (steps[:, 0], steps[:, 1:]),
        write=lambda step, codes: None,
    )
    drawn: Any = FrameSampler(None, state)(torch.zeros(2, 1), None)
    read, unread = FlatLogprobs(), FlatLogprobs()
    for one, ids in zip((read, unread), drawn.logprobs_tensors.logprob_token_ids.tolist()):
        one.append_fast(ids, [0.0] * 4, chain(range(4)), [None] * 4)
    read.extend(unread)
    merged = codes_of(read, 2, 4)
    assert merged is not None
    assert merged.tolist() == steps.tolist()


@pytest.mark.parametrize(
    ("cpu", "options"),
    [(True, TokenModelOptions(step_tokens=1000)), (False, TokenModelOptions(step_tokens=100))],
)
def test_a_step_that_is_too_small_is_refused(
    cpu: bool, options: TokenModelOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipelines.vllm_engine import host as engine

    monkeypatch.setattr(engine, "on_cpu", lambda: cpu)
    with pytest.raises(ConfigError) as caught:
        engine.engine_arguments(ModelSpec(wide_checkpoint()), options)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_a_stream_grows_and_equals_the_whole(host: VllmHost) -> None:
    # Without codes: here they are vLLM's likeliest tokens, two of which may be one, and parts that are merged
    # would lose it.
    request = replace(sequence("whole", prompt(2), 40, seed=3), codes=False)
    whole = ask(host, request).future.result(PATIENCE_SECONDS).ids
    deadline = time.monotonic() + PATIENCE_SECONDS
    parts = 0
    while parts <= 5:
        # Tokens that came while nobody could look are one part.
        assert time.monotonic() < deadline, parts
        streamed = ask(host, request, streamed=True)
        assert streamed.future.result(PATIENCE_SECONDS).ids == whole
        assert [token for part in streamed.parts for token in part] == whole
        parts = len(streamed.parts)


def test_thirty_two_clients_at_once(host: VllmHost) -> None:
    def client(number: int) -> None:
        for turn in range(4):
            request = sequence(f"c{number}-{turn}", prompt(100 + number), 6 + turn, seed=number)
            assert len(ask(host, request).future.result(PATIENCE_SECONDS).ids) == 6 + turn

    done = host.stats().requests_done
    with ThreadPoolExecutor(32) as clients:
        list(clients.map(client, range(32)))
    assert host.stats().requests_done == done + 128
    assert settled(host)


def test_submit_waits_while_the_room_is_full(host: VllmHost) -> None:
    endless = [sequence(f"long{n}", prompt(n), ENDLESS) for n in range(ROOM)]
    long = [ask(host, one) for one in endless]
    one_more = threading.Thread(target=lambda: long.append(ask(host, sequence("one more", prompt(0), 2))))
    one_more.start()
    one_more.join(0.5)
    assert one_more.is_alive(), "the waiting room took one more than it has"
    for one in endless:
        host.cancel(one)
    one_more.join(PATIENCE_SECONDS)
    assert len(long[-1].future.result(PATIENCE_SECONDS).ids) == 2


@pytest.mark.parametrize("delay", [0.0, 0.05])
def test_an_abort_frees_the_slot_and_spares_the_others(host: VllmHost, delay: float) -> None:
    other = ask(host, sequence("other", prompt(5), 60, seed=5))
    doomed = [sequence("victim", prompt(n), ENDLESS) for n in range(3)]
    victims = [ask(host, one) for one in doomed]
    time.sleep(delay)
    for one in (*doomed, sequence("nobody", [5], 1)):
        host.cancel(one)
    for victim in victims:
        with pytest.raises(SynthesisError) as caught:
            victim.future.result(PATIENCE_SECONDS)
        assert caught.value.code is ErrorCode.SYNTH_ABORTED
    assert len(other.future.result(PATIENCE_SECONDS).ids) == 60
    assert settled(host)


def test_one_of_two_with_the_same_id_can_be_cancelled(host: VllmHost) -> None:
    first, second = sequence("twin", prompt(8), ENDLESS), sequence("twin", prompt(8), 20)
    one, two = ask(host, first), ask(host, second)
    host.cancel(first)
    with pytest.raises(SynthesisError):
        one.future.result(PATIENCE_SECONDS)
    assert len(two.future.result(PATIENCE_SECONDS).ids) == 20


def test_a_shadow_ends_with_its_partner(host: VllmHost) -> None:
    plain = sequence("main", prompt(3), 10, seed=1)
    pair = TokenRequest("main", plain.prompt, plain.sampling, shadow=sequence("null", [11, 12], ENDLESS))
    assert (
        ask(host, pair).future.result(PATIENCE_SECONDS).ids
        == ask(host, plain).future.result(PATIENCE_SECONDS).ids
    )
    doomed = TokenRequest(
        "pair",
        TokenPrompt(prompt(4)),
        sequence("", [1], ENDLESS).sampling,
        shadow=sequence("null", [11], ENDLESS),
    )
    aborted = ask(host, doomed)
    time.sleep(0.05)
    host.cancel(doomed)
    with pytest.raises(SynthesisError):
        aborted.future.result(PATIENCE_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while host._llm.output_processor.get_num_unfinished_requests():
        assert time.monotonic() < deadline, "a shadow runs on without its partner"
        time.sleep(0.05)


def test_a_pair_whose_shadow_is_refused_fails(host: VllmHost) -> None:
    too_long = sequence("null", [11] * 32_800, 10)
    pair = ask(
        host,
        TokenRequest("pair", TokenPrompt(prompt(4)), sequence("", [1], ENDLESS).sampling, shadow=too_long),
    )
    with pytest.raises(SynthesisError) as caught:
        pair.future.result(PATIENCE_SECONDS)
    assert caught.value.code is ErrorCode.SYNTH_ENGINE
    assert settled(host)


def test_closing_ends_what_is_under_way(host: VllmHost) -> None:
    flying = [ask(host, sequence(f"last{n}", prompt(n), ENDLESS)) for n in range(4)]
    host.close()
    for waiter in flying:
        with pytest.raises(SynthesisError) as caught:
            waiter.future.result(PATIENCE_SECONDS)
        assert caught.value.code is ErrorCode.SYNTH_ABORTED
    with pytest.raises(SynthesisError):
        ask(host, sequence("late", [5], 1))
    host.cancel(sequence("late", [5], 1))


def test_a_dead_core_fails_all_sequences_and_the_host_is_broken() -> None:
    """Also one that vLLM holds for ever: it waits for an answer of the core, as it does between a core's
    start and its first words."""
    asked = threading.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    host = opened()
    try:
        flying = [ask(host, sequence(f"flying{n}", prompt(n), ENDLESS)) for n in range(12)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host._llm.engine_core, "add_request_async", never)
            flying.append(ask(host, sequence("waiting", prompt(5), 5)))
            assert asked.wait(PATIENCE_SECONDS)
            assert host.stats().state == "ready"
            kill_core(os.getpid())
            for waiter in flying:
                with pytest.raises(EngineCrashError) as caught:
                    waiter.future.result(PATIENCE_SECONDS)
                assert caught.value.code is ErrorCode.WORKER_CRASH
        assert settled(host)
        assert host.stats().state == "broken"
        with pytest.raises(EngineCrashError):
            ask(host, sequence("late", [5], 1))
    finally:
        host.close()
