"""The fused convolution stack does the arithmetic of the plain one: whole, padded, in chunks, from warm
states (on the ops' twins)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.codec_ops import pack_upsample, snake_beta, snake_parameters
from pipelines.codec.blocks import Past
from pipelines.codec.decoder import PASS_FRAMES
from pipelines.codec.fused import FusedStack
from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.config import CodecConfig
from tests.support.codec_blocks import past_of, rand, residual_unit, upsampling

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base" / "speech_tokenizer"
CLOSE = 3e-5
ops = torch.ops.nightjar


@lru_cache(maxsize=2)
def decoder(fused: bool) -> CodecDecoder:
    torch.set_num_threads(1)
    with Checkpoint(FOLDER) as source:
        return CodecDecoder(CodecConfig.load(FOLDER).decoder, source, fused=fused)


def codes(frames: int, seed: int) -> Tensor:
    return torch.randint(256, (frames, 16), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[0, 1000])
def widest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit as one kernel, and one kernel for each of its convolutions."""
    monkeypatch.setattr("pipelines.codec.fused.WIDEST_UNIT", request.param)


def test_whole_utterances_equal_the_plain_stack(widest: None) -> None:
    with Checkpoint(FOLDER) as source:
        fused = CodecDecoder(CodecConfig.load(FOLDER).decoder, source, fused=True)
    items = [codes(frames, frames) for frames in (1, 7, 30)]
    for wave, wanted in zip(fused.decode(items), decoder(False).decode(items)):
        torch.testing.assert_close(wave, wanted, atol=CLOSE, rtol=0)


