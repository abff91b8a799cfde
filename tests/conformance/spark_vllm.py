"""What only vLLM shows of SparkTTS against a golden folder: the probabilities from which its own sampler
draws."""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from pipelines.tokens import TokenPrompt, TokenRequest
from pipelines.vllm_engine.host import sampling_params
from pipelines.vllm_engine.library import ModelSpec
from tests.conformance.spark import PROBABILITY_LIMIT
from tests.conformance.spark_engines import Opened, sampling_of

if TYPE_CHECKING:
    from tests.conformance.spark import Case, Item


def cases(opened: Opened, greedy: list[Item], drawn: list[Item]) -> Iterator[Case]:
    """The distributions of vLLM's sampler."""
    for case in drawn:
        yield f"chances {case['name']}", partial(_chances, opened, case)


def _chances(opened: Opened, case: Item) -> None:
    """The probabilities from which vLLM's sampler draws what our requests ask for."""
    golden = opened.golden
    golden.arrays.check(case)
    sampler = Sampler(logprobs_mode="processed_logprobs")
    logits = torch.from_numpy(golden.arrays(case["logits_file"])["logits"][case["row"]])[None]
    for index, settings in enumerate(case["settings"]):
        request = TokenRequest("", TokenPrompt([0]), sampling_of(golden, settings, 0, ()))
        asked = sampling_params(ModelSpec(golden.folder), request, streamed=False)
        made = sampler(logits.clone(), _metadata(asked, logits.shape[1])).logprobs_tensors
        golden.near(
            f"settings {index}",
            made.logprobs[0].exp(),
            golden.arrays(case["file"])[f"probs_{index}"],
            PROBABILITY_LIMIT,
        )


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
