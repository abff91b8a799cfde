"""The kernels in front of the codec's convolutions against their twins: on a GPU, or small, with
TRITON_INTERPRET=1, on a CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from kernels import codec_front_triton, codec_ops
from kernels.codec_ops import GELU, PLAIN, SWIGLU

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
    ),
]
WIDTH = 64 if INTERPRETED else 512


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))).to(
        DEVICE
    )


def amid_no_numbers(values: Tensor) -> Tensor:
    """The same values, in memory that begins and ends with NaN: what a kernel reads beside them shows."""
    held = torch.full((values.numel() + 2 * 4096,), torch.nan, dtype=values.dtype, device=values.device)
    held[4096:-4096] = values.flatten()
    return held[4096:-4096].view(values.shape)


def compare(
    run: Callable[..., Tensor], twin: Callable[..., Tensor], *inputs: Tensor | None, slack: float = 1.5
) -> None:
    """The kernel's error against float32 may be so much larger than the twin's in bfloat16; the
    interpreter cuts bfloat16 off."""
    wanted = twin(*[None if one is None else one.float() for one in inputs])
    low, got = twin(*inputs).float(), run(*inputs).float()
    assert torch.isfinite(got).all()
    yardstick, error = ((one - wanted).square().mean().sqrt() for one in (low, got))
    assert error <= (2.0 if INTERPRETED else 1.0) * slack * yardstick, (
        f"rms error {float(error):.2e}, the twin's own {float(yardstick):.2e}"
    )


@pytest.mark.parametrize("rows", [70] if INTERPRETED else [16, 70, 4096])
@pytest.mark.parametrize(
    ("columns", "activation", "eps", "bias", "residual"),
    [
        (96, PLAIN, 1e-5, True, False),
        (WIDTH, PLAIN, None, True, True),
        (72, SWIGLU, 1e-5, False, False),
        (160, GELU, None, True, False),
    ],
)
def test_product(
    rows: int, columns: int, activation: int, eps: float | None, bias: bool, residual: bool
) -> None:
    wide = 2 * columns if activation == SWIGLU else columns
    x = amid_no_numbers((3 * rand(2, rows // 2, WIDTH)).bfloat16())
    weight = amid_no_numbers((rand(WIDTH, wide) / math.sqrt(WIDTH)).bfloat16())
    shift = amid_no_numbers(rand(columns, seed=1)) if bias else None
    before = amid_no_numbers(rand(2, rows // 2, columns, seed=2).bfloat16()) if residual else None
    compare(
        lambda x, weight, before: codec_front_triton.product(x, weight, shift, before, eps, activation),
        lambda x, weight, before: codec_ops.codec_product(x, weight, shift, before, eps, activation),
        x,
        weight,
        before,
    )


@pytest.mark.parametrize(("columns", "activation"), [(6 * WIDTH, PLAIN), (2 * WIDTH, SWIGLU)])
def test_a_product_is_the_same_bits_every_time(columns: int, activation: int) -> None:
    """Copies of tiles and products run side by side; one that came too early would show in one launch and
    not in another."""
    wide = 2 * columns if activation == SWIGLU else columns
    x, weight = (
        (3 * rand(40 if INTERPRETED else 4096, WIDTH)).bfloat16(),
        (rand(WIDTH, wide) / math.sqrt(WIDTH)).bfloat16(),
    )
    once, *again = (
        codec_front_triton.product(x, weight, None, None, 1e-5, activation)
        for _ in range(2 if INTERPRETED else 20)
    )
    assert all(torch.equal(once, other) for other in again)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(
    ("steps", "window", "decoded"),
    [(70, 24, None), (16, 24, (0, 5, 100)), (40, 24, (23, 7, 30)), (1, 9, (3, 0, 8))],
)
def test_window_attention(
    heads: int, kv_heads: int, steps: int, window: int, decoded: tuple[int, ...] | None
) -> None:
    """Whole utterances; chunks that are shorter and longer than the window, of streams that began a while
    ago, just now, and begin."""
    dim, rows = 32, 3
    qkv = rand(rows, steps, (heads + 2 * kv_heads) * dim).bfloat16()
    angles = rand(1 if decoded is None else rows, steps, dim // 2, seed=3)
    cosine, sine = angles.cos(), angles.sin()
    state, at = rand(rows, 11 + (window - 1) * 2 * kv_heads * dim, seed=4).bfloat16(), slice(11, None)
    positions = None if decoded is None else torch.tensor(decoded, device=DEVICE)
    kept: list[Tensor] = []

    def call(run: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def attend(qkv: Tensor, state: Tensor) -> Tensor:
            if positions is None:
                return run(qkv, None, None, None, cosine, sine, heads, kv_heads, window)
            kept.append(torch.full_like(state, 7.0))
            return run(qkv, state[:, at], kept[-1][:, at], positions, cosine, sine, heads, kv_heads, window)

        return attend

    # The kernel rounds the shares of the keys as well.
    compare(
        call(codec_front_triton.window_attention),
        call(codec_ops.codec_window_attention),
        qkv,
        state,
        slack=2.5,
    )
    if positions is not None:
        exact, rounded, measured = kept
        assert (measured[:, :11] == 7.0).all(), "nothing else is written"
        torch.testing.assert_close(measured.float(), rounded.float(), atol=0.04, rtol=0.02)
        torch.testing.assert_close(measured.float(), exact.float(), atol=0.04, rtol=0.02)


def test_what_a_stream_has_not_decoded_is_not_heard() -> None:
    """The state of a stream that begins may hold anything that is a number."""
    heads, window, dim, steps = 2, 12, 32, 5
    qkv, table = rand(2, steps, 3 * heads * dim).bfloat16(), rand(1, steps, dim // 2, seed=3)
    made = []
    for value in (0.0, 1000.0):
        past = torch.full((2, (window - 1) * 2 * heads * dim), value, dtype=torch.bfloat16, device=DEVICE)
        past[1, -3 * 2 * heads * dim :] = 0.5  # the three steps that the second one decoded
        positions = torch.tensor([0, 3], device=DEVICE)
        for run in (codec_front_triton.window_attention, codec_ops.codec_window_attention):
            made.append(
                run(
                    qkv,
                    past,
                    torch.empty_like(past),
                    positions,
                    table.cos(),
                    table.sin(),
                    heads,
                    heads,
                    window,
                )
            )
    assert torch.equal(made[0], made[2])
    assert torch.equal(made[1], made[3])


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("steps", [1, 21])
def test_depthwise_norm(steps: int, history: bool) -> None:
    channels = 48 if INTERPRETED else 1024
    x, weight, bias = rand(2, steps, channels).bfloat16(), rand(7, channels, seed=1), rand(channels, seed=2)
    before = rand(2, 6 * channels + 5, seed=3).bfloat16()[:, 5:].view(2, 6, channels) if history else None
    compare(
        lambda x, before: codec_front_triton.depthwise_norm(x, before, weight, bias, 1e-6),
        lambda x, before: codec_ops.codec_depthwise_norm(x, before, weight, bias, 1e-6),
        x,
        before,
    )
