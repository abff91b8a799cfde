"""Which utterances share a batch on a GPU, and that what is decoded does not depend on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipelines.codec.batches import (
    BATCH_COST,
    FIXED_ROWS,
    LENGTH_STEP,
    MIN_FRAMES,
    PADDING_COST,
    cheapest_batches,
    round_up,
    same_length_batches,
)
from pipelines.codec.decoder import PASS_FRAMES
from pipelines.qwen3_tts.codec import CodecDecoder, load_codec

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base" / "speech_tokenizer"
MOST, PASS = 4096, 512


def cost(batches: list[list[int]], lengths: list[int], padding_cost: float) -> float:
    found = 0.0
    for batch in batches:
        longest, real = round_up(max(lengths[i] for i in batch)), sum(lengths[i] for i in batch)
        padding = (padding_cost if longest <= PASS else 1.0) * (len(batch) * longest - real)
        found += max(real + padding, MIN_FRAMES) + BATCH_COST
    return found


def every_cut(items: list[int]) -> list[list[list[int]]]:
    """All ways to cut a list into runs."""
    if not items:
        return [[]]
    return [[items[:size], *rest] for size in range(1, len(items) + 1) for rest in every_cut(items[size:])]


@pytest.mark.parametrize("padding_cost", [1.0, PADDING_COST])
@pytest.mark.parametrize("seed", range(6))
def test_the_cut_is_the_cheapest_of_all(seed: int, padding_cost: float) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice((0, 3, 20, 90, 150, 400, 600, 1500)) + draw.randint(0, 30) for _ in range(9)]
    found = cheapest_batches(lengths, MOST, PASS, padding_cost)
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    assert [i for batch in found for i in batch] == order

    def allowed(batch: list[int]) -> bool:
        return len(batch) == 1 or len(batch) * min(round_up(lengths[batch[0]]), PASS) <= MOST

    assert all(allowed(batch) for batch in found)
    least = min(
        cost(cut, lengths, padding_cost) for cut in every_cut(order) if all(allowed(batch) for batch in cut)
    )
    assert cost(found, lengths, padding_cost) == pytest.approx(least)


def test_little_of_a_usual_gathering_is_padding() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(37, 188) for _ in range(73)]
    batches = cheapest_batches(lengths, MOST, PASS)
    padded = sum(len(batch) * round_up(max(lengths[i] for i in batch)) for batch in batches)
    assert padded < 1.11 * sum(lengths)
    larger = cheapest_batches(lengths, MOST, PASS, PADDING_COST)
    assert len(larger) == 3 < len(batches)
    assert sum(len(batch) * round_up(max(lengths[i] for i in batch)) for batch in larger) < 1.25 * sum(
        lengths
    )
    assert cheapest_batches([], MOST, PASS) == []
    assert cheapest_batches([0, 0], MOST, PASS) == []


def test_many_utterances_come_once_each_and_stay_in_their_budget() -> None:
    draw = random.Random(3)
    lengths = [draw.randint(0, 900) for _ in range(300)]
    batches = cheapest_batches(lengths, MOST, PASS)
    assert sorted(i for batch in batches for i in batch) == [i for i, length in enumerate(lengths) if length]
    assert all(
        len(batch) == 1 or len(batch) * min(round_up(max(lengths[i] for i in batch)), PASS) <= MOST
        for batch in batches
    )


def test_alike_utterances_meet_one_shape() -> None:
    lengths = [5, 8, 9, 0, 16, 700, *[33] * 20]
    warm = [i % 3 == 0 for i in range(len(lengths))]
    found = same_length_batches(lengths, warm)
    assert sorted(i for batch in found for i in batch) == [i for i, length in enumerate(lengths) if length]
    for batch in found:
        assert len(batch) <= FIXED_ROWS
        assert len({(warm[i], round_up(lengths[i])) for i in batch}) == 1


class OnGpu(CodecDecoder):
    """A decoder that makes its batches on a CPU as it would on a GPU."""

    def __init__(self, base: CodecDecoder, reproducible: bool) -> None:
        self.__dict__.update(base.__dict__)
        self.alone, self.fixed = False, reproducible


@pytest.fixture(scope="module")
def alone() -> CodecDecoder:
    torch.set_num_threads(1)
    return load_codec(FOLDER).decoder


def speech(decoder: CodecDecoder, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(decoder.config.codebook_size, (n, decoder.config.num_quantizers), generator=generator)
        for n in lengths
    ]


@pytest.mark.parametrize("reproducible", [False, True])
def test_batches_decode_to_what_each_decodes_to_alone(alone: CodecDecoder, reproducible: bool) -> None:
    codes = speech(alone, [3, 12, 9, 26, 8, 30])
    starts = [alone.new_state() for _ in codes]
    alone.decode_chunk([starts[2], starts[5]], speech(alone, [4, 6]))
    batched = OnGpu(alone, reproducible)
    for states in (None, starts):
        for got, item, at in zip(batched.decode(codes, states), codes, range(len(codes))):
            wanted = alone.decode([item], None if states is None else [states[at]])[0]
            assert got.shape == wanted.shape == (len(item) * alone.samples_per_frame,)
            torch.testing.assert_close(got, wanted, atol=3e-5, rtol=0)


def test_long_utterances_of_a_batch_pass_in_parts(alone: CodecDecoder) -> None:
    codes = speech(alone, [PASS_FRAMES + 2, PASS_FRAMES + 6])
    for got, item in zip(OnGpu(alone, False).decode(codes), codes):
        torch.testing.assert_close(got, alone.run(item[None], None)[0], atol=3e-5, rtol=0)


def test_fixed_rows_give_the_same_bits_in_any_company(alone: CodecDecoder) -> None:
    decoder = OnGpu(alone, True)
    codes = speech(alone, [12, 9, 5, 11, 4, 7])
    starts = [alone.new_state() for _ in codes]
    alone.decode_chunk([starts[1], starts[4]], speech(alone, [4, 6]))
    together, backwards = decoder.decode(codes), decoder.decode(codes[::-1])[::-1]
    warm = decoder.decode(codes, starts)
    for at in range(len(codes)):
        assert torch.equal(together[at], backwards[at])
    for at in (1, 2):
        item = codes[at]
        assert torch.equal(together[at], decoder.decode([item])[0])
        assert torch.equal(warm[at], decoder.decode([item], [starts[at]])[0])


def test_fixed_rows_give_streams_the_same_bits_in_any_company(alone: CodecDecoder) -> None:
    decoder = OnGpu(alone, True)
    streams = speech(alone, [2 * LENGTH_STEP] * 3)
    together, single = ([alone.new_state() for _ in streams] for _ in range(2))
    for start in range(0, 2 * LENGTH_STEP, LENGTH_STEP):
        parts = [stream[start : start + LENGTH_STEP] for stream in streams]
        for wave, part, state in zip(decoder.decode_chunk(together, parts), parts, single):
            assert torch.equal(wave, decoder.decode_chunk([state], [part])[0])
