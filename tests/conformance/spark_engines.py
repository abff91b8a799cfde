"""SparkTTS end to end against a golden folder, on one engine: its LM alone, in a running batch and drawn,
and text to audio as a job asks.

What only one of the engines can show is in `spark_native` and `spark_vllm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipelines.request import Generation, Message, SynthesisRequest, stream, submit
from pipelines.spark_tts.config import SAMPLING
from pipelines.spark_tts.pipeline import SparkPipeline, open_pipeline
from pipelines.tokens import TokenPrompt, TokenRequest, Tokens, TokenSampling, token_sampling
from tests.conformance.token_engines import SECONDS, check_share, staggered
from tests.support.golden_arrays import flat
from tests.support.vllm_kit import Waiter
from tests.support.wide_heads import widened

if TYPE_CHECKING:
    from tests.conformance.spark import Case, Golden, Item

#: Draws a setting through the whole engine.
DRAWS = 256
#: What the penalty of a repetition is compared at, and for how many tokens.
PENALTY, PENALIZED_TOKENS = 1.3, 24


class Opened:
    """The pipeline of a golden folder's checkpoint on one engine, opened at the first case."""

    def __init__(self, golden: Golden, engine: Literal["native", "vllm"]) -> None:
        self.golden = golden
        self.engine = engine

    @cached_property
    def pipeline(self) -> SparkPipeline:
        options: dict[str, Any] = {
            "device": self.golden.device.type,
            "dtype": "float32",
            "codec_dtype": "float32",
        }
        folder = widened(self.golden.checkpoint) if self.engine == "vllm" else self.golden.checkpoint
        return open_pipeline(folder, engine=self.engine, **options, keep_unfinished=True, max_context=2048)

    @property
    def ends(self) -> tuple[int, int]:
        """The ids that end a sequence."""
        return self.golden.config.lm.eos_token_id, self.golden.vocabulary.controls["end_semantic_token"]

    def submit(
        self, name: str, prompt: Sequence[int], sampling: TokenSampling, waiter: Waiter | None = None
    ) -> Future[Tokens]:
        waiter = waiter or Waiter()
        self.pipeline.host.submit(TokenRequest(name, TokenPrompt(prompt), sampling), waiter)
        return waiter.future

    def greedy(self, case: Item, waiter: Waiter | None = None) -> Future[Tokens]:
        """The likeliest tokens of a case."""
        prompt = self.golden.arrays(case["file"])["input_ids"].tolist()
        sampling = TokenSampling(case["max_new_tokens"], 0.0, stop_ids=self.ends)
        return self.submit(case["name"], prompt, sampling, waiter)

    def close(self) -> None:
        if "pipeline" in self.__dict__:
            self.pipeline.close()


def cases(golden: Golden, engine: Literal["native", "vllm"]) -> Iterator[Case]:
    """Every greedy case alone, all of them together and one after the other into a running batch, drawn,
    and as speech."""
    opened = Opened(golden, engine)
    greedy = [case for case in golden.cases.values() if case["kind"].startswith("greedy")]
    drawn = [case for case in golden.cases.values() if case["kind"] == "sampling_distribution"]
    try:
        for case in greedy:
            yield f"{engine} alone {case['name']}", partial(_alone, opened, case)
        yield f"{engine} together", partial(_together, opened, greedy)
        yield f"{engine} staggered", partial(_staggered, opened, greedy)
        yield f"{engine} penalty", partial(_penalty, opened, greedy)
        for case in drawn:
            yield f"{engine} draws {case['name']}", partial(_draws, opened, case)
        yield f"{engine} speech", partial(_speech, opened, greedy)
        for case in greedy:
            yield f"{engine} streamed {case['name']}", partial(_stream, opened, case)
        for name, check in _own_cases(engine)(opened, greedy, drawn):
            yield f"{engine} {name}", check
    finally:
        opened.close()


def _own_cases(
    engine: Literal["native", "vllm"],
) -> Callable[[Opened, list[Item], list[Item]], Iterator[Case]]:
    if engine == "native":
        from tests.conformance import spark_native

        return spark_native.cases
    from tests.conformance import spark_vllm

    return spark_vllm.cases


def _check(opened: Opened, case: Item, tokens: Tokens) -> None:
    """The ids up to the end, which vLLM hands over and our engine does not, and how the sequence ended."""
    from tests.conformance.spark import same

    wanted = opened.golden.arrays(case["file"])["output_ids"]
    ended = np.flatnonzero(np.isin(wanted, opened.ends))
    same(
        f"output ids of {case['name']}",
        _without_end(opened, tokens),
        wanted[: ended[0]] if len(ended) else wanted,
    )
    assert (tokens.finish == "stop") is bool(len(ended)), f"{case['name']} ended by {tokens.finish}"


