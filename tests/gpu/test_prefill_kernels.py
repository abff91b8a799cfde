"""Padded prefill in fused kernels against its twin and the packed prefill: on a GPU, or small, with
TRITON_INTERPRET=1, on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.checkpoint import dummy_model
from kernels import lm_products, prefill
from kernels.attention import PackedPrompts
from kernels.cuda_driver import available, processors
from kernels.cuda_graphs import GraphPool, capture
from kernels.layers import qk_norm_rope_append, rope_table, swiglu
from kernels.lm_attention import QueryTiles, packed_attention
from kernels.lm_triton import norm_rope_append
from kernels.prefill import prefill_packed, prefill_padded
from pipelines.engine.executor import EngineOptions, FrameModel, PrefillRun
from pipelines.engine.opening import graph_executor
from pipelines.engine.prefill import PaddedPrefills
from pipelines.engine.state import SCRATCH_PAGE, PagedKV
from tests.support.attention_layers import attention_layer
from tests.support.lm_tensors import FISH, SPARK, TINY_FISH, TINY_SPARK, Maker
from tests.support.prefill_twins import attend_packed, padded_twin

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
    ),
]
#: The interpreter takes seconds for what a GPU does at once.
PAGE, SIZE = (8, "tiny") if INTERPRETED else (64, "0b6")
#: Positions of a row of packed prompts: of published sizes so many fill the GPU with tiles of SwiGLU.
TOTAL = 50 if INTERPRETED else 512


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        yield


def rand(*shape: int, seed: int, mean: float = 0.0) -> Tensor:
    return (mean + torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "normed", "wide_rope"),
    [
        (16, 8, 128, True, False),
        (6, 2, 32, True, False),
        (14, 2, 64, False, False),
        (32, 8, 128, True, True),
        (4, 1, 32, False, True),
    ],
)
def test_norm_rope_append(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, normed: bool, wide_rope: bool
) -> None:
    rows, pages = (12, 5) if INTERPRETED else (700, 90)
    qkv = rand(rows, (heads + 2 * kv_heads) * head_dim, seed=1).to(dtype)
    norms = [rand(head_dim, seed=seed, mean=1.0).to(dtype) if normed else None for seed in (2, 3)]
    table = rope_table(1000, head_dim, 1e6, dtype, DEVICE)
    cells = torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(4))[:rows].to(DEVICE)
    positions = torch.arange(rows, device=DEVICE) * 7 % 1000
    found, wanted, exact = (
        [torch.full((pages, kv_heads, PAGE, head_dim), -7.0, device=DEVICE, dtype=kind) for _ in range(2)]
        for kind in (dtype, dtype, torch.float32)
    )
    out = torch.empty(rows, heads, head_dim, device=DEVICE, dtype=dtype)
    where = cells // PAGE, cells % PAGE
    layer, stack = attention_layer(norms, table, wide_rope)
    norm_rope_append(qkv, layer, stack, positions, *found, *where, out)
    plain = qk_norm_rope_append(qkv, layer, stack, table[positions], *wanted, *where)
    widened = [None if norm is None else norm.float() for norm in norms]
    exactly = attention_layer(widened, table)
    wide = qk_norm_rope_append(qkv.float(), *exactly, table[positions].float(), *exact, *where)
    assert torch.equal(found[1], wanted[1])
    for mine, theirs, real in ((out, plain, wide), (found[0], wanted[0], exact[0])):
        if dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
            continue
        # The interpreter cuts bfloat16 off where the hardware rounds.
        assert (
            float((mine.float() - real).norm())
            <= (4.5 if INTERPRETED else 1.2) * float((theirs.float() - real).norm()) + 1e-4
        )


@pytest.mark.parametrize("wide_rope", [True, False])
def test_heads_are_rounded_where_the_twin_rounds_them(wide_rope: bool) -> None:
    """In float16, which the interpreter rounds as hardware does."""
    rows, kv_heads, size = 6, 2, 32
    qkv, table = rand(rows, 6 * size, seed=1).half(), rope_table(64, size, 1e4, torch.float16, DEVICE)
    at, page = torch.arange(rows, device=DEVICE) + 3, torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    caches = [torch.zeros(1, kv_heads, 16, size, device=DEVICE, dtype=torch.float16) for _ in range(6)]
    out = torch.empty(rows, 2, size, device=DEVICE, dtype=torch.float16)
    norm_rope_append(qkv, *attention_layer((None, None), table, wide_rope), at, *caches[:2], page, at, out)
    for wide, held in ((wide_rope, caches[2:4]), (not wide_rope, caches[4:])):
        layer = attention_layer((None, None), table, wide)
        q = qk_norm_rope_append(qkv, *layer, table[at], *held, page, at)
        for mine, theirs in ((out, q), (caches[0][:, :, 3:9], held[0][:, :, 3:9])):
            share = float((mine != theirs).float().mean())
            assert share <= 0.01 if wide == wide_rope else share > 0.05


def model_of(kind: str, dtype: torch.dtype) -> FrameModel:
    """The talker, SparkTTS or Fish, with the same weights in any type."""
    if kind == "talker":
        return dummy_model(SIZE, torch.device(DEVICE), dtype, 1024)
    shape = {"spark": TINY_SPARK if INTERPRETED else SPARK, "fish": TINY_FISH if INTERPRETED else FISH}[kind]
    shape = replace(shape, layers=2, predictor_layers=1, codebooks=min(shape.codebooks, 2))
    return FrameModel(Maker(DEVICE, dtype, seed=5).frame(shape, positions=1024))


def chunks(model: FrameModel, counts: list[int], start: int) -> tuple[PagedKV, Tensor, Tensor, Tensor]:
    """Pages that already hold `start` positions of each run, their table, and padded new positions."""
    hidden, pages = model.tensors.backbone.hidden, (start + max(counts) + PAGE - 1) // PAGE
    kv, state = model.make_kv(len(counts) * pages, PAGE), model.make_state(len(counts), pages, 4)
    state.write_pages(
        [(slot, list(range(1 + slot * pages, 1 + (slot + 1) * pages)), 0) for slot in range(len(counts))]
    )
    if start:
        model.prefill(
            [
                PrefillRun(slot, 0, rand(start, hidden, seed=40 + slot).to(model.dtype))
                for slot in range(len(counts))
            ],
            state,
            kv,
        )
    new = pages * PAGE - start
    return (
        kv,
        state.page_table[: len(counts)],
        rand(len(counts), new, hidden, seed=9).to(model.dtype),
        torch.tensor(counts, device=DEVICE),
    )


def written(model: FrameModel, counts: list[int], start: int, fused: bool) -> Tensor:
    kv, table, rows, sizes = chunks(model, counts, start)
    before = rows.clone()
    if fused:
        prefill_padded(rows, table, sizes, start, model.tensors.backbone, kv.k, kv.v, SCRATCH_PAGE)
    else:
        padded_twin(model, rows, table, sizes, start, kv)
    assert torch.equal(rows, before)
    return torch.stack((kv.k[:, 1:], kv.v[:, 1:])).float()


@pytest.mark.parametrize(
    ("kind", "start"), [("talker", 0), ("talker", 2 * PAGE), ("spark", PAGE), ("fish", PAGE)]
)
def test_fused_prefill_is_the_twins(kind: str, start: int) -> None:
    counts = [PAGE, 3, PAGE + 5]
    exact = model_of(kind, torch.float32)
    wide = written(exact, counts, start, fused=False)
    # Rounding grows from layer to layer of random weights: the whole is compared, not every value.
    assert float((written(exact, counts, start, fused=True) - wide).norm()) <= 1e-3 * float(wide.norm())
    del exact
    narrow = model_of(kind, torch.bfloat16)
    plain, mine = (float((written(narrow, counts, start, fused) - wide).norm()) for fused in (False, True))
    assert mine <= (4.5 if INTERPRETED else 1.5) * plain


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.bfloat16],
    ids=["wide", "half"],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page"),
    [(16, 8, 128, 64), (14, 2, 64, 64), (32, 8, 128, 64), (4, 2, 32, 8), (16, 1, 16, 128)],
)
def test_packed_attention_is_its_twin(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int
) -> None:
    """Runs of no, one and many tokens from any position on, over pages in any order; behind them nothing
    is written."""
    counts, starts = (
        ([5, 0, 40, 1, 9], [0, 0, 3, 2 * page, page + 1])
        if INTERPRETED
        else ([5, 0, 700, 1, 93], [0, 0, 67, 3 * page, 33])
    )
    total, pages = sum(counts) + 9, -(-max(map(sum, zip(counts, starts))) // page)
    table = (
        (torch.randperm(6 * pages, generator=torch.Generator().manual_seed(3)) + 1).view(6, pages).to(DEVICE)
    )
    prompts = PackedPrompts(
        table, *(torch.tensor(each, device=DEVICE) for each in ([3, 0, 1, 5, 2], starts, counts))
    )
    k, v = (rand(6 * pages + 1, kv_heads, page, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    q, out = (
        rand(total, heads, head_dim, seed=4).to(dtype),
        torch.full((total, heads * head_dim), 7.0, device=DEVICE, dtype=dtype),
    )
    packed_attention(q, k, v, prompts, QueryTiles(prompts, total, heads, kv_heads), head_dim**-0.5, out)
    wide = attend_packed(q.float(), k.float(), v.float(), prompts, head_dim**-0.5)[:-9]
    assert bool((out[-9:] == 7).all())
    torch.testing.assert_close(
        out[:-9].float(), wide, rtol=1e-3, atol=1e-5 if dtype == torch.float32 else 1e-2
    )


def packed_chunks(model: FrameModel, prefilled: bool) -> tuple[PagedKV, Tensor, list[PrefillRun]]:
    """Pages that hold what comes before each run, their table, and runs of several lengths from several
    positions on."""
    counts, starts = [5, PAGE + 5, 1, 2 * PAGE], [0, 3, 2 * PAGE + 1, PAGE]
    hidden, pages = model.tensors.backbone.hidden, -(-max(map(sum, zip(counts, starts))) // PAGE)
    kv, state = model.make_kv(len(counts) * pages, PAGE), model.make_state(len(counts), pages, 4)
    state.write_pages(
        [(slot, list(range(1 + slot * pages, 1 + (slot + 1) * pages)), 0) for slot in range(len(counts))]
    )
    before = [
        PrefillRun(slot, 0, rand(start, hidden, seed=40 + slot).to(model.dtype))
        for slot, start in enumerate(starts)
        if start
    ]
    runs = [
        PrefillRun(slot, start, rand(count, hidden, seed=60 + slot).to(model.dtype))
        for slot, (count, start) in enumerate(zip(counts, starts))
    ]
    for each in (before, runs) if prefilled else (before,):
        model.prefill(each, state, kv)
    return kv, state.page_table, runs


def written_packed(model: FrameModel, fused: bool) -> Tensor:
    kv, table, runs = packed_chunks(model, prefilled=not fused)
    if fused:
        behind = TOTAL - sum(len(run.embeddings) for run in runs)
        rows = torch.cat(
            [run.embeddings for run in runs]
            + [rand(behind, model.tensors.backbone.hidden, seed=9).to(model.dtype)]
        )
        before = rows.clone()
        told = [
            [run.slot for run in runs] + [0],
            [run.start for run in runs] + [0],
            [len(run.embeddings) for run in runs] + [0],
        ]
        prompts = PackedPrompts(table, *(torch.tensor(each, device=DEVICE) for each in told))
        prefill_packed(rows, prompts, model.tensors.backbone, kv.k, kv.v, SCRATCH_PAGE)
        assert torch.equal(rows, before)
        assert bool(torch.isfinite(kv.k).all())
    return torch.stack((kv.k[:, 1:], kv.v[:, 1:])).float()


@pytest.mark.parametrize("kind", ["talker", "spark", "fish"])
def test_fused_packed_prefill_is_the_plain_one(kind: str) -> None:
    exact = model_of(kind, torch.float32)
    wide = written_packed(exact, fused=False)
    assert float((written_packed(exact, fused=True) - wide).norm()) <= 1e-3 * float(wide.norm())
    del exact
    if INTERPRETED:
        return  # its products do not know bfloat16
    narrow = model_of(kind, torch.bfloat16)
    plain, mine = (float((written_packed(narrow, fused) - wide).norm()) for fused in (False, True))
    assert mine <= 1.5 * plain


def test_swiglu_of_a_full_row_of_prompts_has_the_wide_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernel itself, which only rows of bfloat16 that fill the device ask for; else its twin,
    without that choice."""
    launches: list[int] = []
    launch = (
        (lambda x, weight, y, **_: y.copy_(swiglu(x @ weight.t()))) if INTERPRETED else lm_products.swiglu
    )

    def counted(x: Tensor, weight: Tensor, y: Tensor, *, pdl: bool = False) -> Tensor:
        launches.append(len(x))
        return launch(x, weight, y, pdl=pdl)

    def error(model: FrameModel, fills: Callable[[int, Tensor], bool]) -> float:
        monkeypatch.setattr(prefill, "_fills", fills)
        return float((written_packed(model, fused=True) - wide).norm())

    fills = (lambda rows, _: rows >= TOTAL) if INTERPRETED else prefill._fills
    monkeypatch.setattr(lm_products, "swiglu", counted)
    if not INTERPRETED and (not available(0, lm_products.WIDE_PRODUCTS) or processors(0) < 132):
        pytest.skip("needs a Hopper GPU of 132 multiprocessors and the kernel's code")
    # The tiny talker has one layer, which stops at its keys.
    kind = "spark" if INTERPRETED else "talker"
    exact = model_of(kind, torch.float32)
    wide, padded = written_packed(exact, fused=False), written(exact, [PAGE] * 8, 0, fused=False)
    if not INTERPRETED:
        written_packed(exact, fused=True)
        assert not launches, "the kernel knows no float32"
    del exact
    model = model_of(kind, torch.float32 if INTERPRETED else torch.bfloat16)
    plain, mine = error(model, lambda *_: False), error(model, fills)
    full = [TOTAL] * (len(model.tensors.backbone.layers) - 1)
    assert full
    assert launches == full
    assert mine <= 1.1 * plain + 1e-3 * float(wide.norm())
    written(model, [PAGE, 3], 0, fused=True)
    assert launches == full, "few rows have cuBLAS"
    plain, mine = (float((written(model, [PAGE] * 8, 0, fused) - padded).norm()) for fused in (False, True))
    assert launches == full + [8 * PAGE] * len(full), "padded prompts of so many rows too"
    assert mine <= 1.5 * plain + 1e-3 * float(padded.norm())


