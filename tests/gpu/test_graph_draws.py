"""Drawn speech under CUDA graphs, held to the exact probabilities as `tests/parity/test_engine_draws.py`
holds the eager engine.

The probabilities come from the logits that the draw kernels read. In bfloat16 the kernel is the one in
CUDA C++ where nvcc is there, in float32 Triton's. Power and seeds are those of the test on CPU: a group
has at least 250 draws of codebook 0 and 3,500 of the others, a comparison of pairs at least 2,500.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.checkpoint import dummy_model
from pipelines.engine.core import EngineOptions
from pipelines.engine.opening import graph_executor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.qwen3_tts.prompt import TokenizedTask, build_prompt
from tests.support.drawn import ALL_SETTINGS, Heard, Places, drawn, independent, lagged, uniform
from tests.support.gpu_taps import tapped
from tests.support.listened import ListenedCore

pytestmark = pytest.mark.gpu

ALPHA = 1e-5
FRAMES = 6
REQUESTS = 44 * len(ALL_SETTINGS)
PAGE_SIZE, MAX_CONTEXT = 64, 256
ROLE = [151644, 77091, 198]


@pytest.fixture(
    scope="module",
    params=[(torch.float32, 512), (torch.bfloat16, 512), (torch.bfloat16, 16)],
    ids=["float32 in 512 slots", "bfloat16 in 512 slots", "bfloat16 in 16 slots"],
)
def places(request: pytest.FixtureRequest) -> Places:
    dtype, slots = request.param
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda")
    model = dummy_model("0b6", device, dtype, MAX_CONTEXT)
    prompt = build_prompt(
        model.config, TokenizedTask(ROLE, [11, 12, 13, 14], language="english", speaker="ryan")
    )
    options = EngineOptions(
        slots=slots, pages=slots, page_size=PAGE_SIZE, max_context=MAX_CONTEXT, reserve_frames=FRAMES + 1
    )
    with tapped(model.config, slots, device) as taps:
        executor = graph_executor(model, options)
        return drawn(model.config, executor, taps.logits, prompt, options, REQUESTS, FRAMES)


def test_draws_have_the_exact_probabilities_of_their_own_settings(places: Places) -> None:
    assert not places.impossible, f"{len(places.impossible)} impossible draws: {places.impossible[:10]}"
    for one in ALL_SETTINGS:
        mine = places.of(one.name)
        assert np.count_nonzero(~np.isnan(mine[:, :, 0])) >= 250, one.name
        assert np.count_nonzero(~np.isnan(mine[:, :, 1:])) >= 3500, one.name
        assert uniform(mine[:, :, 0]) > ALPHA, f"{one.name}: codebook 0"
        assert uniform(mine[:, :, 1:]) > ALPHA, f"{one.name}: the other codebooks"
    for codebook in range(places.by_rank.shape[2]):
        assert uniform(places.by_rank[:, :, codebook]) > ALPHA, f"codebook {codebook}"


def test_draws_know_nothing_of_each_other(places: Places) -> None:
    for what, pair in lagged(places.by_id).items():
        chance, count = independent(*pair)
        assert count >= 2500, f"{what}: {count} pairs"
        assert chance > ALPHA, f"{what}: {chance:.1e} in {count} pairs"


def test_the_end_is_banned_for_so_many_draws_and_no_more() -> None:
    """A model that ends wherever it may says exactly as many frames as draws were banned."""
    model = dummy_model("0b6", torch.device("cuda"), torch.bfloat16, MAX_CONTEXT, ends=True)
    prompt = build_prompt(
        model.config, TokenizedTask(ROLE, [11, 12, 13, 14], language="english", speaker="ryan")
    )
    heard = Heard()
    options = EngineOptions(
        slots=8, pages=16, page_size=PAGE_SIZE, max_context=MAX_CONTEXT, reserve_frames=16
    )
    core = ListenedCore(graph_executor(model, options), options, heard)
    wanted = {
        f"{least} {temperature}": (least, temperature) for least in (2, 3, 7) for temperature in (0.0, 0.9)
    }
    for seed, (name, (least, temperature)) in enumerate(wanted.items()):
        sampling = SamplingParams(
            temperature=temperature, residual_temperature=temperature, min_new_tokens=least
        )
        core.add(GenerationRequest(name, prompt, sampling, seed, 16))
    while core.busy:
        core.step()
    assert {name: (len(heard.codes[name]), heard.finish[name]) for name in wanted} == {
        name: (least, "eos") for name, (least, _) in wanted.items()
    }
