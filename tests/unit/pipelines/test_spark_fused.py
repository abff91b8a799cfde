"""BiCodec's wave generator on fused ops does the arithmetic of the plain one (on the ops' twins)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from kernels.codec_ops import snake_beta
from pipelines.spark_tts.bicodec import BiCodec, BiCodecDecoder, Voice, load_bicodec
from pipelines.spark_tts.config import SparkConfig, WaveConfig
from pipelines.spark_tts.wave_generator import FusedWave, WaveGenerator, prepared
from tests.support.vllm_kit import checkpoint

CPU = torch.device("cpu")
CLOSE = 1e-5
LENGTHS = (1, 2, 7, 30, 64, 64)
ops = torch.ops.nightjar


@lru_cache(maxsize=4)
def codec(fused: bool, dtype: torch.dtype = torch.float32) -> BiCodec:
    torch.set_num_threads(1)
    return load_bicodec(SparkConfig.from_folder(checkpoint()), CPU, dtype, fused)[1]


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def tokens(length: int, seed: int) -> tuple[Tensor, Tensor]:
    sizes, dice = codec(False).config, torch.Generator().manual_seed(seed)
    semantic = torch.randint(sizes.codebook_size, (length,), generator=dice)
    return semantic, torch.randint(sizes.global_codes, (sizes.speaker.token_num,), generator=dice)


def generator(kernel: int, rate: int) -> WaveGenerator:
    """A generator of one block with random weights."""
    wave = WaveGenerator(WaveConfig(6, 16, (rate,), (kernel,))).requires_grad_(False)
    for index, tensor in enumerate(wave.parameters()):
        tensor.copy_(rand(*tensor.shape, seed=index) / max(1, tensor[0].numel()) ** 0.5)
    return wave


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nothing was written to reads as not a number."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lengths", [(40,), (30, 30, 30), LENGTHS])
@pytest.mark.parametrize("widest", [0, 1000])
def test_utterances_equal_the_plain_generator(
    monkeypatch: pytest.MonkeyPatch, widest: int, lengths: tuple[int, ...]
) -> None:
    """With each residual unit as one kernel, and with one kernel for each of its convolutions."""
    monkeypatch.setattr("pipelines.codec.fused.WIDEST_UNIT", widest)
    fused = load_bicodec(SparkConfig.from_folder(checkpoint()), CPU, fused=True)[1]
    assert isinstance(fused.wave, FusedWave)
    semantic, voices = zip(*(tokens(length, seed) for seed, length in enumerate(lengths)))
    with poisoned():
        made = fused.decode(semantic, voices, pad_to=0 if len(set(lengths)) == 1 else 96)
    for wave, wanted in zip(made, codec(False).decode(semantic, voices)):
        torch.testing.assert_close(wave, wanted, atol=CLOSE, rtol=0)


def test_rows_of_a_mixed_batch_equal_themselves_alone() -> None:
    rows = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    together = codec(True).decode([row for row, _ in rows], [voice for _, voice in rows])
    for (semantic, voice), wave in zip(rows, together):
        torch.testing.assert_close(wave, codec(True).decode([semantic], [voice])[0], atol=CLOSE, rtol=0)


@pytest.mark.parametrize(("kernel", "rate"), [(16, 8), (11, 5), (8, 4), (4, 2), (2, 2), (6, 2), (3, 1)])
def test_any_upsampling_that_sees_neighbours_only(kernel: int, rate: int) -> None:
    """The published kernels and rates, and the least and the most overlap that is possible."""
    wave, x = generator(kernel, rate), rand(3, 6, 11)
    mask = (torch.arange(11) < torch.tensor([11, 4, 1])[:, None])[:, None].float()
    garbage = torch.where(mask.bool(), x, 1e4)
    with poisoned():
        made = FusedWave(wave, torch.float32)
        whole, mixed = made(x), made(garbage, mask)
    torch.testing.assert_close(whole, wave(x), atol=CLOSE, rtol=0)
    torch.testing.assert_close(
        mixed * mask[:, 0].repeat_interleave(rate, 1),
        wave(x, mask) * mask[:, 0].repeat_interleave(rate, 1),
        atol=CLOSE,
        rtol=0,
    )


def test_more_neighbours_are_refused() -> None:
    wave = generator(8, 2)
    with pytest.raises(ValueError, match="kernel 8 and rate 2"):
        prepared(wave, torch.float32, fused=True)


def test_a_cpu_runs_the_plain_generator_by_default() -> None:
    assert isinstance(prepared(generator(4, 2), torch.bfloat16), WaveGenerator)


@pytest.mark.parametrize("sizes", [[60], [20, 25, 15], [7] * 8 + [4]])
def test_windows_of_streams_equal_the_plain_ones(sizes: list[int]) -> None:
    semantic, voice = tokens(60, 4)
    waves: list[Tensor] = []
    for fused in (False, True):
        decoder, state, parts = BiCodecDecoder(codec(fused)), Voice(voice), []
        for part in [*semantic.split(sizes), semantic[:0]]:
            parts += decoder.decode_chunk([state], [part[:, None]])
        waves.append(torch.cat(parts))
    torch.testing.assert_close(waves[1], waves[0], atol=CLOSE, rtol=0)


def test_bfloat16_rounds_no_worse_than_the_plain_generator() -> None:
    semantic, voices = zip(*(tokens(length, seed) for seed, length in enumerate(LENGTHS)))
    exact = codec(False).decode(semantic, voices)
    errors = []
    for fused in (False, True):
        waves = codec(fused, torch.bfloat16).decode(semantic, voices)
        errors.append(sum(float((one - other).square().sum()) for one, other in zip(waves, exact)) ** 0.5)
    assert 0 < errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("unit", [False, True])
def test_behind_the_end_of_a_row_the_next_input_is_zero(unit: bool) -> None:
    """Around the steps of a centred op everything stays as it was."""
    channels, steps, dilation, margin = 6, 21, 3, 4
    lead = 6 * dilation
    a, x, bias = rand(3, lead + steps, channels), rand(3, steps, channels, seed=1), rand(channels, seed=2)
    weight, second = rand(7 * channels, channels) / 6, rand(channels, channels) / 3
    snake = rand(channels).exp(), rand(channels, seed=1).exp()
    ends = torch.tensor([steps, 5, 0], dtype=torch.int32)

    def run(ends: Tensor | None) -> tuple[Tensor, Tensor]:
        raw, active = torch.empty_like(x), torch.full((3, margin + steps + margin, channels), 7.0)
        after = (raw, active, margin * channels, *snake)
        if unit:
            ops.codec_active_unit(a, lead, x, weight, bias, *snake, second, bias, dilation, *after, ends=ends)
        else:
            ops.codec_active_conv(a, lead, weight, bias, 7, dilation, x, *after, ends=ends)
        return raw, active

    (raw, whole), (_, cut) = run(None), run(ends)
    assert torch.equal(whole[:, margin : margin + steps], snake_beta(raw, *snake))
    for active in (whole, cut):
        assert (active[:, :margin] == 7.0).all()
        assert (active[:, margin + steps :] == 7.0).all()
    for row, end in enumerate(ends.tolist()):
        assert torch.equal(cut[row, margin : margin + end], whole[row, margin : margin + end])
        assert not cut[row, margin + end : margin + steps].any()
