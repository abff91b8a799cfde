"""Log probabilities of codebook 0: those of the published models' own logits, and equal bits in any company."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.frame import DrawRules
from kernels.reference import FrameOutput
from pipelines.engine.scheduler import GenerationRequest
from pipelines.fish_speech.model import FishModel
from pipelines.fish_speech.model import load_weights as fish_weights
from pipelines.spark_tts.language_model import Drawable, SparkModel, load_weights
from tests.conformance import fish, fish_native, qwen3_folder, qwen3_tts, spark, spark_native
from tests.support.fish_checkpoint import GOLDEN as FISH
from tests.support.golden_arrays import Thinned
from tests.support.qwen3_golden import GOLDEN as QWEN3
from tests.support.qwen3_golden import Recorder, golden_model, make_core, random_request
from tests.support.rounds import turn_until
from tests.support.vllm_kit import GOLDEN as SPARK

#: From a plain log-softmax of our own logits, and of the published model's.
LIMIT, PUBLISHED_LIMIT = 1e-5, 5e-5
CPU = torch.device("cpu")


def compare(made: list[FrameOutput], published: Tensor, rules: DrawRules) -> None:
    """Compares with a plain log-softmax of our own logits, and of the published model's [frames, codes]."""
    found, codes = (
        torch.cat([getattr(one, name) for one in made]) for name in ("log_probabilities", "codes")
    )
    own = torch.cat([one.first_logits for one in made])
    for logits, limit in ((own, LIMIT), (published, PUBLISHED_LIMIT)):
        torch.testing.assert_close(found, plain(logits, codes, rules), rtol=0, atol=limit)


def plain(logits: Tensor, codes: Tensor, rules: DrawRules) -> Tensor:
    """The log-softmax of what can be drawn, at the codes of codebook 0: float32 [frames]."""
    drawable = [*range(min(rules.suppress_from, logits.shape[1])), *rules.ends]
    kept = torch.full_like(logits, -torch.inf, dtype=torch.float64)
    kept[:, drawable] = logits[:, drawable].double()
    return kept.log_softmax(-1).gather(1, codes[:, :1])[:, 0].float()


def test_qwen3_tts() -> None:
    golden = qwen3_folder.Golden(QWEN3, "cpu", torch.float32)
    compared = 0
    for entry in golden.content["teacher_forced"]:
        row, count = golden.row(entry["case"], entry["row"]), entry["frames"]
        model = golden.model(golden.checkpoint(row.case))
        logits = golden.arrays(entry["arrays"])[entry["keys"].removesuffix("*") + "logits_codebook0"]
        if isinstance(logits, Thinned):
            continue
        made = qwen3_tts.forced_frames(model, row.prompt(model.config), row.array("codes")[:count])
        compare(made, torch.from_numpy(logits), model.tensors.draw)
        compared += len(made)
    assert compared


@torch.inference_mode()
def test_spark_tts() -> None:
    golden = spark.Golden(SPARK, CPU)
    drawable = Drawable.of(golden.vocabulary, golden.config.lm)
    weights = load_weights(golden.config, drawable, torch.float32, CPU)
    model = SparkModel(golden.config.lm, weights, drawable, 2048)
    cases = [case for case in golden.cases.values() if "hidden" in case.get("arrays", ())]
    for case in cases:
        arrays = golden.arrays(case["file"])
        codes = np.searchsorted(drawable.ids, arrays["output_ids"])
        made = spark_native.forced_frames(model, arrays["input_ids"], codes)
        logits = golden.trace(case["name"]).logits[:, torch.from_numpy(drawable.ids)]
        compare(made, logits, model.tensors.draw)
    assert cases


@torch.inference_mode()
def test_fish_speech() -> None:
    golden = fish.Golden(FISH, CPU)
    model = FishModel(golden.config, fish_weights(golden.config, torch.float32, CPU), 2048)
    cases = [case for case in golden.cases.values() if "hidden" in case.get("arrays", ())]
    for case in cases:
        arrays = golden.arrays(case["file"])
        prompt = fish_native.prompt_of(golden, arrays["prompt_0"])
        made, _ = fish_native.forced_frames(model, prompt, arrays["columns_0"][1:].T)
        logits = golden.trace(case["name"], 0).logits[:, fish_native.allowed(golden)]
        compare(made, logits, model.tensors.draw)
    assert cases


def requests(count: int) -> list[GenerationRequest]:
    rng, model = random.Random(11), golden_model("base")
    return [replace(random_request(rng, model, str(at)), stream=at % 3 == 0) for at in range(count)]


def measured(batch: list[GenerationRequest], **options: Any) -> tuple[Recorder, list[np.ndarray]]:
    """What is heard of requests that run together, and their log probabilities."""
    heard = Recorder()
    core = make_core(golden_model("base"), heard, **options)
    for request in batch:
        core.add(request)
    turn_until(lambda: not core.busy, core.step)
    return heard, [core.log_probabilities[request] for request in batch]


@pytest.mark.parametrize(
    "options", [{}, {"frames_per_turn": 3}, {"slots": 3}, {"pages": 20}], ids=["", "turns", "slots", "pages"]
)
def test_a_request_has_the_same_bits_alone_and_together(options: dict[str, int]) -> None:
    """Also if it is preempted, or ends within a turn; the end itself is never counted."""
    batch = requests(10)
    heard, together = measured(batch, **options)
    for request, found in zip(batch, together):
        _, (alone,) = measured([request])
        assert len(found) == len(heard.codes[request])
        np.testing.assert_array_equal(found, alone)
    assert {heard.finish[request] for request in batch} == {"eos", "length"} or options


def test_they_are_of_the_raw_logits_whatever_the_settings() -> None:
    """Drawn with penalty, temperature, top-k and top-p, which do not change the model's own distribution."""
    model, batch = golden_model("base"), requests(10)
    heard, found = measured(batch)
    for request, own in zip(batch, found):
        codes = heard.codes[request]
        made = qwen3_tts.forced_frames(model, request.prompt, codes)[: len(codes)]
        logits = torch.cat([one.first_logits for one in made])
        wanted = plain(logits, torch.from_numpy(codes), model.tensors.draw)
        np.testing.assert_allclose(own, wanted, rtol=0, atol=LIMIT)
