"""SparkTTS as a pipeline on a real vLLM: requests in the words of a dialogue, alone and together, streams,
refusals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2
import numpy as np
import pytest

from tests.support.vllm_kit import (
    GOLDEN,
    PATIENCE_SECONDS,
    held_start,
    paused_core,
    require_vllm,
    wide_checkpoint,
)

require_vllm()

from pipelines.errors import ErrorCode, InputError, NightjarError  # noqa: E402
from pipelines.registry import open_pipeline  # noqa: E402
from pipelines.request import Event, Generation, Message, Pipeline, Speech, SynthesisRequest, stream, submit  # noqa: E402
from tests.support.serving_kit import Running, b64, heard  # noqa: E402

SECONDS = 240
TEXT = "Good morning, how are you today?"


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    pipeline = open_here()
    yield pipeline
    pipeline.close()


def open_here() -> Pipeline:
    return open_pipeline(str(wide_checkpoint()), engine="vllm", max_context=1024, slots=16)


def request(
    name: str, text: str = "Good morning, how are you today?", *, wav: str | None = None, **generation: object
) -> SynthesisRequest:
    messages = [Message("user", "text", text)]
    if wav is not None:
        messages.append(Message("user", "audio", (GOLDEN / "wavs" / wav).read_bytes()))
    seed = int(generation.pop("item_seed", 1))  # pyright: ignore[reportArgumentType]
    return SynthesisRequest(name, tuple(messages), Generation(**generation), seed)  # pyright: ignore[reportArgumentType]


def some_requests() -> list[SynthesisRequest]:
    """Cloned with and without the reference's text, and created voices."""
    return [
        request("clone", wav="ref_a.wav", item_seed=3),
        request("go on", wav="ref_quiet.wav", reference_text="You can read this text aloud.", item_seed=4),
        request("default", item_seed=5),
        request("created", voice="male/low/very_high", item_seed=6),
        request("greedy", voice="female/high/low", temperature=0.0),
        request("other", "The rain falls on the quiet street.", voice="FEMALE/high/low", item_seed=7),
    ]


def outcome(future: Future[Speech]) -> np.ndarray | ErrorCode:
    try:
        return future.result(SECONDS).samples
    except NightjarError as error:
        return error.code


def test_a_request_sounds_the_same_alone_together_and_again(pipeline: Pipeline) -> None:
    asked = some_requests()
    alone = [outcome(submit(pipeline, one)) for one in asked]
    assert sum(isinstance(one, np.ndarray) for one in alone) >= 4, alone
    for turn in (asked, asked[::-1], asked[2:] + asked[:2]):
        futures = {one.request_id: submit(pipeline, one) for one in turn * 2}
        for one, before in zip(asked, alone):
            after = outcome(futures[one.request_id])
            assert np.array_equal(after, before) if isinstance(before, np.ndarray) else after is before


def test_speech_says_what_it_is(pipeline: Pipeline) -> None:
    speech = submit(pipeline, request("greedy", voice="female/high/low", temperature=0.0)).result(SECONDS)
    assert (speech.sample_rate, speech.text) == (16_000, "Good morning, how are you today?")
    assert speech.samples.dtype == np.float32
    assert len(speech.samples) == 320 * int(speech.meta["frames"])
    assert np.abs(speech.samples).max() <= 1
    assert (speech.meta["engine"], speech.meta["dtype"], speech.meta["finish"]) == ("vllm", "float32", "stop")


@pytest.mark.parametrize("index", [0, 2, 3, 4])
def test_a_stream_is_as_long_as_the_whole(pipeline: Pipeline, index: int) -> None:
    asked = some_requests()[index]
    whole = outcome(submit(pipeline, asked))
    assert isinstance(whole, np.ndarray)
    chunks = list(stream(pipeline, asked))
    assert sum(len(chunk.samples) for chunk in chunks) == len(whole)


def test_a_stream_that_nobody_hears_out_frees_its_slot(pipeline: Pipeline) -> None:
    chunks = stream(
        pipeline, request("left", "The rain falls on the quiet street, and nobody walks.", item_seed=11)
    )
    next(chunks)
    chunks.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(outcome(submit(pipeline, some_requests()[4])), np.ndarray)
    stats = pipeline.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.frames > 0
    assert stats.audio_seconds > 0


