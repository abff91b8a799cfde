"""SparkTTS end to end against a golden folder: its LM on vLLM, alone and in a running batch, and text to audio as a job asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipelines.request import Generation, Message, SynthesisRequest
from pipelines.spark_tts.pipeline import CREATION_EXTRAS, SparkPipeline, open_pipeline
from pipelines.vllm_engine.options import TokenRequest, Tokens, TokenSampling
from tests.golden_arrays import flat
from tests.vllm_kit import Waiter

if TYPE_CHECKING:
    from tests.conformance.spark import Case, Golden, Item

SECONDS = 300


class Opened:
    """The pipeline of a golden folder's checkpoint, opened at the first case."""

    def __init__(self, golden: Golden) -> None:
        self.golden = golden

    @cached_property
    def pipeline(self) -> SparkPipeline:
        options: dict[str, Any] = {"device": self.golden.device.type, "dtype": "float32", "codec_dtype": "float32"}
        return open_pipeline(self.golden.checkpoint, **options, keep_unfinished=True, max_context=2048)

    def close(self) -> None:
        if "pipeline" in self.__dict__:
            self.pipeline.close()


def cases(golden: Golden) -> Iterator[Case]:
    """Every greedy case alone on vLLM, all of them together, and from text and recording to audio, whole and streamed."""
    opened = Opened(golden)
    greedy = [case for case in golden.cases.values() if case["kind"].startswith("greedy")]
    try:
        for case in greedy:
            yield f"vllm alone {case['name']}", lambda case=case: _alone(opened, case)
        yield "vllm together", lambda: _together(opened, greedy)
        # A cloned voice is the recording's own only where the folder has the golden ECAPA.
        spoken = [case for case in greedy if golden.voices or "gender" in case]
        yield "speech together", lambda: _speech(opened, spoken)
        for case in spoken:
            yield f"stream {case['name']}", lambda case=case: _stream(opened, case)
    finally:
        opened.close()


def _sequence(opened: Opened, case: Item) -> Future[Tokens]:
    waiter = Waiter()
    prompt = opened.golden.arrays(case["file"])["input_ids"].tolist()
    sampling = TokenSampling(case["max_new_tokens"], temperature=0.0, stop_ids=(opened.golden.config.lm.eos,))
    opened.pipeline.host.submit(TokenRequest(case["name"], prompt, sampling), waiter)
    return waiter.future


def _check(opened: Opened, case: Item, tokens: Tokens) -> None:
    from tests.conformance.spark import same

    same(f"output ids of {case['name']}", tokens.ids, opened.golden.arrays(case["file"])["output_ids"])
    assert (tokens.finish == "stop") is case["ended_by_eos"], f"{case['name']} ended by {tokens.finish}"


def _alone(opened: Opened, case: Item) -> None:
    _check(opened, case, _sequence(opened, case).result(SECONDS))


def _together(opened: Opened, greedy: list[Item]) -> None:
    for case, future in [(case, _sequence(opened, case)) for case in greedy for _ in range(3)]:
        _check(opened, case, future.result(SECONDS))


def _speech(opened: Opened, greedy: list[Item]) -> None:
    futures = [(case, opened.pipeline.submit(_request(opened, case))) for case in greedy]
    for case, future in futures:
        speech = future.result(SECONDS)
        assert speech.sample_rate == opened.golden.config.sample_rate, f"{speech.sample_rate} Hz"
        opened.golden.near(case["name"], speech.samples, flat(opened.golden.arrays(case["file"])["wav"]), "wav")


def _stream(opened: Opened, case: Item) -> None:
    """A stream has the length of the whole; its samples are those of windows, so only their number is compared."""
    chunks = list(opened.pipeline.stream(_request(opened, case)))
    assert chunks[-1].final, "the last chunk is not final"
    samples, whole = sum(len(chunk.samples) for chunk in chunks), opened.golden.arrays(case["file"])["wav"].size
    assert samples == whole, f"{samples} samples, expected {whole}"


def _request(opened: Opened, case: Item) -> SynthesisRequest:
    """A case in the words of a dialogue."""
    config = opened.golden.config
    messages = [Message("user", "text", case["text"])]
    before = 1
    if "wav" in case:
        messages.insert(0, Message("user", "audio", opened.golden.wav(case["wav"])))
    else:
        before = config.bicodec.speaker.tokens + CREATION_EXTRAS
    generation = Generation(
        voice=f"{case['gender']}/{case['pitch']}/{case['speed']}" if "gender" in case else None,
        reference_text=case.get("ref_text"),
        temperature=0.0,
        max_seconds=(case["max_new_tokens"] - before - 1) / config.tokens_per_second,
    )
    return SynthesisRequest(case["name"], tuple(messages), generation)
