"""The CUDA C++ kernels, run on a CPU by the emulator, against their PyTorch twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import lm_cuda
from kernels.layers import rms_norm, rope, rope_table, swiglu
from tests.support.attention_layers import attention_layer
from tests.support.cuda_emulated import KernelError, choose_order, guarded
from tests.support.fake_gpus import FakeGpus

BF16, EPS = torch.bfloat16, 1e-6
SEEDS = range(4)


@pytest.fixture
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses the order in which the threads of the next launches run."""
    monkeypatch.setattr(lm_cuda, "WIDE_FROM", 128)
    return choose_order(monkeypatch)


def normal(*shape: int, std: float = 1.0, mean: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return guarded((torch.randn(shape, generator=generator) * std + mean).to(BF16))


def unwritten(*shape: int) -> Tensor:
    return guarded(torch.full(shape, float("nan"), dtype=BF16))


def error(found: Tensor, truth: Tensor) -> float:
    """Relative L2 error; NaN anywhere gives NaN."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def product_twin(
    x: Tensor, weight: Tensor, norm: Tensor | None, extra: Tensor | None, epilogue: int
) -> Tensor:
    """`lm_cuda.skinny` in PyTorch, with every step in the type of its tensors."""
    if norm is not None:
        x = (
            rms_norm(x, norm, EPS)
            if x.dtype == BF16
            else norm * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        )
    y = functional.linear(x, weight)
    if epilogue == lm_cuda.SWIGLU:
        return swiglu(y)
    return y if extra is None else y + extra


class Product:
    """A skinny product of 40 rows and as few outputs as it has, and parts of it."""

    def __init__(self, inner: int, normed: bool, epilogue: int, width: int) -> None:
        self.epilogue = epilogue
        self.x = normal(40, inner)
        self.weight = normal(2 * width if epilogue == lm_cuda.SWIGLU else width, inner, std=inner**-0.5)
        self.norm = normal(inner, std=0.1, mean=1.0) if normed else None
        self.extra = {lm_cuda.RESIDUAL: normal(40, width, seed=1), lm_cuda.BIAS: normal(width, seed=1)}.get(
            epilogue
        )
        self.width = width

    def made(self, rows: slice, normed: Tensor | None = None, **options: bool | Tensor) -> Tensor:
        """Rows of the product, [rows, width]; a residual is added in place, as in a frame."""
        x, extra = guarded(self.x[rows]), self.extra
        if self.epilogue == lm_cuda.RESIDUAL and extra is not None:
            extra = guarded(extra[rows])
        y = (
            extra
            if self.epilogue == lm_cuda.RESIDUAL and extra is not None
            else unwritten(len(x), self.width)
        )
        return lm_cuda.skinny(
            x,
            self.weight,
            y,
            norm=self.norm,
            eps=EPS,
            epilogue=self.epilogue,
            extra=extra,
            normed=normed,
            **options,
        )  # pyright: ignore[reportArgumentType]

    def truth(self, dtype: torch.dtype) -> Tensor:
        tensors = [None if t is None else t.to(dtype) for t in (self.x, self.weight, self.norm, self.extra)]
        x, weight, norm, extra = tensors
        assert x is not None and weight is not None  # noqa: PT018
        return product_twin(x, weight, norm, extra, self.epilogue)


#: One width for each shape, two blocks or more; the last one takes the partition for wide outputs.
PRODUCTS = [(*shape, 96 if shape[2] == lm_cuda.SWIGLU else 64) for shape in lm_cuda.TILE_CONFIGS] + [
    (1024, True, lm_cuda.PLAIN, 128)
]


@pytest.mark.parametrize(("inner", "normed", "epilogue", "width"), PRODUCTS)
def test_every_skinny_product_equals_its_twin(
    inner: int, normed: bool, epilogue: int, width: int, emulated: Callable[[int], None]
) -> None:
    product = Product(inner, normed, epilogue, width)
    exact = product.truth(torch.float64)
    allowed = 2 * error(product.truth(BF16), exact)
    kept = unwritten(40, inner) if normed else None
    ahead = normal(3, 1000)
    whole = product.made(slice(0, 40), kept, ahead=ahead)
    few = product.made(slice(0, 8), ahead=ahead, late=False)
    assert error(whole, exact) <= allowed
    assert error(few, exact[:8]) <= allowed
    if kept is not None and product.norm is not None:
        assert error(kept, rms_norm(product.x, product.norm, EPS)) < 1e-3, (
            "a few roundings may fall to the other side"
        )
    for rows in range(1, 33):  # a row's bits depend on the number of rows only by whether it is more than 8
        emulated(rows)
        assert torch.equal(product.made(slice(0, rows)), few[:rows] if rows <= 8 else whole[:rows]), rows
    for rows in (slice(7, 8), slice(31, 40)):
        part = product.made(rows)
        assert torch.equal(part, product.made(rows)) and error(part, exact[rows]) <= 1.5 * allowed  # noqa: PT018
    assert torch.equal(product.made(slice(31, 40)), whole[31:])


def test_a_product_takes_rows_of_a_wider_tensor(emulated: Callable[[int], None]) -> None:
    product = Product(1024, True, lm_cuda.PLAIN, 64)
    wide = normal(40, 2048)
    wide[:, :1024] = product.x
    y = unwritten(40, 96)
    lm_cuda.skinny(wide[:5, :1024], product.weight, y[:5, 16:80], norm=product.norm, eps=EPS)
    assert torch.equal(y[:5, 16:80], product.made(slice(0, 5)))
    assert y[5:].isnan().all() and y[:, :16].isnan().all() and y[:, 80:].isnan().all()  # noqa: PT018


def test_what_lies_outside_of_a_tensor_is_never_touched(emulated: Callable[[int], None]) -> None:
    product = Product(1024, True, lm_cuda.PLAIN, 64)
    product.weight = guarded(product.weight[:63])
    with pytest.raises(KernelError, match="outside of a tensor"):
        product.made(slice(0, 1))


class Attention:
    """Nine frames' positions of the predictor for some rows, as the kernel and as its twin see them."""

    def __init__(self, rows: int, kv_heads: int) -> None:
        self.rows, self.kv_heads = rows, kv_heads
        self.q_norm, self.k_norm = normal(128, std=0.1, mean=1.0), normal(128, std=0.1, mean=1.0, seed=1)
        self.table = guarded(rope_table(16, 128, 1e6, BF16, "cpu"))
        self.qkv = [normal(rows, 4 * kv_heads * 128, std=2.0, seed=seed) for seed in range(16)]

    def heads(self, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a position, [rows, heads, 128], with the roundings of the reference."""
        q, k, v = (
            self.qkv[position]
            .view(self.rows, -1, 128)
            .split((2 * self.kv_heads, self.kv_heads, self.kv_heads), 1)
        )
        angles = self.table[position : position + 1].expand(self.rows, -1)
        return rope(rms_norm(q, self.q_norm, EPS), angles), rope(rms_norm(k, self.k_norm, EPS), angles), v

    def truth(self, position: int) -> Tensor:
        """The attention of a position in float64, [rows, heads * 128]."""
        past = [self.heads(at) for at in range(position + 1)]
        keys, values = (torch.stack([one[i] for one in past], 2).double() for i in (1, 2))
        query = past[-1][0].double()[:, :, None]
        return functional.scaled_dot_product_attention(
            query, keys, values, scale=128**-0.5, enable_gqa=True
        ).flatten(1)

    def run(self, positions: range, rows: slice) -> tuple[list[Tensor], Tensor]:
        """What the kernel makes of each position, [rows, heads * 128], and the cache [2, rows, kv_heads,
        16, 128] afterwards."""
        count = len(range(self.rows)[rows])
        cache = unwritten(2, count, self.kv_heads, 16, 128)
        for at in range(positions.start):
            cache[0, :, :, at], cache[1, :, :, at] = self.heads(at)[1][rows], self.heads(at)[2][rows]
        made = []
        for position in positions:
            made.append(
                lm_cuda.predictor_attention(
                    guarded(self.qkv[position][rows]),
                    *attention_layer((self.q_norm, self.k_norm), self.table),
                    cache[0],
                    cache[1],
                    position,
                    unwritten(count, 2 * self.kv_heads * 128),
                )
            )
        return made, cache


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_the_predictors_attention_equals_its_twin(kv_heads: int, emulated: Callable[[int], None]) -> None:
    attention = Attention(5, kv_heads)
    made, cache = attention.run(range(1, 16), slice(0, 5))
    for position, out in enumerate(made, start=1):
        assert error(out, attention.truth(position)) < 4e-3, position
        _, keys, values = attention.heads(position)
        assert error(cache[0, :, :, position], keys) < 1e-3
        assert torch.equal(cache[1, :, :, position], values)
    for seed in SEEDS:
        emulated(seed)
        again, _ = attention.run(range(1, 16), slice(2, 3))
        assert all(torch.equal(one, out[2:3]) for one, out in zip(again, made)), (
            "a row's bits depend on its neighbours or on an order"
        )


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_rows_in_rounds_equal_the_twin_and_those_at_once(
    kv_heads: int, emulated: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = Attention(10, kv_heads)
    at_once, cache = attention.run(range(1, 16), slice(0, 10))
    monkeypatch.setattr(
        lm_cuda, "ATTENTION_BLOCKS", kv_heads
    )  # one block for each head: three rounds of four rows, the last one of two
    for seed in SEEDS:
        emulated(seed)
        made, kept = attention.run(range(1, 16), slice(0, 10))
        for position, (one, other) in enumerate(zip(made, at_once), start=1):
            assert torch.equal(one, other), position
            assert error(one, attention.truth(position)) < 4e-3, position
        assert torch.equal(kept, cache)