def _without_end(opened: Opened, tokens: Tokens) -> list[int]:
    return tokens.ids[:-1] if tokens.ids and tokens.ids[-1] in opened.ends else tokens.ids


def _alone(opened: Opened, case: Item) -> None:
    _check(opened, case, opened.greedy(case).result(SECONDS))


def _together(opened: Opened, greedy: list[Item]) -> None:
    for case, future in [(case, opened.greedy(case)) for case in greedy for _ in range(3)]:
        _check(opened, case, future.result(SECONDS))


def _staggered(opened: Opened, greedy: list[Item]) -> None:
    staggered([*greedy, *greedy[::-1]], opened.greedy, partial(_check, opened))


def _penalty(opened: Opened, greedy: list[Item]) -> None:
    """Ids of the prompt count as drawn, as in transformers' `generate`."""
    arrays = opened.golden.arrays(
        max(greedy, key=lambda one: len(opened.golden.arrays(one["file"])["output_ids"]))["file"]
    )
    # With half of a long output in it the prompt holds ids that would be drawn again.
    prompt = [*arrays["input_ids"].tolist(), *arrays["output_ids"][: len(arrays["output_ids"]) // 2].tolist()]
    wanted = opened.golden.oracle.penalized(prompt, PENALIZED_TOKENS, PENALTY, opened.ends)
    sampling = TokenSampling(PENALIZED_TOKENS, 0.0, repetition_penalty=PENALTY, stop_ids=opened.ends)
    tokens = opened.submit("penalty", prompt, sampling).result(SECONDS)
    assert _without_end(opened, tokens) == wanted, f"{tokens.ids}, expected {wanted}"


def sampling_of(golden: Golden, settings: list[float], seed: int, ends: tuple[int, ...]) -> TokenSampling:
    """One draw with settings [temperature, top_k, top_p] as a line's `generation` gives them."""
    temperature, top_k, top_p = settings
    return token_sampling(
        SAMPLING,
        Generation(temperature=temperature, top_k=int(top_k), top_p=top_p),
        1,
        seed,
        ends,
    )


def _draws(opened: Opened, case: Item) -> None:
    """Tokens that the engine draws behind the golden prompt, by a chi-square test: of a right engine one
    case in a million fails."""
    golden = opened.golden
    source = next(one for one in golden.cases.values() if one.get("file") == case["logits_file"])
    arrays = golden.arrays(source["file"])
    # Row n of the logits is that of output step `logits_steps[n]`.
    prompt = [
        *arrays["input_ids"].tolist(),
        *arrays["output_ids"][: arrays["logits_steps"][case["row"]]].tolist(),
    ]
    for index, settings in enumerate(case["settings"]):
        drawn = [
            opened.submit(
                f"{case['name']}-{index}-{seed}", prompt, sampling_of(golden, settings, seed, opened.ends)
            )
            for seed in range(DRAWS)
        ]
        # Our engine hands over no end: then it was one of the ends, and the likelier one stands for both.
        chances = golden.arrays(case["file"])[f"probs_{index}"].astype(np.float64)
        end = max(opened.ends, key=lambda one: chances[one])
        ids = [(future.result(SECONDS).ids or [end])[0] for future in drawn]
        check_share(f"settings {index}", ids, chances)


def _speech(opened: Opened, greedy: list[Item]) -> None:
    futures = [(case, submit(opened.pipeline, _request(opened, case))) for case in greedy]
    for case, future in futures:
        speech = future.result(SECONDS)
        assert speech.sample_rate == opened.golden.config.sample_rate, f"{speech.sample_rate} Hz"
        assert speech.meta["engine"] == opened.engine, f"{case['name']} was made by {speech.meta['engine']}"
        opened.golden.near(
            case["name"], speech.samples, flat(opened.golden.arrays(case["file"])["wav"]), "wav"
        )


def _stream(opened: Opened, case: Item) -> None:
    """A stream has the length of the whole; its samples are those of windows, so only their number is
    compared."""
    chunks = list(stream(opened.pipeline, _request(opened, case)))
    samples, whole = (
        sum(len(chunk.samples) for chunk in chunks),
        opened.golden.arrays(case["file"])["wav"].size,
    )
    assert samples == whole, f"{samples} samples, expected {whole}"


def _request(opened: Opened, case: Item) -> SynthesisRequest:
    """A case in the words of a dialogue."""
    seconds = opened.golden.arrays(case["file"])["wav"].size / opened.pipeline.sample_rate
    messages = [Message("user", "text", case["text"])]
    if "wav" in case:
        messages.insert(0, Message("user", "audio", opened.golden.wav(case["wav"])))
    generation = Generation(
        voice=f"{case['gender']}/{case['pitch']}/{case['speed']}" if "gender" in case else None,
        reference_text=case.get("ref_text"),
        temperature=0.0,
        max_seconds=seconds,
    )
    return SynthesisRequest(case["name"], tuple(messages), generation)