class OnGpu(CodecDecoder):
    """A fused decoder that makes its batches on a CPU as it would on a GPU, and keeps the lengths that its
    passes are given."""

    def __init__(self, reproducible: bool = False) -> None:
        self.__dict__.update(decoder(True).__dict__)
        self.alone, self.fixed = False, reproducible
        self.given: list[Sequence[int] | None] = []

    def run(self, codes: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        self.given.append(lengths)
        return super().run(codes, past, lengths)


@pytest.fixture
def unwritten_is_no_number() -> Iterator[None]:
    """Memory that nothing was written to is NaN, which PyTorch has for its deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten_is_no_number")
def test_what_lies_behind_the_end_of_a_row_is_left_out_and_changes_no_sample(widest: None) -> None:
    with Checkpoint(FOLDER) as source:
        fused = CodecDecoder(CodecConfig.load(FOLDER).decoder, source, fused=True)
    frames = (16, 1, 9, 15, 5)
    batch = torch.zeros(len(frames), max(frames), 16, dtype=torch.int64)
    for row, count in enumerate(frames):
        batch[row, :count] = codes(count, count)
    ends = [count * fused.samples_per_frame for count in frames]
    with torch.inference_mode():
        whole, ended = (fused.run(batch, None, lengths) for lengths in (None, ends))
    for row, end in enumerate(ends):
        assert torch.equal(ended[row, :end], whole[row, :end])
        assert ended[row, end:].isnan().all()


@pytest.mark.usefixtures("unwritten_is_no_number")
def test_a_mixed_batch_gives_each_what_it_decodes_to_alone() -> None:
    together, frames = OnGpu(), (30, 7, 12, 1, 25)
    items = [codes(count, count) for count in frames]
    for wave, wanted in zip(together.decode(items), decoder(False).decode(items)):
        torch.testing.assert_close(wave, wanted, atol=CLOSE, rtol=0)
    assert together.given == [[count * together.samples_per_frame for count in sorted(frames, reverse=True)]]


def test_rows_have_no_ends_where_they_start_somewhere_go_on_or_have_to_be_reproducible() -> None:
    items = [codes(count, count) for count in (9, 20)]
    fixed, going_on = OnGpu(reproducible=True), OnGpu()
    fixed.decode(items)
    state = going_on.new_state()
    going_on.decode_chunk([state], [codes(3, 1)])
    going_on.decode(items, [state, state])
    going_on.decode([codes(PASS_FRAMES + 1, 1)])
    assert {*fixed.given, *going_on.given} == {None}


def test_the_ends_of_each_stage_start_where_kernels_load_16_bytes() -> None:
    lengths = [5 * 1920, 1920, 1, 0, 30 * 1920]
    stack = decoder(True)._stack
    assert isinstance(stack, FusedStack)
    ends, each = stack._ends(lengths, torch.device("cpu")), stack._step_samples
    assert len(ends) == len(each)
    assert all(stage is not None for stage in ends)
    assert len({stage.data_ptr() % 16 for stage in ends}) == 1  # type: ignore[union-attr]
    for stage, samples in zip(ends, each):
        assert stage.tolist() == [math.ceil(length / samples) for length in lengths]


def test_batches_that_start_somewhere_are_cut_as_if_padding_cost() -> None:
    lengths = [38 + 5 * index for index in range(30)]
    on_gpu = OnGpu()
    fresh, warm = (len(on_gpu._batches(lengths, [started] * len(lengths))) for started in (False, True))
    assert fresh < warm


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


def test_open_ends_leave_what_lies_behind_them_and_others_are_zero() -> None:
    x, weight, bias = rand(3, 9, 4), rand(3 * 4, 6) / 4, rand(6)
    after, ends = snake_parameters(rand(6), rand(6, seed=1)), torch.tensor([9, 0, 4], dtype=torch.int32)
    found: dict[bool | None, list[Tensor]] = {}
    for open_ends in (None, False, True):
        found[open_ends] = [torch.full((3, 9, 6), 7.0) for _ in range(2)]
        stop = {} if open_ends is None else {"ends": ends, "open_ends": open_ends}
        ops.codec_active_conv(x, 0, weight, bias, 3, 1, None, *found[open_ends], 0, *after, **stop)
    for row, end in enumerate(ends.tolist()):
        for whole, closed, opened in zip(*found.values()):
            assert torch.equal(closed[row, :end], whole[row, :end])
            assert torch.equal(opened[row, :end], whole[row, :end])
            assert (opened[row, end:] == 7.0).all()
        assert not found[False][1][row, end:].any()


@pytest.mark.parametrize("lead", [0, 18, 25])
def test_active_unit_is_the_residual_unit_after_its_snake(lead: int) -> None:
    channels, steps, dilation, ahead = 6, 21, 3, 4
    stored = [(rand(channels, seed=i, scale=0.3), rand(channels, seed=i + 1, scale=0.3)) for i in range(3)]
    snakes = [snake_parameters(*one) for one in stored]
    weight1, weight2 = (
        rand(channels, channels, 7) / math.sqrt(7 * channels),
        rand(channels, channels) / math.sqrt(channels),
    )
    bias1, bias2 = rand(channels, seed=3), rand(channels, seed=4)
    x, history = rand(2, steps, channels), rand(2, lead, channels, seed=9)
    unit = residual_unit((*stored[0], *stored[1]), (weight1, bias1, weight2, bias2), dilation)
    wanted = unit(x, past_of(unit.span, history[:, lead - 18 :]) if lead else None)
    raw, active = torch.empty_like(x), torch.full((2, ahead + steps, channels), 7.0)
    a = snake_beta(torch.cat((history, x), dim=1), *snakes[0])
    packed = weight1.permute(2, 1, 0).reshape(-1, channels)
    ops.codec_active_unit(
        a,
        lead,
        x,
        packed,
        bias1,
        *snakes[1],
        weight2.T,
        bias2,
        dilation,
        raw,
        active,
        ahead * channels,
        *snakes[2],
    )
    torch.testing.assert_close(raw, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(active[:, ahead:], snake_beta(wanted, *snakes[2]), atol=2e-5, rtol=1e-5)
    assert (active[:, :ahead] == 7.0).all()


def test_active_conv_upsamples() -> None:
    channels_in, channels_out, rate = 6, 3, 4
    stored, then = (rand(6), rand(6, seed=1)), snake_parameters(rand(3), rand(3, seed=1))
    first = snake_parameters(*stored)
    weight, bias = rand(channels_in, channels_out, 2 * rate), rand(channels_out, seed=2)
    x = rand(2, 9, channels_in)
    wanted = upsampling(stored, weight, bias, rate)(x, None)
    raw, active = torch.empty(2, 36, 3), torch.empty(2, 36, 3)
    repeated = [value.repeat(rate) for value in (bias, *then)]
    ops.codec_active_conv(
        snake_beta(x, *first),
        0,
        pack_upsample(weight),
        repeated[0],
        2,
        1,
        None,
        raw,
        active,
        0,
        *repeated[1:],
    )
    torch.testing.assert_close(raw, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(active, snake_beta(wanted, *then), atol=2e-5, rtol=1e-5)
