"""SparkTTS end to end against a golden folder: its LM on vLLM, alone, in a running batch and drawn, and text to audio as a job asks."""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from pipelines.request import Generation, Message, SynthesisRequest
from pipelines.spark_tts.pipeline import CREATION_EXTRAS, SparkPipeline, open_pipeline
from pipelines.vllm_engine.adapter import sampling_params
from pipelines.vllm_engine.options import TokenRequest, Tokens, TokenSampling
from pipelines.vllm_engine.tokens import token_sampling
from tests.support.golden_arrays import flat
from tests.support.vllm_kit import Waiter

if TYPE_CHECKING:
    from tests.conformance.spark import Case, Golden, Item

SECONDS = 300
PROBABILITY_LIMIT = 1e-5
#: Draws a setting, and the expected number of draws from which on an id is a group of its own.
DRAWS, EXPECTED = 256, 5


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
    drawn = [case for case in golden.cases.values() if case["kind"] == "sampling_distribution"]
    try:
        for case in greedy:
            yield f"vllm alone {case['name']}", lambda case=case: _alone(opened, case)
        yield "vllm together", lambda: _together(opened, greedy)
        for case in drawn:
            yield f"sampling_distribution {case['name']}", lambda case=case: _chances(golden, case)
            yield f"vllm draws {case['name']}", lambda case=case: _draws(opened, case)
        yield "speech together", lambda: _speech(opened, greedy)
        for case in greedy:
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


def _sampling(golden: Golden, settings: list[float], seed: int) -> TokenSampling:
    """Settings [temperature, top_k, top_p] as a line's `generation` gives them."""
    temperature, top_k, top_p = settings
    return token_sampling(golden.config.sampling, Generation(temperature=temperature, top_k=int(top_k), top_p=top_p), 1, seed, ())


def _chances(golden: Golden, case: Item) -> None:
    """The probabilities from which vLLM's sampler draws what our requests ask for."""
    golden.arrays.check(case)
    sampler = Sampler(logprobs_mode="processed_logprobs")
    logits = torch.from_numpy(golden.arrays(case["logits_file"])["logits"][case["row"]])[None]
    for index, settings in enumerate(case["settings"]):
        asked = sampling_params(TokenRequest("", [0], _sampling(golden, settings, 0)), 1, streamed=False)
        made = sampler(logits.clone(), _metadata(asked, logits.shape[1])).logprobs_tensors
        golden.near(f"settings {index}", made.logprobs[0].exp(), golden.arrays(case["file"])[f"probs_{index}"], PROBABILITY_LIMIT)


def _metadata(asked: SamplingParams, vocabulary: int) -> SamplingMetadata:
    """One row as vLLM's runner describes it to the sampler, with the probabilities of all ids wanted."""
    nothing = torch.zeros(1)
    return SamplingMetadata(
        temperature=torch.tensor([asked.temperature]),
        all_greedy=False,
        all_random=True,
        top_p=torch.tensor([asked.top_p]),
        top_k=torch.tensor([asked.top_k if 0 < asked.top_k < vocabulary else vocabulary]),
        generators={},
        max_num_logprobs=-1,
        no_penalties=asked.repetition_penalty == 1,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=torch.tensor([asked.repetition_penalty]),
        output_token_ids=[[]],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def _draws(opened: Opened, case: Item) -> None:
    """Tokens that the engine draws behind the golden prompt, by a chi-square test: of a right engine one case in a million fails."""
    golden = opened.golden
    source = next(one for one in golden.cases.values() if one.get("file") == case["logits_file"])
    arrays = golden.arrays(source["file"])
    # Row n of the logits is that of output step `logits_steps[n]`.
    prompt = [*arrays["input_ids"].tolist(), *arrays["output_ids"][: arrays["logits_steps"][case["row"]]].tolist()]
    for index, settings in enumerate(case["settings"]):
        waiters = [Waiter() for _ in range(DRAWS)]
        for seed, waiter in enumerate(waiters):
            opened.pipeline.host.submit(TokenRequest(f"{case['name']}-{index}-{seed}", prompt, _sampling(golden, settings, seed)), waiter)
        ids = [waiter.future.result(SECONDS).ids[0] for waiter in waiters]
        _check_share(f"settings {index}", ids, golden.arrays(case["file"])[f"probs_{index}"].astype(np.float64))


def _check_share(what: str, ids: list[int], chances: NDArray[np.float64]) -> None:
    """Raises AssertionError for an id that cannot be drawn, and where chi-square is beyond its one-in-a-million point."""
    found = np.bincount(ids, minlength=len(chances))
    impossible = np.flatnonzero((chances == 0) & (found > 0))
    assert not len(impossible), f"{what}: id {impossible[:1]} was drawn, whose probability is 0"
    often = chances * len(ids) >= EXPECTED
    groups = [np.append(values[often], values[~often].sum()) for values in (found, chances * len(ids))]
    kept = groups[1] > 0
    square = float(((groups[0] - groups[1])[kept] ** 2 / groups[1][kept]).sum())
    freedom = max(int(kept.sum()) - 1, 1)
    # Wilson and Hilferty (1931); 4.75 standard deviations are one in a million.
    bound = freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert square <= bound, f"{what}: chi-square {square:.1f} of {freedom} degrees of freedom, allowed {bound:.1f}"


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
