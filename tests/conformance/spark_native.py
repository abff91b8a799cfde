"""What only our own engine shows of SparkTTS against a golden folder: states and logits of every step, and
a hundred thousand draws."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.frame import DrawRules
from kernels.reference import FrameOutput
from kernels.sampler import DrawFlags, draw, frame_noise, process_first, token_weights
from pipelines.engine.executor import FrameSettings, PrefillRun
from pipelines.engine.state import Placement, SamplingParams
from pipelines.spark_tts.language_model import Drawable, SparkModel, load_weights
from pipelines.tokens import TokenPrompt
from tests.conformance.spark_engines import Opened
from tests.conformance.token_engines import check_share

if TYPE_CHECKING:
    from tests.conformance.spark import Case, Golden, Item

#: Draws a setting.
DRAWS = 100_000
GREEDY, GREEDY_FLAGS = (
    SamplingParams(temperature=0.0, repetition_penalty=1.0, min_new_tokens=0),
    DrawFlags(0, False, True),
)


def cases(opened: Opened, greedy: list[Item], drawn: list[Item]) -> Iterator[Case]:
    """The numbers of each step, and the draws of the sampler."""
    for case in greedy:
        yield f"trace {case['name']}", partial(_trace, opened.golden, case)
    for case in drawn:
        yield f"sampler {case['name']}", partial(_sampler, opened.golden, case)


def _model(golden: Golden) -> tuple[SparkModel, Drawable]:
    drawable = Drawable.of(golden.vocabulary, golden.config.lm)
    weights = load_weights(golden.config, drawable, torch.float32, golden.device)
    return SparkModel(golden.config.lm, weights, drawable, 2048), drawable


@torch.inference_mode()
def _trace(golden: Golden, case: Item) -> None:
    """The golden tokens fed back: the state behind each, and the logits of what can be drawn."""
    arrays, (model, drawable) = golden.arrays(case["file"]), _model(golden)
    outputs = forced_frames(model, arrays["input_ids"], np.searchsorted(drawable.ids, arrays["output_ids"]))
    golden.near("hidden", torch.cat([one.hidden for one in outputs]), arrays["hidden"], "hidden")
    # What cannot be drawn has no row of ours: there transformers' logits are compared.
    logits = golden.trace(case["name"]).logits.clone()
    made = torch.cat([one.first_logits for one in outputs]).cpu()
    logits[:, torch.from_numpy(drawable.ids)] = made[:, : len(drawable.ids)]
    golden.near("logits", logits[arrays["logits_steps"]], arrays["logits"], "logits")
    assert not bool(made[:, len(drawable.ids) :].any()), "a row that fills the head up is not zero"


def forced_frames(model: SparkModel, ids: NDArray[np.int64], codes: NDArray[np.int64]) -> list[FrameOutput]:
    """Frames behind a prompt, with these codes [frames] fed back."""
    page_size, prompt = 16, TokenPrompt(ids.tolist())
    pages = -(-(len(prompt) + len(codes)) // page_size)
    kv, state = model.make_kv(pages, page_size), model.make_state(1, pages, 0)
    embeddings = model.embed(prompt)
    state.place(
        [
            Placement(
                0,
                [kv.free.pop() for _ in range(pages)],
                0,
                GREEDY,
                prompt.trailing,
                embeddings[-1],
                len(prompt) - 1,
            )
        ]
    )
    model.prefill([PrefillRun(0, 0, embeddings[:-1])], state, kv)
    row = torch.tensor([0], device=model.device)
    outputs = []
    for index, code in enumerate(codes.tolist()):
        settings = FrameSettings(len(prompt) + index, ())
        outputs.append(model.frame(row, settings, state, kv, torch.tensor([[code]], device=model.device)))
    return outputs


def native_weights(logits: Tensor, rules: DrawRules, settings: list[float]) -> Tensor:
    """The weights from which our sampler draws one row of logits [1, codes]: int64 [1, codes]."""
    temperature, top_k, top_p = settings
    nothing, none = torch.zeros_like(logits, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    processed = process_first(logits, nothing, torch.ones(1), none, rules.ends, rules.suppress_from)
    chosen = torch.tensor([temperature]), torch.tensor([int(top_k)]), torch.tensor([top_p])
    return token_weights(processed, *chosen, int(top_k), top_p < 1)


def golden_row(golden: Golden, case: Item) -> tuple[Tensor, DrawRules, Drawable]:
    """The logits of a case as the head gives them, [1, rows], and how they are drawn."""
    drawable = Drawable.of(golden.vocabulary, golden.config.lm)
    logits = torch.zeros(1, drawable.rows)
    logits[0, : len(drawable.ids)] = torch.from_numpy(
        golden.arrays(case["logits_file"])["logits"][case["row"]]
    )[drawable.ids]
    return logits, DrawRules(drawable.ends, len(drawable.ids)), drawable


def _sampler(golden: Golden, case: Item) -> None:
    """Draws with the noise of as many seeds, by a chi-square test."""
    logits, rules, drawable = golden_row(golden, case)
    random = frame_noise(torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64), 1)[:, 0]
    for index, settings in enumerate(case["settings"]):
        weights = native_weights(logits, rules, settings)
        # Codes without weight are never drawn: leaving them out makes a hundred thousand rows fit.
        kept = weights[0].nonzero()[:, 0]
        codes = kept[draw(weights[:, kept].expand(DRAWS, -1), random)].numpy()
        check_share(
            f"settings {index}",
            drawable.ids[codes],
            golden.arrays(case["file"])[f"probs_{index}"].astype(np.float64),
        )