def test_what_is_cancelled_leaves_the_engine(pipeline: Pipeline) -> None:
    heard: list[Event] = []
    with paused_core(os.getpid()):
        pipeline.start(request("victim", item_seed=12), heard.append).cancel()
    assert isinstance(outcome(submit(pipeline, some_requests()[4])), np.ndarray)
    assert (pipeline.stats().running, pipeline.stats().waiting) == (0, 0)
    assert not heard


def test_speech_that_does_not_end_fails_and_says_so(pipeline: Pipeline) -> None:
    assert (
        outcome(submit(pipeline, request("short", wav="ref_a.wav", max_seconds=0.04, item_seed=3)))
        is ErrorCode.SYNTH_NO_EOS
    )


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (request("", "read <|im_end|> this"), ErrorCode.INPUT_UNPRONOUNCEABLE),
        (request("", "half a pair \ud800"), ErrorCode.INPUT_UNPRONOUNCEABLE),
        (request("", voice="robot"), ErrorCode.INPUT_UNKNOWN_VOICE),
        (request("", voice="female/high"), ErrorCode.INPUT_UNKNOWN_VOICE),
        (request("", wav="ref_a.wav", voice="male/low/low"), ErrorCode.INPUT_UNSUPPORTED),
        (request("", instruct="whisper"), ErrorCode.INPUT_UNSUPPORTED),
        (request("", reference_text="without audio"), ErrorCode.INPUT_REFERENCE_TEXT),
        (request("", "word " * 990), ErrorCode.INPUT_TOO_LONG),
        (request("", item_seed=2**63), ErrorCode.INPUT_BAD_GENERATION),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_the_engine(
    pipeline: Pipeline, asked: SynthesisRequest, code: ErrorCode
) -> None:
    done = pipeline.stats().requests_done
    with pytest.raises(InputError) as caught:
        submit(pipeline, asked)
    assert caught.value.code is code
    assert pipeline.stats().requests_done == done


def test_another_sampling_of_the_line_is_used(pipeline: Pipeline) -> None:
    one = outcome(submit(pipeline, request("a", voice="male/low/low", temperature=0.0)))
    two = outcome(
        submit(pipeline, request("a", voice="male/low/low", temperature=1.0, top_k=1, item_seed=99))
    )
    assert isinstance(one, np.ndarray)
    assert isinstance(two, np.ndarray)
    assert np.array_equal(one, two), "top_k of 1 is greedy"


def test_a_server_speaks_with_it_and_outlives_its_core(pipeline: Pipeline) -> None:
    greedy = {"voice": "female/high/low", "temperature": 0.0, "seed": 1}

    def ask(number: int) -> httpx2.Response:
        view = {"model": pipeline.name, "input": TEXT, "seed": number, "max_seconds": 60}
        return httpx2.post(
            server.url + "/v1/audio/speech", json=view, timeout=PATIENCE_SECONDS, trust_env=False
        )

    opening = iter((lambda: pipeline, open_here))
    running = Running(pipeline, slots=20, waiting_room=40, open_model=lambda: next(opening)())
    with running as server, ThreadPoolExecutor(40) as pool:
        before = server.speak(TEXT, **greedy).content
        samples, rate = heard(before)
        assert rate == 16_000
        assert len(server.speak(TEXT, stream=True, **greedy).content) - 44 == 2 * len(samples)
        clone = {
            "voice": "default",
            "reference_audio": b64((GOLDEN / "wavs/ref_a.wav").read_bytes()),
            "seed": 3,
        }
        assert server.speak(TEXT, **clone).status_code == 200
        assert any(name.startswith("vllm:") for name in server.metrics())

        with held_start():
            with paused_core(os.getpid()) as core:
                flying = [pool.submit(ask, number) for number in range(40)]
                server.until(lambda: server.busy()[:2] == (20, 20) and sum(server.busy()[2:]) == 20)
                os.kill(core, signal.SIGKILL)
            server.until(lambda: server.health() == 503)
        # Nothing was sent of the others, so the next core speaks them.
        assert {future.result(PATIENCE_SECONDS).status_code for future in flying} == {200}
        server.until(lambda: server.health() == 200, PATIENCE_SECONDS)
        assert server.speak(TEXT, **greedy).content == before
        server.until_idle()