@on_gpu
def test_graphs_of_packed_prompts_equal_the_plain_prefill() -> None:
    """Through the graph executor: prompts of any lengths, and a second chunk of each from any position on."""
    model = dummy_model("tiny", torch.device("cuda"), torch.float32, 2048)
    counts = [5, 64, 9, 65, 200, 300, 1000, 1100] + [20] * 40
    executor = graph_executor(model, EngineOptions(len(counts), 130, 64, 2048))
    plain = model.make_kv(130, 64)
    pages = iter(range(1, 131))
    executor.state.write_pages(
        [(slot, [next(pages) for _ in range(-(-count // 64))], 0) for slot, count in enumerate(counts)]
    )
    prompts = [rand(count, 64, seed=slot) for slot, count in enumerate(counts)]
    for cut in (slice(0, 7), slice(7, None)):
        runs = [
            PrefillRun(slot, cut.start, prompt[cut])
            for slot, prompt in enumerate(prompts)
            if len(prompt) > cut.start
        ]
        model.prefill(runs, executor.state, plain)
        executor.prefill(runs)
    for mine, theirs in ((executor.kv.k, plain.k), (executor.kv.v, plain.v)):
        torch.testing.assert_close(mine[:, 1:], theirs[:, 1:], rtol=1e-3, atol=1e-3)


@on_gpu
def test_graphs_equal_the_packed_prefill() -> None:
    model = dummy_model("tiny", torch.device("cuda"), torch.float32, 2048)
    stack = model.tensors.backbone
    counts = [5, 64, 9, 65, 200, 300, 1000, 1100] + [20] * 40
    packed, replayed = (model.make_kv(130, 64) for _ in range(2))
    state = model.make_state(len(counts), 20, 4)
    pages = iter(range(1, 131))
    state.write_pages(
        [(slot, [next(pages) for _ in range(-(-count // 64))], 0) for slot, count in enumerate(counts)]
    )
    prompts = [rand(count, 64, seed=slot) for slot, count in enumerate(counts)]

    def work(embeddings: Tensor, table: Tensor, sizes: Tensor, start: int) -> None:
        prefill_padded(embeddings, table, sizes, start, stack, replayed.k, replayed.v, SCRATCH_PAGE)

    pool, aside = GraphPool(), torch.cuda.Stream()
    graphs = PaddedPrefills(work, state, replayed, lambda work: capture(work, pool, aside).replay)
    left: list[PrefillRun] = []
    for start in range(0, max(counts), 256):
        runs = [
            PrefillRun(slot, start, prompt[start : start + 256])
            for slot, prompt in enumerate(prompts)
            if len(prompt) > start
        ]
        model.prefill(runs, state, packed)
        left += graphs.run(runs)
    assert [(run.slot, run.start) for run in left] == [(7, 1024)]
    last = state.page_table[7, 16:18]
    for mine, theirs in ((replayed.k, packed.k), (replayed.v, packed.v)):
        mine[:, last] = theirs[:, last]
        torch.testing.assert_close(mine[:, 1:], theirs[:, 1:], rtol=1e-3, atol=1e-3)
