"""The fused convolution stack does the arithmetic of the plain one: whole, padded, in chunks, from warm states (on the ops' twins)."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.codec_ops import codec_residual_unit, pack_upsample, snake_beta, snake_parameters
from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.codec_config import CodecConfig

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base" / "speech_tokenizer"
CLOSE = 3e-5
ops = torch.ops.nightjar


@lru_cache(maxsize=2)
def decoder(fused: bool) -> CodecDecoder:
    torch.set_num_threads(1)
    with Checkpoint.open(FOLDER) as source:
        return CodecDecoder(CodecConfig.load(FOLDER).decoder, source, fused=fused)


def codes(frames: int, seed: int) -> Tensor:
    return torch.randint(256, (frames, 16), generator=torch.Generator().manual_seed(seed))


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


@pytest.mark.parametrize("widest", [0, 1000])
def test_whole_utterances_equal_the_plain_stack(monkeypatch: pytest.MonkeyPatch, widest: int) -> None:
    """With each unit as one kernel, and with one kernel for each of its convolutions."""
    monkeypatch.setattr("pipelines.codec.fused.WIDEST_UNIT", widest)
    with Checkpoint.open(FOLDER) as source:
        fused = CodecDecoder(CodecConfig.load(FOLDER).decoder, source, fused=True)
    items = [codes(frames, frames) for frames in (1, 7, 30)]
    for wave, wanted in zip(fused.decode(items), decoder(False).decode(items)):
        torch.testing.assert_close(wave, wanted, atol=CLOSE, rtol=0)


def test_chunks_and_warm_states_equal_the_whole() -> None:
    stream = codes(30, 1)
    (whole,) = decoder(False).decode([stream])
    state, waves = decoder(True).new_state(), []
    for part in stream.split([1, 2, 9, 1, 5, 12]):
        waves.extend(decoder(True).decode_chunk([state], [part]))
    torch.testing.assert_close(torch.cat(waves), whole, atol=CLOSE, rtol=0)
    warm = decoder(True).new_state()
    decoder(True).decode_chunk([warm], [stream[:11]])
    rest = decoder(True).decode([stream[11:]], [warm])[0]
    torch.testing.assert_close(rest, whole[11 * decoder(True).samples_per_frame :], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("lead", [0, 18, 25])
def test_active_unit_is_the_residual_unit_after_its_snake(lead: int) -> None:
    channels, steps, dilation, ahead = 6, 21, 3, 4
    snakes = [snake_parameters(rand(channels, seed=i, scale=0.3), rand(channels, seed=i + 1, scale=0.3)) for i in range(3)]
    weight1, weight2 = rand(channels, channels, 7) / math.sqrt(7 * channels), rand(channels, channels) / math.sqrt(channels)
    bias1, bias2 = rand(channels, seed=3), rand(channels, seed=4)
    x, history = rand(2, steps, channels), rand(2, lead, channels, seed=9)
    wanted = codec_residual_unit(
        x, history[:, lead - 18 :] if lead else None, *snakes[0], weight1, bias1, *snakes[1], weight2, bias2, dilation
    )
    raw, active = torch.empty_like(x), torch.full((2, ahead + steps, channels), 7.0)
    a = snake_beta(torch.cat((history, x), dim=1), *snakes[0])
    packed = weight1.permute(2, 1, 0).reshape(-1, channels)
    ops.codec_active_unit(a, lead, x, packed, bias1, *snakes[1], weight2.T, bias2, dilation, raw, active, ahead * channels, *snakes[2])
    torch.testing.assert_close(raw, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(active[:, ahead:], snake_beta(wanted, *snakes[2]), atol=2e-5, rtol=1e-5)
    assert (active[:, :ahead] == 7.0).all()


def test_active_conv_upsamples() -> None:
    channels_in, channels_out, rate = 6, 3, 4
    first, then = snake_parameters(rand(6), rand(6, seed=1)), snake_parameters(rand(3), rand(3, seed=1))
    weight, bias, x = pack_upsample(rand(channels_in, channels_out, 2 * rate)), rand(channels_out, seed=2), rand(2, 9, channels_in)
    wanted = ops.codec_upsample(x, None, *first, weight, bias, rate)
    raw, active = torch.empty(2, 36, 3), torch.empty(2, 36, 3)
    repeated = [value.repeat(rate) for value in (bias, *then)]
    ops.codec_active_conv(snake_beta(x, *first), 0, weight, repeated[0], 2, 1, None, raw, active, 0, *repeated[1:])
    torch.testing.assert_close(raw, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(active, snake_beta(wanted, *then), atol=2e-5, rtol=1e-5)
