"""The codec's Triton kernels against their twins: on a GPU, or small, with TRITON_INTERPRET=1, on a CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from kernels import codec_launch, codec_ops
from kernels.codec_launch import Shape, Tile, split, tile_for

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
    ),
]
#: With a GPU the published widths at useful lengths; the interpreter takes seconds for a tile.
STEPS = 75 if INTERPRETED else 1000
UNIT_WIDTHS = (48, 96) if INTERPRETED else (48, 96, 192)
CONV_SHAPES = (
    ((64, 48, 7, 9), (64, 64, 1, 1), (96, 144, 2, 1))
    if INTERPRETED
    else ((1024, 1536, 7, 1), (768, 768, 7, 9), (384, 384, 1, 1), (384, 768, 2, 1))
)
TMA = (
    (False, True)
    if INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9)
    else (False,)
)


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))).to(
        DEVICE
    )


def snakes(channels: int, seed: int) -> tuple[Tensor, Tensor]:
    return codec_ops.snake_parameters(
        rand(channels, seed=seed, scale=0.3), rand(channels, seed=seed + 1, scale=0.3)
    )


def compare(
    run: Callable[[list[Tensor], Tensor, Tensor], None],
    twin: Callable[[list[Tensor], Tensor, Tensor], None],
    inputs: list[Tensor],
    out: Tensor,
) -> None:
    """The kernel's error against float32 may be half as large again as the twin's in bfloat16."""
    exact, rounded, measured = (
        [torch.full_like(out, math.nan, dtype=d) for _ in range(2)]
        for d in (torch.float32, out.dtype, out.dtype)
    )
    twin([value.float() for value in inputs], *exact)
    twin(inputs, *rounded)
    run(inputs, *measured)
    for wanted, low, got in zip(exact, rounded, measured):
        assert torch.isfinite(got).all()
        yardstick = float((low.float() - wanted).square().mean().sqrt())
        error = float((got.float() - wanted).square().mean().sqrt())
        # The interpreter cuts bfloat16 off where the hardware rounds.
        assert error <= (3.0 if INTERPRETED else 1.5) * yardstick, (
            f"rms error {error:.2e}, the twin's own {yardstick:.2e}"
        )


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(("channels", "columns", "taps", "dilation"), CONV_SHAPES)
def test_conv(channels: int, columns: int, taps: int, dilation: int, history: bool, tma: bool) -> None:
    lead = (taps - 1) * dilation + 3 if history else 0
    a, weight = (
        rand(2, lead + STEPS, channels).bfloat16(),
        (rand(taps * channels, columns) / math.sqrt(taps * channels)).bfloat16(),
    )
    bias, after, residual = (
        rand(columns, seed=1),
        snakes(columns, 2),
        rand(2, STEPS, columns, seed=4).bfloat16(),
    )
    tile = Tile(64, 64, 32, 2, 4, tma)

    def run(inputs: list[Tensor], raw: Tensor, active: Tensor) -> None:
        codec_launch.conv(
            inputs[0], lead, inputs[1], bias, taps, dilation, inputs[2], raw, active, 0, *after, tile=tile
        )

    def twin(inputs: list[Tensor], raw: Tensor, active: Tensor) -> None:
        codec_ops.codec_active_conv(
            inputs[0], lead, inputs[1], bias, taps, dilation, inputs[2], raw, active, 0, *after
        )

    compare(run, twin, [a, weight, residual], residual)


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("dilation", [1, 9])
@pytest.mark.parametrize("channels", UNIT_WIDTHS)
def test_unit(channels: int, dilation: int, history: bool, tma: bool) -> None:
    taps = 7
    lead = (taps - 1) * dilation if history else 0
    inner, after = snakes(channels, 1), snakes(channels, 3)
    x, a = rand(2, STEPS, channels).bfloat16(), rand(2, lead + STEPS, channels, seed=5).bfloat16()
    weights = [
        (rand(taps * channels, channels) / math.sqrt(taps * channels)).bfloat16(),
        (rand(channels, channels) / math.sqrt(channels)).bfloat16(),
    ]
    bias1, bias2 = rand(channels, seed=7), rand(channels, seed=8)
    tile = Tile(64, 0, next(depth for depth in (64, 32, 16) if channels % depth == 0), 2, 4, tma)

    def arguments(inputs: list[Tensor], raw: Tensor, active: Tensor) -> tuple[object, ...]:
        return (
            inputs[0],
            lead,
            inputs[1],
            inputs[2],
            bias1,
            *inner,
            inputs[3],
            bias2,
            dilation,
            raw,
            active,
            0,
            *after,
        )

    compare(
        lambda inputs, raw, active: codec_launch.unit(*arguments(inputs, raw, active), tile=tile),  # type: ignore[arg-type]
        lambda inputs, raw, active: codec_ops.codec_active_unit(*arguments(inputs, raw, active)),  # type: ignore[arg-type]
        [a, x, *weights],
        x,
    )


def test_the_result_starts_after_its_history_and_touches_nothing_else() -> None:
    a, weight, bias = rand(2, 70, 64).bfloat16(), (rand(64, 64) / 8).bfloat16(), rand(64)
    after = snakes(64, 1)
    active = torch.full((2, 5 + 70, 64), 7.0, dtype=torch.bfloat16, device=DEVICE)
    codec_launch.conv(
        a, 0, weight, bias, 1, 1, None, None, active, 5 * 64, *after, tile=Tile(64, 64, 32, 2, 4, False)
    )
    wanted = torch.empty_like(active)
    codec_ops.codec_active_conv(a, 0, weight, bias, 1, 1, None, None, wanted, 5 * 64, *after)
    assert (active[:, :5] == 7.0).all()
    torch.testing.assert_close(active[:, 5:], wanted[:, 5:], atol=0.05, rtol=0.02)


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize("unit", [False, True])
def test_centred_rows_end(unit: bool, tma: bool) -> None:
    """Margins on both sides of the steps, rows that end early: one inside a tile, one before any."""
    channels, depth, dilation, margin, steps = (48, 16, 1, 3, 80) if INTERPRETED else (96, 32, 9, 3, 1000)
    inner, after = snakes(channels, 1), snakes(channels, 3)
    x, a = (
        rand(3, steps, channels).bfloat16(),
        torch.zeros(3, 6 * dilation + steps, channels, dtype=torch.bfloat16, device=DEVICE),
    )
    a[:, 3 * dilation : 3 * dilation + steps] = rand(3, steps, channels, seed=5).bfloat16()
    weight = (rand(7 * channels, channels) / math.sqrt(7 * channels)).bfloat16()
    second = (rand(channels, channels) / math.sqrt(channels)).bfloat16()
    bias, ends = rand(channels, seed=7), torch.tensor([steps, 70, 0], dtype=torch.int32, device=DEVICE)
    found: list[Tensor] = []
    for kernel in (True, False):
        raw, active = (
            torch.empty_like(x),
            torch.full((3, 2 * margin + steps, channels), 7.0, dtype=torch.bfloat16, device=DEVICE),
        )
        sink = (raw, active, margin * channels, *after)
        if unit:
            arguments = (a, 6 * dilation, x, weight, bias, *inner, second, bias, dilation, *sink)
            if kernel:
                codec_launch.unit(*arguments, tile=Tile(64, 0, depth, 2, 4, tma), ends=ends)
            else:
                codec_ops.codec_active_unit(*arguments, ends=ends)
        elif kernel:
            codec_launch.conv(
                a,
                6 * dilation,
                weight,
                bias,
                7,
                dilation,
                x,
                *sink,
                tile=Tile(64, 64, depth, 2, 4, tma),
                ends=ends,
            )
        else:
            codec_ops.codec_active_conv(a, 6 * dilation, weight, bias, 7, dilation, x, *sink, ends=ends)
        found.append(active)
    torch.testing.assert_close(found[0], found[1], atol=0.1, rtol=0.05)
    assert (found[0][:, :margin] == 7.0).all()
    assert (found[0][:, margin + steps :] == 7.0).all()
    for row, end in enumerate(ends.tolist()):
        assert not found[0][row, margin + end : margin + steps].any()
        assert found[0][row, margin : margin + end].abs().amax(dim=1).all()


@pytest.mark.parametrize("tma", TMA)
@pytest.mark.parametrize("unit", [False, True])
def test_open_ends_change_no_bit_in_front_of_them_and_leave_the_tiles_behind_them(
    unit: bool, tma: bool
) -> None:
    """Rows that end inside a tile, between two, with the last and before any; what lies behind an end is
    no number."""
    channels, depth, dilation, steps = (48, 16, 3, 200) if INTERPRETED else (96, 32, 9, 1000)
    inner, after = snakes(channels, 1), snakes(channels, 3)
    weight = (rand(7 * channels, channels) / math.sqrt(7 * channels)).bfloat16()
    second, bias = (rand(channels, channels) / math.sqrt(channels)).bfloat16(), rand(channels, seed=7)
    ends = torch.tensor([steps, 65, 128, 0], dtype=torch.int32, device=DEVICE)
    found: list[list[Tensor]] = []
    for given in (None, ends):
        x, a = rand(4, steps, channels).bfloat16(), rand(4, steps, channels, seed=5).bfloat16()
        for row, end in enumerate(() if given is None else given.tolist()):
            x[row, end:] = a[row, end:] = math.nan
        made = [torch.full_like(x, 7.0) for _ in range(2)]
        sink = (*made, 0, *after)
        if unit:
            arguments = (a, 0, x, weight, bias, *inner, second, bias, dilation, *sink)
            codec_launch.unit(*arguments, tile=Tile(64, 0, depth, 2, 4, tma), ends=given, open_ends=True)
        else:
            codec_launch.conv(
                a,
                0,
                weight,
                bias,
                7,
                dilation,
                x,
                *sink,
                tile=Tile(64, 64, depth, 2, 4, tma),
                ends=given,
                open_ends=True,
            )
        found.append(made)
    for whole, ended in zip(*found):
        for row, end in enumerate(ends.tolist()):
            assert torch.equal(ended[row, :end], whole[row, :end])
            assert (ended[row, triton.cdiv(end, 64) * 64 :] == 7.0).all()


def test_a_head_reads_nothing_behind_an_open_end() -> None:
    steps = 640 if INTERPRETED else 3072
    a, weight, bias = rand(4, steps, 96).bfloat16(), (rand(7, 96) / 20).bfloat16(), rand(1, scale=0.1)
    ends = torch.tensor([steps, 0, 128, 517], dtype=torch.int32, device=DEVICE)
    whole = codec_launch.head(a, 0, weight, bias)
    for row, end in enumerate(ends.tolist()):
        a[row, end:] = math.nan
    ended = codec_launch.head(a, 0, weight, bias, ends=ends)
    for row, end in enumerate(ends.tolist()):
        assert torch.equal(ended[row, :end], whole[row, :end])


def test_head() -> None:
    a, weight, bias = rand(2, STEPS, 96).bfloat16(), (rand(7, 96) / 20).bfloat16(), rand(1, scale=0.1)
    torch.testing.assert_close(
        codec_launch.head(a, 0, weight, bias),
        codec_ops.codec_head(a.float(), 0, weight.float(), bias),
        atol=1e-4,
        rtol=1e-4,
    )
    torch.testing.assert_close(
        codec_launch.head(a, 6, weight, bias),
        codec_ops.codec_head(a.float(), 6, weight.float(), bias),
        atol=1e-4,
        rtol=1e-4,
    )


def test_a_head_hides_no_value_that_is_no_number() -> None:
    """The stage refuses such audio with `synth.nan`; clamped it would be a click or silence that nobody
    hears of."""
    a, weight, bias = rand(2, 75, 96).bfloat16(), (rand(7, 96) / 20).bfloat16(), rand(1, scale=0.1)
    a[1, 40, 3] = math.nan
    lost = codec_launch.head(a, 0, weight, bias).isnan()
    assert lost[1, 40:47].all()
    assert int(lost.sum()) == 7


@pytest.mark.skipif(INTERPRETED, reason="takes minutes in the interpreter; the tiles are chosen for GPUs")
@pytest.mark.parametrize("steps", [4, 100, 700])
@pytest.mark.parametrize(
    "shape",
    list(codec_launch.TILES),
    ids=lambda shape: f"{shape.kind}-{shape.channels}-{shape.columns}-{shape.taps}",
)
def test_chosen_tiles(shape: Shape, steps: int) -> None:
    """Each tile in force, as cut for short and long inputs: ptxas has miscompiled one for its shape alone."""
    tile = codec_launch.tile_for(shape, steps, tma=TMA[-1])
    assert tile is not None
    after, inner, bias = snakes(shape.columns, 2), snakes(shape.columns, 4), rand(shape.columns, seed=1)
    a, residual = rand(2, steps, shape.channels).bfloat16(), rand(2, steps, shape.columns, seed=4).bfloat16()
    deep = shape.taps * shape.channels
    weights = [(rand(rows, shape.columns) / math.sqrt(rows)).bfloat16() for rows in (deep, shape.columns)]

    def arguments(inputs: list[Tensor], raw: Tensor, active: Tensor) -> tuple[object, ...]:
        if shape.kind == "unit":
            return (
                inputs[0],
                0,
                inputs[1],
                inputs[2],
                bias,
                *inner,
                inputs[3],
                bias,
                3,
                raw,
                active,
                0,
                *after,
            )
        return inputs[0], 0, inputs[2], bias, shape.taps, 3, inputs[1], raw, active, 0, *after

    kernel, oracle = (
        (codec_launch.unit, codec_ops.codec_active_unit)
        if shape.kind == "unit"
        else (codec_launch.conv, codec_ops.codec_active_conv)
    )
    compare(
        lambda inputs, raw, active: kernel(*arguments(inputs, raw, active), tile=tile),  # type: ignore[arg-type]
        lambda inputs, raw, active: oracle(*arguments(inputs, raw, active)),  # type: ignore[arg-type]
        [a, residual, *weights],
        residual,
    )


def test_split() -> None:
    assert [split(channels) for channels in (48, 96, 192)] == [(32, 16), (64, 32), (128, 64)]
    for channels in (24, 64, 112):
        assert tile_for(Shape("unit", channels, channels, 7), 512, tma=True) is None


@pytest.mark.skipif(INTERPRETED, reason="takes minutes in the interpreter")
def test_reproducible_audio_is_the_same_bits_in_any_company() -> None:
    from benchmarks.checkpoint import PUBLISHED_CODEC, dummy_decoder

    decoder = dummy_decoder(PUBLISHED_CODEC, torch.device("cuda"), torch.bfloat16, reproducible=True)
    draw = torch.Generator().manual_seed(0)
    codes = [
        torch.randint(2048, (frames, 16), generator=draw)
        for frames in (40, 37, 33, 90, 95, 96, 600, 5, 1, 38, 39, 36, 35, 34)
    ]
    together, backwards = decoder.decode(codes), decoder.decode(codes[::-1])[::-1]
    for at, item in enumerate(codes):
        assert torch.isfinite(together[at]).all()
        assert torch.equal(together[at], backwards[at])
        assert torch.equal(together[at], decoder.decode([item])[0])


@pytest.fixture
def unwritten_is_no_number() -> Iterator[None]:
    """Memory that nothing was written to is NaN, which PyTorch has for its deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_is_no_number")
