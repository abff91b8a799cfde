"""SparkTTS on our own engine as a pipeline: which engine is taken, what a stream's listener waits for, and
equal bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import Event, Generation, Message, SynthesisRequest, stream, submit
from pipelines.spark_tts.bicodec import RIGHT_TOKENS
from pipelines.spark_tts.pipeline import SparkPipeline, open_pipeline
from tests.support.vllm_kit import GOLDEN, checkpoint

SECONDS = 240
#: Samples of a token, and speech tokens of the first chunk of a stream that are heard.
TOKEN, FIRST = 320, 8


@pytest.fixture(scope="module")
def pipeline() -> Iterator[SparkPipeline]:
    pipeline = open_pipeline(checkpoint(), device="cpu", slots=3, max_context=1024)
    yield pipeline
    pipeline.close()


@pytest.fixture(scope="module")
def lenient() -> Iterator[SparkPipeline]:
    """Keeps speech without an end."""
    pipeline = open_pipeline(checkpoint(), device="cpu", slots=3, max_context=1024, keep_unfinished=True)
    yield pipeline
    pipeline.close()


def request(
    wav: str | None = None,
    text: str = "今天天气很好。Das ist schön – café.",
    seed: int = 1,
    **generation: object,
) -> SynthesisRequest:
    messages = [Message("user", "text", text)]
    if wav is not None:
        messages.insert(0, Message("user", "audio", (GOLDEN / "wavs" / wav).read_bytes()))
    return SynthesisRequest("one", tuple(messages), Generation(**generation), seed)  # pyright: ignore[reportArgumentType]


#: A created voice, a cloned one, and one that goes on after the recording's own tokens.
CREATED = request(voice="male/very_low/very_high", temperature=0.0)
CLONED = request("ref_quiet.wav", temperature=0.0)
CONTINUED = request(
    "ref_a.wav",
    "The rain falls on the quiet street, and nobody walks.",
    reference_text="The train to the city leaves at nine.",
)


def test_it_says_what_it_runs_on(pipeline: SparkPipeline) -> None:
    meta = submit(pipeline, CREATED).result(SECONDS).meta
    assert {key: meta[key] for key in ("engine", "executor", "dtype", "codec_dtype", "finish")} == {
        "engine": "native",
        "executor": "eager",
        "dtype": "float32",
        "codec_dtype": "float32",
        "finish": "stop",
    }
    assert (pipeline.info.engine, pipeline.info.slots, pipeline.info.reproducible) == ("native", 3, True)


@pytest.mark.parametrize(("asked", "before"), [(CREATED, 16 + 8), (CLONED, 1), (CONTINUED, 0)])
def test_a_listener_waits_for_what_stands_before_the_speech_and_behind_it(
    pipeline: SparkPipeline, asked: SynthesisRequest, before: int
) -> None:
    wanted, _ = pipeline._prepare(asked)
    assert wanted.inaudible == before + RIGHT_TOKENS


@pytest.mark.parametrize(("asked", "more"), [(CREATED, 1), (CLONED, 0)])
def test_a_stream_is_heard_once_its_first_chunk_is_there(
    pipeline: SparkPipeline, asked: SynthesisRequest, more: int
) -> None:
    """A created voice of this checkpoint writes one token less before its speech than the usual one."""
    chunks = [len(chunk.samples) for chunk in stream(pipeline, asked)]
    assert chunks[0] == (FIRST + more) * TOKEN
    assert sum(chunks) == len(submit(pipeline, asked).result(SECONDS).samples)


@pytest.mark.parametrize("asked", [CREATED, CLONED, CONTINUED])
def test_a_limit_of_seconds_is_that_of_the_speech_to_the_token(
    pipeline: SparkPipeline, lenient: SparkPipeline, asked: SynthesisRequest
) -> None:
    """Whatever stands before the speech, which is less than the room that is left for it."""

    def within(tokens: int | None) -> SynthesisRequest:
        seconds = None if tokens is None else tokens / 50
        return replace(
            asked, generation=structs.replace(asked.generation, max_seconds=seconds, temperature=0.0)
        )

    whole = submit(pipeline, within(None)).result(SECONDS).samples
    count = len(whole) // TOKEN
    assert np.array_equal(submit(pipeline, within(count)).result(SECONDS).samples, whole)
    fewer = count - 1
    with pytest.raises(SynthesisError, match=f"within {fewer} ") as caught:
        submit(pipeline, within(fewer)).result(SECONDS)
    assert caught.value.code is ErrorCode.SYNTH_NO_EOS
    speech = submit(lenient, within(fewer)).result(SECONDS)
    assert (len(speech.samples), speech.meta["finish"]) == (fewer * TOKEN, "length")
    assert sum(len(chunk.samples) for chunk in stream(lenient, within(fewer))) == fewer * TOKEN


def test_speech_is_the_same_alone_and_in_any_company(pipeline: SparkPipeline) -> None:
    asked = [CREATED, CLONED, request("ref_a.wav", seed=5), request(voice="female/high/low", seed=6)]

    def outcome(one: SynthesisRequest) -> np.ndarray | ErrorCode:
        try:
            return submit(pipeline, one).result(SECONDS).samples
        except SynthesisError as error:
            return error.code

    alone = [outcome(one) for one in asked]
    futures = [submit(pipeline, one) for one in asked[::-1] * 2]
    for future, before in zip(futures, alone[::-1] * 2):
        error = future.exception(SECONDS)
        if isinstance(before, np.ndarray):
            assert np.array_equal(future.result().samples, before)
        else:
            assert isinstance(error, SynthesisError)
            assert error.code is before
    assert sum(isinstance(one, np.ndarray) for one in alone) >= 2


def test_a_request_that_is_cancelled_frees_its_slot(pipeline: SparkPipeline) -> None:
    heard: list[Event] = []
    pipeline.start(CLONED, heard.append).cancel()
    assert submit(pipeline, CREATED).result(SECONDS).sample_rate == 16_000
    assert (pipeline.stats().running, pipeline.stats().waiting) == (0, 0)
    assert not heard
