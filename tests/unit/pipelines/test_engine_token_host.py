"""Sequences of tokens on our own engine: ids, ends and limits as on vLLM, streams, aborts, and receivers
that ask for more."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine, NativeHost
from pipelines.engine.executor import EagerExecutor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.spark_tts.config import LLM, SparkConfig
from pipelines.spark_tts.language_model import Drawable, SparkModel, load_weights
from pipelines.spark_tts.prompt import Vocabulary
from pipelines.tokens import TokenPrompt, TokenRequest, Tokens, TokenSampling
from tests.support.qwen3_golden import MAX_CONTEXT, golden_model, random_request
from tests.support.vllm_kit import GOLDEN, Waiter, checkpoint

SECONDS = 240
#: Greedy golden sequences and how many tokens they have before their end.
ENDS_AFTER = 15
OPTIONS = EngineOptions(
    slots=4, pages=64, page_size=16, max_context=512, chunk_frames=(3, 6), first_frames=(3,)
)


@cache
def loaded() -> tuple[SparkModel, Drawable, Vocabulary]:
    torch.set_num_threads(1)
    config = SparkConfig.from_folder(checkpoint())
    vocabulary = Vocabulary.from_folder(
        checkpoint() / LLM, config.bicodec.codebook_size, config.bicodec.global_codes
    )
    drawable = Drawable.of(vocabulary, config.lm)
    weights = load_weights(config, drawable, torch.float32, torch.device("cpu"))
    return SparkModel(config.lm, weights, drawable, OPTIONS.max_context), drawable, vocabulary


def open_host(options: EngineOptions = OPTIONS, waiting_room: int = 8) -> NativeHost:
    model, drawable, _ = loaded()
    executor = EagerExecutor(model, options)
    engine = Engine(executor, options, waiting_room)
    return NativeHost(engine, drawable.ids)


@pytest.fixture(scope="module")
def host() -> Iterator[NativeHost]:
    host = open_host()
    yield host
    host.close()


def arrays(name: str = "clone_no_text") -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "arrays" / f"{name}.npz") as data:
        return dict(data)


def ends() -> tuple[int, ...]:
    _, drawable, _ = loaded()
    return tuple(drawable.ids[list(drawable.ends)].tolist())


def request(most: int, name: str = "one", **changes: Any) -> TokenRequest:
    sampling = TokenSampling(most, temperature=0.0, **({"stop_ids": ends()} | changes))
    return TokenRequest(name, TokenPrompt(arrays()["input_ids"].tolist()), sampling, inaudible=5)


def made(host: NativeHost, asked: TokenRequest, streamed: bool = False) -> tuple[Tokens, list[list[int]]]:
    waiter = Waiter(streamed)
    host.submit(asked, waiter)
    return waiter.future.result(SECONDS), waiter.parts


@pytest.mark.parametrize(
    ("most", "count", "finish"),
    [
        (5, 5, "length"),
        (ENDS_AFTER, ENDS_AFTER, "length"),
        (ENDS_AFTER + 1, ENDS_AFTER, "stop"),
        (100, ENDS_AFTER, "stop"),
    ],
)
def test_a_sequence_has_its_ids_before_the_end_and_says_how_it_ended(
    host: NativeHost, most: int, count: int, finish: str
) -> None:
    tokens, parts = made(host, request(most))
    assert tokens.ids == arrays()["output_ids"][:count].tolist()
    assert (tokens.finish, tokens.codes, parts) == (finish, None, [])


def test_a_sequence_may_end_at_once(host: NativeHost) -> None:
    golden = arrays()
    prompt = [*golden["input_ids"].tolist(), *golden["output_ids"][:ENDS_AFTER].tolist()]
    tokens, _ = made(host, TokenRequest("one", TokenPrompt(prompt), TokenSampling(9, 0.0, stop_ids=ends())))
    assert (tokens.ids, tokens.finish) == ([], "stop")


def test_a_stream_hears_chunks_and_at_the_end_what_was_left(host: NativeHost) -> None:
    tokens, parts = made(host, request(100), streamed=True)
    assert tokens.ids == arrays()["output_ids"][:ENDS_AFTER].tolist()
    assert [one for part in parts for one in part] == tokens.ids
    assert len(parts[0]) == 5 + 3, "the first chunk has what nobody hears too"


def test_a_sequence_that_ignores_its_end_goes_on_to_its_limit(host: NativeHost) -> None:
    tokens, _ = made(host, request(ENDS_AFTER + 9, ignore_end=True, stop_ids=()))
    assert (len(tokens.ids), tokens.finish) == (ENDS_AFTER + 9, "length")
    assert not set(ends()) & set(tokens.ids)


def test_ids_of_the_prompt_count_as_drawn(host: NativeHost) -> None:
    golden = arrays("clone_with_text_stereo")
    # The next likeliest id behind this prompt is one of the recording's.
    prompt, repeated = (
        [*golden["input_ids"].tolist(), *golden["output_ids"][:63].tolist()],
        int(golden["output_ids"][63]),
    )
    assert repeated in golden["input_ids"]
    drawn = [
        TokenRequest(
            "one", TokenPrompt(prompt), TokenSampling(1, 0.0, repetition_penalty=penalty, stop_ids=ends())
        )
        for penalty in (1.0, 1000.0)
    ]
    plain, penalized = (made(host, one)[0].ids[0] for one in drawn)
    assert plain == repeated
    assert penalized not in prompt


def test_a_cancel_ends_one_of_a_name(host: NativeHost) -> None:
    endless = [request(400, name, ignore_end=True, stop_ids=()) for name in ("a", "a", "b")]
    waiters = [Waiter() for _ in endless]
    for one, waiter in zip(endless, waiters):
        host.submit(one, waiter)
    host.cancel(endless[2])
    host.cancel(endless[0])
    host.cancel(request(3))
    for waiter in (waiters[0], waiters[2]):
        with pytest.raises(SynthesisError) as caught:
            waiter.future.result(SECONDS)
        assert caught.value.code is ErrorCode.SYNTH_ABORTED
    assert len(waiters[1].future.result(SECONDS).ids) == 400
    host.cancel(endless[1])


def test_a_receiver_may_ask_for_more_although_the_room_is_full() -> None:
    host, full, last = (
        open_host(EngineOptions(slots=1, pages=64, page_size=16, max_context=512), waiting_room=1),
        threading.Event(),
        Waiter(),
    )

    class Asking(Waiter):
        def finished(self, tokens: Tokens) -> None:
            assert full.wait(SECONDS)
            host.submit(request(3, "last"), last)
            super().finished(tokens)

    first, second = Asking(), Waiter()
    host.submit(request(2, "first"), first)
    host.submit(request(2, "second"), second)
    full.set()
    assert [len(one.future.result(SECONDS).ids) for one in (first, second, last)] == [2, 2, 3]
    host.close()
    with pytest.raises(SynthesisError) as caught:
        host.submit(request(3), Waiter())
    assert caught.value.code is ErrorCode.SYNTH_ABORTED


def test_a_host_says_what_it_is(host: NativeHost) -> None:
    assert (host.info.max_context, host.info.dtype) == (OPTIONS.max_context, "float32")
    assert (host.info.engine, host.info.executor, host.info.slots) == ("native", "eager", 4)
    small = open_host(EngineOptions(slots=1, pages=4, page_size=16, max_context=512))
    assert small.info.max_context == 64, "its pages hold no more"
    small.close()


def frames_host() -> tuple[NativeHost, GenerationRequest, Qwen3TTSModel]:
    """A host whose steps have several codes, and a request of its model."""
    model = golden_model("base")
    wanted = random_request(random.Random(3), model, "frames")
    options = EngineOptions(slots=2, pages=64, page_size=8, max_context=MAX_CONTEXT, prefill_chunk=16)
    executor = EagerExecutor(model, options)
    ids = np.arange(model.config.talker.vocab) + 1000
    host = NativeHost(Engine(executor, options), ids, lambda _: (), model.codebooks)
    return host, wanted, model


def test_all_codebooks_have_the_settings_of_a_request() -> None:
    host, wanted, _ = frames_host()
    greedy, narrow = (
        TokenSampling(12, temperature, 0, top_p, ignore_end=True)
        for temperature, top_p in ((0.0, 1.0), (1.5, 1e-9))
    )
    found = [
        made(host, TokenRequest("frames", wanted.prompt, sampling))[0].codes for sampling in (greedy, narrow)
    ]
    host.close()
    assert found[0] is not None
    assert np.array_equal(found[0], found[1]), (
        "what is left of the nucleus is the likeliest code of each codebook"
    )


def test_codes_of_a_step_are_its_id_and_those_of_all_codebooks() -> None:
    host, wanted, model = frames_host()
    drawn = TokenSampling(wanted.max_tokens - 1, 0.9, 50, 0.9, seed=wanted.seed, ignore_end=True)
    tokens, parts = made(host, TokenRequest("frames", wanted.prompt, drawn), streamed=True)
    host.close()
    assert tokens.codes is not None
    assert tokens.codes.shape == (wanted.max_tokens - 1, 1 + model.codebooks)
    assert tokens.codes[:, 0].tolist() == tokens.ids == (tokens.codes[:, 1] + 1000).tolist()
    assert [one for part in parts for one in part] == tokens.ids
    assert tokens.codes.max() < 1000 + model.config.talker.vocab
    _, none = host.tokens_of(np.zeros((0, 0), np.int64))
    assert none is not None
    assert none.shape == (0, 1 + model.codebooks), "a sequence without a frame has codes of none"


def test_a_sequence_is_what_the_engine_makes_alone(host: NativeHost) -> None:
    drawn = TokenSampling(40, 0.8, 50, 0.95, seed=7, stop_ids=ends())
    asked = [
        TokenRequest(str(index), TokenPrompt(arrays()["input_ids"].tolist()), drawn) for index in range(6)
    ]
    alone = made(host, asked[0])[0].ids
    waiters = [Waiter(index % 2 == 0) for index in range(6)]
    for one, waiter in zip(asked, waiters):
        host.submit(one, waiter)
    assert [waiter.future.result(SECONDS).ids for waiter in waiters] == [alone] * 6