@pytest.mark.skipif(INTERPRETED, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("fused_front", [False, True])
def test_a_mixed_batch_gives_each_what_it_decodes_to_alone(fused_front: bool) -> None:
    """The same bits as rows without ends, and as close to float32 as each alone, which may meet other
    kernels."""
    from benchmarks.checkpoint import PUBLISHED_CODEC, dummy_decoder

    cuda = torch.device("cuda")
    decoder = dummy_decoder(PUBLISHED_CODEC, cuda, torch.bfloat16, fused_front=fused_front)
    draw, frames = torch.Generator().manual_seed(0), (128, 40, 121, 97, 1, 64, 128, 13)
    codes = [torch.randint(2048, (count, 16), generator=draw) for count in frames]
    batch = torch.stack([torch.nn.functional.pad(item, (0, 0, 0, 128 - len(item))) for item in codes]).to(
        cuda
    )
    lengths = [count * decoder.samples_per_frame for count in frames]
    with torch.inference_mode():
        whole, ended = decoder.run(batch, None), decoder.run(batch, None, lengths)
    exact = dummy_decoder(PUBLISHED_CODEC, cuda, torch.float32, False)
    for row, (wave, item) in enumerate(zip(decoder.decode(codes), codes)):
        assert torch.equal(ended[row, : lengths[row]], whole[row, : lengths[row]])
        (alone,), (wanted,) = decoder.decode([item]), exact.decode([item])
        assert torch.isfinite(wave).all()
        error, yardstick = (float((one - wanted).square().mean()) ** 0.5 for one in (wave, alone))
        assert error <= 1.5 * yardstick
