"""The sampler: its random numbers, its processors, and that it draws what the probabilities say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kernels.sampler import (
    WEIGHT_BITS,
    DrawFlags,
    all_finite,
    draw,
    frame_noise,
    philox,
    process_first,
    sample,
    token_weights,
)


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of Random123 (kat_vectors, philox4x32 10).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    got = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert [int(word) for word in got] == list(expected)


def test_noise_depends_only_on_seed_frame_and_codebook() -> None:
    seeds, frames = torch.tensor([5, 2**62 + 1, 5]), torch.tensor([0, 7, 3])
    together = frame_noise(seeds, frames, 16)
    for row in range(3):
        assert torch.equal(frame_noise(seeds[row : row + 1], frames[row : row + 1], 16)[0], together[row])
    assert len(together.unique()) == together.numel()
    assert int(together.min()) >= 0
    assert int(together.max()) < 2**32
    assert not torch.equal(
        frame_noise(torch.tensor([1]), frames[:1], 16), frame_noise(torch.tensor([1 + 2**32]), frames[:1], 16)
    )


def weights_of(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    rows = len(logits)
    return token_weights(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        top_k,
        top_p < 1,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 12},
        {"top_k": 3, "temperature": 1.4},
        {"top_p": 0.6},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.9},
    ],
)
def test_draws_follow_the_probabilities(settings: dict[str, float]) -> None:
    """Chi-square over 200,000 draws with the engine's own noise."""
    draws = 200_000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 1.5
    weights = weights_of(logits, **settings)
    random = frame_noise(torch.full((draws // 16,), 99), torch.arange(draws // 16), 16).flatten()
    tokens = draw(weights.expand(draws, -1), random)
    probabilities = weights[0].double().numpy() / int(weights.sum())
    counts = np.bincount(tokens.numpy(), minlength=40)
    assert (counts[probabilities == 0] == 0).all()
    likely = probabilities * draws >= 5
    assert likely.sum() >= 2
    observed, expected = counts[likely], probabilities[likely] * draws
    rest = draws - expected.sum()
    if rest >= 5:
        observed, expected = np.append(observed, draws - observed.sum()), np.append(expected, rest)
    else:
        expected = expected * observed.sum() / expected.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_chi_square_would_notice_a_wrong_draw() -> None:
    probabilities = np.array([0.5, 0.3, 0.2])
    assert stats.chisquare([101_500, 59_000, 39_500], probabilities * 200_000).pvalue < 1e-3


def test_a_draw_reaches_both_ends() -> None:
    weights = torch.tensor([[0, 3, 0, 1, 0]])
    assert int(draw(weights, torch.tensor([0]))) == 1
    assert int(draw(weights, torch.tensor([2**32 - 1]))) == 3


def test_top_k_keeps_ties_as_the_reference_does() -> None:
    weights = weights_of(torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]]), top_k=2)
    assert (weights[0] > 0).tolist() == [True, False, True, True, False]


def test_top_p_keeps_the_likeliest() -> None:
    weights = weights_of(torch.tensor([[9.0, 1.0, 0.0]]), top_p=1e-6)
    assert (weights[0] > 0).tolist() == [True, False, False]
    assert int(weights.sum()) == 1 << WEIGHT_BITS


def test_rows_have_their_own_settings() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    settings = [(0.9, 50, 1.0), (1.3, 0, 1.0), (0.7, 5, 0.8), (1.0, 0, 0.5)]
    temperature, top_k, top_p = (torch.tensor(column) for column in zip(*settings))
    together = token_weights(logits, temperature, top_k, top_p, 50, True)
    for row, (one, k, p) in enumerate(settings):
        assert torch.equal(weights_of(logits[row : row + 1], one, k, p)[0], together[row])


def test_greedy_rows_take_the_best() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 4.9]])
    ones, greedy = torch.ones(2), torch.tensor([True, False])
    random = torch.tensor([2**32 - 1, 2**32 - 1])
    settings, flags = (ones, torch.zeros(2, dtype=torch.int64), ones, greedy), DrawFlags(0, False, False)
    assert sample(logits, random, settings, flags).tolist() == [1, 2]


def test_processors_of_codebook_0() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0, 4.0, 5.0]]).repeat(2, 1)
    seen = torch.zeros(2, 6, dtype=torch.bool)
    seen[0, :2] = True
    penalty = torch.tensor([2.0, 2.0])
    got = process_first(logits, seen, penalty, torch.tensor([True, False]), ends=(4,), suppress_from=3)
    never = float("-inf")
    assert got.tolist() == [[1.0, -4.0, 1.0, never, never, never], [2.0, -2.0, 1.0, never, 4.0, never]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen(bad: float) -> None:
    logits = torch.randn(3, 50)
    logits[1, 17] = bad
    assert all_finite(logits).tolist() == [True, False, True]
