"""Fused frames of every kind against their twin, and their draws: on a GPU, or small, with
TRITON_INTERPRET=1, on a CPU."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.checkpoint import dummy_model
from kernels import layers, lm_frame, lm_products
from kernels.frame import StateTensors, fused_fault
from kernels.layers import qk_norm_rope_append, rope_table, swiglu
from kernels.lm_attention import (
    AttentionTile,
    SplitScratch,
    attention_tile,
    decode_attention,
    predictor_attention,
)
from kernels.lm_cuda import FIRST, ONLY
from kernels.lm_frame import FusedFrame, Plan, known_to_cuda, plan_for
from kernels.lm_products import Norm
from kernels.sampler import (
    RETRY_TEMPERATURE,
    RETRY_TOP_P,
    DrawFlags,
    frame_noise,
    log_probability,
    nucleus_weights,
    process_first,
    sample,
    token_weights,
)
from pipelines.engine.buckets import BUCKETS, WIDE_BUCKETS
from tests.support import lm_checks
from tests.support.attention_layers import attention_layer
from tests.support.lm_tensors import (
    FISH,
    LARGE,
    SMALL,
    SPARK,
    TINY,
    TINY_FISH,
    TINY_SPARK,
    Maker,
    Shape,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
    ),
]
#: The interpreter takes seconds for what a GPU does at once, and knows no dependent launches.
PLAN, BATCH, LONGEST = (
    (Plan(splits=((99, 2),), pdl=False), 3, 40) if INTERPRETED else (Plan(splits=((99, 2),)), 29, 200)
)

TINY_TALKER = dataclasses.replace(TINY, layers=1, predictor_layers=1, codebooks=3)
#: Few codes, so that many were drawn a moment ago.
REPEATING = dataclasses.replace(TINY_FISH, layers=1, vocab=32, control=16, window=10)


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    ("shape", "frames"), [(TINY_TALKER, 1), (TINY_SPARK, 3), (TINY_FISH, 2)], ids=["talker", "spark", "fish"]
)
def test_float32_frames_draw_the_codes_of_the_twin(shape: Shape, frames: int) -> None:
    maker = Maker(DEVICE, torch.float32, seed=2)
    assert lm_checks.check_frame(
        maker, shape, BATCH, PLAN, "tiny", exact=True, frames=frames, longest_context=LONGEST
    )


def product_with_norms(
    x: Tensor | Norm, weight: Tensor, y: Tensor, config: None, *, epilogue: int = lm_products.PLAIN, **rest
) -> Tensor:
    """The twin of `lm_products.product`, of any sizes."""
    scale: Tensor | float = 1.0
    if isinstance(x, Norm):
        x, scale = x.weighted, torch.rsqrt(x.squares.sum(-1, keepdim=True) / x.weighted.shape[1] + x.eps)
    z = x @ weight.t() * scale
    y.copy_(
        swiglu(z)
        if epilogue == lm_products.SWIGLU
        else z + rest["extra"]
        if epilogue == lm_products.RESIDUAL
        else z
    )
    if (into := rest.get("into")) is not None:
        into.weighted.copy_(y * rest["norm"])
        into.squares.copy_(y.square().unflatten(-1, (into.squares.shape[1], -1)).sum(-1))
    return y


def test_frames_whose_norms_are_parts_of_products_draw_the_codes_of_the_twin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which norm goes where; the products themselves are those of plain PyTorch."""
    monkeypatch.setattr(lm_frame, "runs_products", lambda *_: True)
    monkeypatch.setattr(lm_products, "tile_config", lambda *_: None)
    monkeypatch.setattr(lm_products, "product", product_with_norms)
    shape = dataclasses.replace(TINY_TALKER, hidden=64, layers=2, predictor_layers=2)
    plan = PLAN._replace(products=True)
    assert lm_checks.check_frame(
        Maker(DEVICE, torch.float32, seed=4), shape, BATCH, plan, "tiny", exact=True, longest_context=LONGEST
    )


