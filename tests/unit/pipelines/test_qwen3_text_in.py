"""Text in pieces for Qwen3-TTS: token ids that no later text changes, and the speech of the whole text,
also from another process."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelines.engine_process.client import EngineProcess
from pipelines.errors import ErrorCode, InputError
from pipelines.qwen3_tts.pipeline import Qwen3TTSPipeline, open_pipeline
from pipelines.qwen3_tts.prompt import OpenTokens, TextTokenizer, open_frontend
from pipelines.request import (
    AudioChunk,
    Event,
    Failed,
    Generation,
    Handle,
    Message,
    Pipeline,
    SynthesisRequest,
    stream,
    submit,
)
from tests.support.qwen3_golden import GOLDEN
from tests.unit.pipelines.test_qwen3_pipeline import SECONDS, SIZES, reference

BASE = GOLDEN / "checkpoint-base"
TEXT = "Hi there, it's 3.1, 你好，ok?"
LETTERS = [
    *"ab Ze  \n\r\t.,!?'’-12３你好，。、 　\u0301\u0323\u0302é한가\u1161\u11a8ব\u09c7\u09be=\u0338<|>🙂\u200d\u00a0\u2028"
]
WORDS = ["it's", "'re", "<|im_end|>", "<|im_", " word", "don't", " 3.14", "\r\n", "你好，世界"]


def request(text: str, seed: int = 3, said: str | None = None, name: str = "r") -> SynthesisRequest:
    messages = (Message("user", "audio", reference()), Message("user", "text", text))
    return SynthesisRequest(name, messages, Generation(max_seconds=2.4, reference_text=said), seed)


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(1, len(text)), rng.randint(2, 12)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]


def heard_of(events: queue.SimpleQueue[Event]) -> np.ndarray:
    samples: list[np.ndarray] = []
    while isinstance(event := events.get(timeout=SECONDS), AudioChunk):
        samples.append(event.samples)
    if isinstance(event, Failed):
        raise event.error
    return np.concatenate(samples)


def at_once(pipeline: Pipeline, wanted: SynthesisRequest) -> np.ndarray:
    return np.concatenate([chunk.samples for chunk in stream(pipeline, wanted)])


def started(
    pipeline: Pipeline, wanted: SynthesisRequest, first: str
) -> tuple[Handle, queue.SimpleQueue[Event]]:
    """A stream of which so much of the text is there."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    opened = replace(wanted, messages=(*wanted.messages[:-1], Message("user", "text", first)), text_open=True)
    return pipeline.start(opened, events.put, stream=True), events


def in_pieces(pipeline: Pipeline, wanted: SynthesisRequest, rng: random.Random) -> np.ndarray:
    text = wanted.messages[-1].content
    assert isinstance(text, str)
    first, *rest = pieces(text, rng)
    handle, events = started(pipeline, wanted, first)
    for piece in rest:
        time.sleep(rng.choice((0, 0, 0.05)))
        handle.append(piece, False)
    handle.append("", True)
    return heard_of(events)


@pytest.fixture(scope="module")
def base() -> Iterator[Qwen3TTSPipeline]:
    pipeline = open_pipeline(BASE, keep_unfinished=True, threads=1, **SIZES)
    yield pipeline
    pipeline.close()


def test_ids_of_pieces_are_those_of_the_joined_text() -> None:
    tokenizer, rng = TextTokenizer.from_folder(BASE), random.Random(1)
    given = total = 0
    for _ in range(6000):
        text = "".join(rng.choice(LETTERS + WORDS) for _ in range(rng.randint(1, 14)))
        taken, ids = OpenTokens(tokenizer, 5000), list[int]()
        begin = 0
        while begin < len(text):
            size = rng.randint(1, 4)
            ids += taken.add(text[begin : begin + size])
            begin += size
        given += len(ids)
        ids += taken.add("", final=True)
        assert ids == tokenizer.target(text.strip())[1], repr(text)
        total += len(ids)
    assert given > total / 2, "hardly anything is known before the end"


def test_a_word_is_known_at_its_end() -> None:
    tokenizer = TextTokenizer.from_folder(BASE)
    taken = OpenTokens(tokenizer, 5000)
    assert taken.add("Hel") == []
    assert taken.add("lo ") == tokenizer.target("Hello")[1]
    assert taken.add("wor") == []
    assert taken.add("ld,") == tokenizer.target("Hello world")[1][len(tokenizer.target("Hello")[1]) :]
    with pytest.raises(InputError) as caught:
        taken.add("x" * 5000)
    assert caught.value.code is ErrorCode.INPUT_TOO_LONG


@pytest.mark.parametrize("said", [None, "It was."])
def test_text_in_pieces_gives_the_speech_of_the_whole_text(base: Any, said: str | None) -> None:
    wanted, rng = request(TEXT, said=said), random.Random(5)
    once = at_once(base, wanted)
    assert len(once)
    batch = [submit(base, request("Batch work beside it.", seed, name=f"b{seed}")) for seed in range(3)]
    for _ in range(3):
        np.testing.assert_allclose(in_pieces(base, wanted, rng), once, atol=1e-4)
    for one in batch:
        assert one.result(SECONDS).duration_ms


def test_a_stream_without_text_takes_no_slot_and_one_that_is_ended_gives_it_back(base: Any) -> None:
    handle, events = started(base, request(""), "Hel")
    assert base.stats().running == base.stats().waiting == 0
    handle.append("lo there, my friend, how", False)
    assert isinstance(events.get(timeout=SECONDS), AudioChunk)
    assert base.stats().running == 1
    handle.cancel()
    handle.append(" are you?", True)
    deadline = time.monotonic() + SECONDS
    while base.stats().running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(base.engine.core.scheduler.kv.free) == base.engine.core.scheduler.kv.pages


def test_the_whole_text_before_the_first_frame_cannot_come_in_pieces() -> None:
    pipeline: Any = open_pipeline(BASE, text_first=True, **SIZES)
    assert not pipeline.capabilities.text_in
    with pytest.raises(InputError) as caught:
        pipeline.start(replace(request("Hello"), text_open=True), print, stream=True)
    assert caught.value.code is ErrorCode.INPUT_UNSUPPORTED
    pipeline.close()


def test_text_reaches_an_engine_process_as_ids(base: Any) -> None:
    options = {"keep_unfinished": True, "threads": 1, **SIZES}
    process, rng = EngineProcess(str(BASE), options), random.Random(8)
    try:
        assert process.capabilities.text_in
        for said in (None, "It was."):
            wanted = request(TEXT, said=said)
            np.testing.assert_allclose(in_pieces(process, wanted, rng), at_once(base, wanted), atol=1e-4)
    finally:
        process.close()


def test_a_tokenizer_that_is_cut_otherwise_hands_on_at_the_end_only() -> None:
    tokenizer = open_frontend(BASE).tokenizer
    tokenizer._splits_at_words = False
    taken = OpenTokens(tokenizer, 5000)
    assert taken.add("Hello there, friend. ") == []
    assert taken.add("", final=True) == tokenizer.target("Hello there, friend.")[1]