@pytest.mark.parametrize("launches", ["all", "predictor", "first pass"])
def test_frames_on_wide_swiglu_draw_the_codes_of_the_twin(
    launches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which weights go where, launch by launch; SwiGLU itself is that of plain PyTorch. Frames have two
    dead rows beside the batch."""
    shape = dataclasses.replace(TINY_TALKER, layers=2, predictor_layers=2)
    made: set[tuple[int, int, int]] = set()

    def fills(rows: int, n: int, processors: int) -> bool:
        assert processors == 132
        return launches == "all" or (n == shape.width_inter and (launches == "predictor" or rows > BATCH + 2))

    def swiglu(x: Tensor, weight: Tensor, y: Tensor, *, pdl: bool = False) -> Tensor:
        assert fills(*y.shape, 132)
        made.add((*y.shape, weight.data_ptr()))
        return y.copy_(layers.swiglu(x @ weight.t()))

    monkeypatch.setattr(lm_frame, "runs_swiglu", lambda *_: True)
    monkeypatch.setattr(lm_frame, "processors", lambda _: 132)
    monkeypatch.setattr(lm_products, "fills", fills)
    monkeypatch.setattr(lm_products, "swiglu", swiglu)
    plan = PLAN._replace(skinny=False, wide_swiglu=True)
    assert lm_checks.check_frame(
        Maker(DEVICE, torch.float32, seed=4), shape, BATCH, plan, "tiny", exact=True, longest_context=LONGEST
    )
    # Of the first pass of the predictor, the last layer has half of the rows.
    assert len(made) == {"all": 5, "predictor": 3, "first pass": 1}[launches]


def test_frames_of_few_rows_ask_for_no_wide_swiglu() -> None:
    assert not plan_for(256).wide_swiglu
    assert plan_for(384).wide_swiglu


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(
    ("shape", "rows"), [(SMALL, 500), (LARGE, 500), (LARGE, 700)], ids=["0.6B", "1.7B", "talker alone"]
)
def test_bfloat16_frames_on_wide_swiglu_are_within_twice_the_error_of_the_twin(
    shape: Shape, rows: int
) -> None:
    plan, shape = plan_for(rows), dataclasses.replace(shape, layers=2, predictor_layers=2)
    assert plan.wide_swiglu
    assert lm_products.fills(rows, shape.inter, lm_products.processors(0))
    assert lm_checks.check_frame(Maker("cuda", torch.bfloat16, seed=1), shape, rows, plan, f"{rows} rows")


@pytest.mark.parametrize("launches", ["all", "talker", "predictor", "kept rows"])
def test_frames_on_residual_products_draw_the_codes_of_the_twin(
    launches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which weights go where, launch by launch; the products are those of plain PyTorch. Frames have two
    dead rows beside the batch."""
    shape, rows = dataclasses.replace(TINY_TALKER, layers=2, predictor_layers=2), BATCH + 2
    made: list[tuple[int, int, int]] = []

    def splits_for(some: int, n: int, inner: int, clusters: dict[int, int]) -> int | None:
        assert clusters == {4: 30, 8: 15}
        of_talker = n == shape.hidden
        chosen = {
            "all": True,
            "talker": of_talker,
            "predictor": not of_talker,
            "kept rows": some == rows and not of_talker,
        }
        return 4 if chosen[launches] else None

    def add_product(x: Tensor, a: Tensor, weight: Tensor, splits: int, *, pdl: bool = False) -> Tensor:
        assert splits == 4
        assert pdl != INTERPRETED
        assert x.is_contiguous()
        assert a.is_contiguous()
        made.append((len(x), *weight.shape))
        return x.add_(a @ weight.t())

    monkeypatch.setattr(lm_frame, "runs_residual", lambda *_: True)
    monkeypatch.setattr(lm_products, "clusters_of", lambda _: {4: 30, 8: 15})
    monkeypatch.setattr(lm_products, "splits_for", splits_for)
    monkeypatch.setattr(lm_products, "add_product", add_product)
    early: list[bool] = []
    norm = FusedFrame._added_norm

    def added_norm(self: FusedFrame, *given: Any, **how: Any) -> Tensor:
        early.append(self._starts_early)
        return norm(self, *given, **how)

    monkeypatch.setattr(FusedFrame, "_added_norm", added_norm)
    plan = PLAN._replace(pdl=False, skinny=False, residual_products=True)
    maker = Maker(DEVICE, torch.float32, seed=4)
    assert lm_checks.check_frame(
        maker, shape, BATCH, plan, "tiny", exact=True, frames=1, longest_context=LONGEST
    )

    def layers_of(count: int, rows: int, width: int, inter: int) -> list[tuple[int, int, int]]:
        return [(rows, width, shape.heads * shape.head_dim), (rows, width, inter)] * count

    talker = layers_of(2, rows, shape.hidden, shape.inter)
    both = layers_of(1, 2 * rows, shape.width, shape.width_inter)
    # Of the first pass of the predictor, the last layer has half of the rows.
    later = layers_of(3, rows, shape.width, shape.width_inter)
    wanted = {"all": talker + both + later, "talker": talker, "predictor": both + later, "kept rows": later}
    assert made == wanted[launches]
    # A norm stands behind each product, and starts late behind cuBLAS's.
    assert early.count(False) == len(wanted["all"]) - len(made)


def test_frames_of_some_rows_ask_for_residual_products() -> None:
    assert [rows for rows in (*BUCKETS, *WIDE_BUCKETS) if plan_for(rows).residual_products] == [128, 256, 384]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(
    ("shape", "rows", "splits"),
    [(SMALL, 100, 8), (SMALL, 300, 4), (LARGE, 120, 4), (LARGE, 250, None)],
    ids=["8", "4", "1.7B", "predictor"],
)
def test_bfloat16_frames_on_residual_products_are_within_twice_the_error_of_the_twin(
    shape: Shape, rows: int, splits: int | None
) -> None:
    plan, shape = plan_for(rows), dataclasses.replace(shape, layers=2, predictor_layers=2)
    assert plan.residual_products
    assert lm_products.splits_for(rows, shape.hidden, shape.inter, lm_products.clusters_of(0)) == splits
    assert lm_checks.check_frame(Maker("cuda", torch.bfloat16, seed=1), shape, rows, plan, f"{rows} rows")


@on_gpu
@pytest.mark.parametrize("batch", [6, 70])
@pytest.mark.parametrize(
    "shape",
    [dataclasses.replace(SPARK, layers=4), dataclasses.replace(FISH, layers=2, predictor_layers=2)],
    ids=["spark", "fish"],
)
def test_bfloat16_frames_are_within_twice_the_error_of_the_twin(shape: Shape, batch: int) -> None:
    assert lm_checks.check_frame(
        Maker("cuda", torch.bfloat16, seed=1), shape, batch, plan_for(batch), f"{batch} rows"
    )


class Draws:
    """First draws of the kernel alone, of `rows` rows and logits made here."""

    def __init__(self, shape: Shape, rows: int) -> None:
        self.maker, self.shape = Maker(DEVICE, torch.float32, seed=3), shape
        self.weights = self.maker.frame(shape)
        self.state = self.maker.state(shape, rows, rows * 5 + 1, 16, self.maker.integers(0, 9, rows))
        self.rows = torch.arange(rows, device=DEVICE)
        self.logits = self.maker.normal(rows, shape.vocab, std=2.0)

    def run(self) -> tuple[Tensor, Tensor]:
        """Codes and flags, each [rows]; the state as a frame leaves it."""
        rows, shape = self.rows, self.shape
        codes = torch.zeros(len(rows), shape.codebooks, dtype=torch.int64, device=DEVICE)
        flags = torch.zeros(len(rows), dtype=torch.uint8, device=DEVICE)
        k, v = self.maker.caches(shape, 2, 16)
        frame = FusedFrame(self.weights, self.state, k, v, len(rows), PLAN)
        frame.draw_codebook(ONLY if shape.codebooks == 1 else FIRST, 0, self.logits, rows, codes, flags)
        rules = self.weights.draw
        own = log_probability(self.logits, codes[:, 0], rules.ends, rules.suppress_from)
        torch.testing.assert_close(frame.log_probabilities, own, rtol=1e-5, atol=1e-5)
        return codes[:, 0], flags

    def wanted(self, before: StateTensors) -> tuple[Tensor, Tensor]:
        """Codes of the twin, and which of them were drawn once more."""
        rules, rows, draw = self.weights.draw, self.rows, before.first
        early = before.frames[rows] < before.min_new_tokens[rows]
        processed = process_first(
            self.logits, before.seen[rows] != 0, before.penalty[rows], early, rules.ends, rules.suppress_from
        )
        noise = frame_noise(before.seeds[rows], before.frames[rows], self.shape.codebooks + 1)
        temperature, top_k, top_p, greedy = settings = draw.rows(rows)
        rest = DrawFlags(99, any_top_p=True, all_greedy=False), rules.nucleus_first
        code = sample(processed, noise[:, 0], settings, *rest)
        if not rules.window:
            return code, torch.zeros_like(greedy)
        warm, most = torch.full_like(temperature, RETRY_TEMPERATURE), torch.full_like(top_p, RETRY_TOP_P)
        again = sample(processed, noise[:, -1], (warm, top_k, most, greedy), *rest)
        known = (before.recent[rows] == code[:, None]).any(-1)
        return torch.where(known, again, code), known & (again != code)


@pytest.mark.parametrize("nucleus_first", [True, False])
def test_first_draws_are_the_twins_whatever_the_settings(nucleus_first: bool) -> None:
    rows = 24 if INTERPRETED else 240
    draws = Draws(dataclasses.replace(REPEATING, nucleus_first=nucleus_first), rows)
    lm_checks.vary_draws(draws.maker, draws.state.first)
    draws.logits *= 0.5
    draws.logits[::3] = draws.logits[::3].round()  # ties, which the nucleus splits
    draws.state.first.top_p[:rows:3] = torch.linspace(0.2, 0.9, rows // 3)
    before = lm_checks.clone_state(draws.state)
    wanted, repeated = draws.wanted(before)
    codes, _ = draws.run()
    assert codes.tolist() == wanted.tolist()
    assert repeated.sum() >= 3


@pytest.mark.parametrize("vocab", [80, SPARK.vocab])
def test_draws_of_a_wide_head_are_the_twins_whatever_the_settings(vocab: int) -> None:
    """As the published head is drawn, also where few codes have many ties."""
    rows = 240 if not INTERPRETED else 45 if vocab == 80 else 24
    draws = Draws(dataclasses.replace(TINY_SPARK, layers=1, vocab=vocab), rows)
    first = draws.state.first
    lm_checks.vary_draws(draws.maker, first)
    draws.logits[::3] = draws.logits[::3].round()
    draws.logits[4::9] = 0.25
    first.top_p[:rows:5], first.top_p[3:rows:5] = torch.linspace(0.05, 0.98, -(-rows // 5)), 0.0
    first.top_k[2:rows:7], first.top_k[5:rows:7] = 0, 1
    wanted, _ = draws.wanted(lm_checks.clone_state(draws.state))
    codes, _ = draws.run()
    assert codes.tolist() == wanted.tolist()
    assert len(set(codes.tolist())) > min(rows, vocab) // 3


def test_both_ends_can_be_drawn_and_nothing_else_beyond_the_speech() -> None:
    draws = Draws(TINY_SPARK, 24)
    first, second = draws.weights.draw.ends
    draws.logits[:, draws.weights.draw.suppress_from :] += 20
    draws.state.frames[:24:4] = 0
    draws.state.frames[1:24:4] = 9
    draws.state.frames[2:24:4] = 9
    wanted, _ = draws.wanted(lm_checks.clone_state(draws.state))
    codes, flags = draws.run()
    assert codes.tolist() == wanted.tolist()
    ended = (codes == first) | (codes == second)
    assert flags.tolist() == ended.int().tolist()
    assert {first, second} <= set(codes.tolist())
    assert not ended[::4].any()
    assert (codes[~ended] < draws.weights.draw.suppress_from).all()


@on_gpu
@pytest.mark.parametrize("nucleus_first", [True, False])
def test_draws_follow_the_probabilities(nucleus_first: bool) -> None:
    """Chi-square of one logits row under many seeds."""
    count = 20_000
    draws = Draws(
        dataclasses.replace(TINY_SPARK, layers=1, vocab=16, control=6, nucleus_first=nucleus_first), count
    )
    draws.logits[:] = draws.maker.normal(1, 16, std=1.5)
    draws.state.seen.zero_()
    settings = [torch.full((1,), value, device=DEVICE) for value in (0.8, 7, 0.85)]
    for mine, value in zip(
        (draws.state.first.temperature, draws.state.first.top_k, draws.state.first.top_p), settings
    ):
        mine.copy_(value.expand(count + 1))
    rules, one = draws.weights.draw, torch.ones(1, device=DEVICE)
    processed = process_first(
        draws.logits[:1], draws.state.seen[:1] != 0, one, one == 0, rules.ends, rules.suppress_from
    )
    draws.state.min_new_tokens.zero_()
    weights = (
        nucleus_weights(processed, *settings)
        if nucleus_first
        else token_weights(processed, *settings, 7, True)
    )[0]
    codes, _ = draws.run()
    found, wanted = (
        np.bincount(codes.cpu(), minlength=16),
        (weights.double() / weights.sum()).cpu().numpy() * count,
    )
    likely = wanted > 5
    assert likely.sum() >= 3
    assert (found[wanted == 0] == 0).all()
    observed, expected = (np.append(part[likely], part[~likely].sum()) for part in (found, wanted))
    kept = slice(None, None if expected[-1] > 0 else -1)
    assert stats.chisquare(observed[kept], expected[kept]).pvalue > 1e-4


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("wide_rope", [True, False])
def test_heads_are_rounded_where_the_twin_rounds_them(wide_rope: bool, normed: bool) -> None:
    """In float16, which the interpreter rounds as hardware does: keys that both kinds of attention append."""
    maker, rows, heads, kv_heads, size = Maker(DEVICE, torch.float16, seed=4), 6, 4, 2, 32
    norms = [maker.normal(size, std=0.1, mean=1.0) if normed else None for _ in range(2)]
    table, qkv = (
        rope_table(64, size, 1e4, torch.float16, DEVICE),
        maker.normal(rows, (heads + 2 * kv_heads) * size),
    )
    slots, out = torch.arange(rows, device=DEVICE), maker.normal(rows, heads * size)

    def wanted(at: Tensor, wide: bool) -> Tensor:
        k, v = (torch.zeros(rows, kv_heads, 16, size, device=DEVICE, dtype=torch.float16) for _ in range(2))
        qk_norm_rope_append(qkv, *attention_layer(norms, table, wide), table[at], k, v, slots, at % 16)
        return k

    def differ(found: Tensor, at: Tensor, wide: bool) -> float:
        return float((found != wanted(at, wide)).sum()) / qkv[:, : kv_heads * size].numel()

    positions = torch.arange(rows, device=DEVICE) * 2 + 3
    keys, values = (
        torch.zeros(rows, kv_heads, 16, size, device=DEVICE, dtype=torch.float16) for _ in range(2)
    )
    decode_attention(
        qkv, *attention_layer(norms, table, wide_rope), keys, values, slots[:, None], positions, slots, out,
        SplitScratch(rows * kv_heads, 1, heads // kv_heads, size, out.device), AttentionTile(16, 4, 3, ()),
    )  # fmt: skip
    assert differ(keys, positions, wide_rope) <= 0.01
    assert differ(keys, positions, not wide_rope) > 0.05
    keys, values = (
        torch.zeros(rows, kv_heads, 16, size, device=DEVICE, dtype=torch.float16) for _ in range(2)
    )
    predictor_attention(qkv, *attention_layer(norms, table, wide_rope), keys, values, 5, out)
    fifth = torch.full_like(positions, 5)
    assert differ(keys, fifth, wide_rope) <= 0.01
    assert differ(keys, fifth, not wide_rope) > 0.05


def test_attention_has_a_tile_for_few_heads_of_a_kv_head_and_one_for_many_within_a_page() -> None:
    few, many = (attention_tile(group, 64) for group in (2, 3))
    assert (few.block, few.warps, few.stages, few.splits[0]) == (16, 1, 5, (8, 8))
    assert (many.block, many.warps, many.stages, many.splits[0]) == (64, 4, 3, (2, 8))
    assert [attention_tile(7, page).block for page in (8, 16, 32, 128)] == [16, 16, 32, 64]


def test_heads_that_the_kernels_do_not_know_are_refused_in_one_sentence() -> None:
    for heads, kv_heads, head_dim, word in ((34, 2, 64, "34 for 2"), (8, 8, 80, "80"), (7, 2, 64, "7 for 2")):
        assert word in (fused_fault(heads, kv_heads, head_dim) or "")
    assert fused_fault(32, 2, 128) is None
    draws = Draws(dataclasses.replace(TINY_SPARK, heads=34), 1)
    with pytest.raises(ValueError, match="34 for 2"):
        draws.run()


def test_the_cuda_kernels_know_the_talker_and_no_other_kind() -> None:
    maker = Maker(DEVICE, torch.float32)
    assert known_to_cuda(maker.frame(TINY))
    assert known_to_cuda(dummy_model("tiny", torch.device(DEVICE), torch.float32, 64).tensors)
    other: list[dict[str, object]] = [
        {"head_norms": False}, {"depth_head_norms": False}, {"qkv_bias": True}, {"wide_rope": True}, {"one_head": True}, {"ends": 2},
        {"nucleus_first": True}, {"window": 3}, {"text": "code"}, {"text": "none"}, {"scale": 0.5}, {"codebooks": 1},
    ]  # fmt: skip
    for change in other:
        assert not known_to_cuda(maker.frame(dataclasses.replace(TINY, **change))), change
