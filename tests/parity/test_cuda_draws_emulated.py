"""The CUDA C++ sampler, run on a CPU by the emulator: codes, flags and what is fed next, equal to the
PyTorch twin's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels import lm_cuda
from kernels.sampler import DrawFlags, all_finite, frame_noise, log_probability, process_first, sample
from tests.support.cuda_emulated import choose_order, guarded
from tests.support.fake_gpus import FakeGpus

BF16 = torch.bfloat16
SLOTS, CODEBOOKS, WIDTH, TALKER, TRAILING = 24, 4, 72, 200, 6
DEAD = SLOTS
FIRST_CODEBOOK = {lm_cuda.FIRST: 0, lm_cuda.MIDDLE: 2, lm_cuda.LAST: CODEBOOKS - 1}


@pytest.fixture
def emulated(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return choose_order(monkeypatch)


@dataclass
class Draws:
    """All that a draw reads and writes, for `SLOTS` slots and a dead one, in the order of `Args` of
    kernels/cuda/sampler.cu."""

    logits: Tensor
    rows: Tensor
    codes: Tensor
    finite: Tensor
    flags: Tensor
    seeds: Tensor
    top_k: Tensor
    min_new: Tensor
    starts: Tensor
    trailing: Tensor
    frames: Tensor
    positions: Tensor
    temperature: Tensor
    top_p: Tensor
    penalty: Tensor
    greedy: Tensor
    seen: Tensor
    hidden: Tensor
    inputs: Tensor
    table: Tensor
    text: Tensor
    x: Tensor
    state_inputs: Tensor
    log_probabilities: Tensor

    @classmethod
    def of(cls, vocab: int, seed: int, coarse: bool = False) -> Draws:
        """Rows of other settings each, some greedy; the slots in a mixed order, with two dead rows.
        coarse: logits of few values."""
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator)

        def integers(below: int, *shape: int) -> Tensor:
            return torch.randint(0, below, shape, generator=generator)

        def some(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(BF16)

        slots, n = SLOTS + 1, SLOTS + 2
        logits = torch.randn(n, vocab, generator=generator) * 3
        tensors = {
            "logits": (logits.round() if coarse else logits).to(BF16),
            "rows": torch.cat((torch.randperm(SLOTS, generator=generator), torch.tensor([DEAD, DEAD]))),
            "codes": integers(vocab, n, CODEBOOKS),
            "finite": torch.ones(n, dtype=torch.int32),
            "flags": torch.full((n,), 9, dtype=torch.uint8),
            "seeds": integers(2**62, slots),
            "top_k": integers(70, slots),
            "min_new": integers(4, slots),
            "starts": torch.arange(CODEBOOKS) * vocab,
            "trailing": integers(50, slots, TRAILING),
            "frames": integers(9, slots),
            "positions": integers(900, slots),
            "temperature": uniform(slots) + 0.3,
            "top_p": uniform(slots) * 1.4,
            "penalty": uniform(slots) + 0.6,
            "greedy": (uniform(slots) < 0.2).to(torch.uint8),
            "seen": (uniform(slots, vocab) < 0.1).to(torch.uint8),
            "hidden": some(n, WIDTH),
            "inputs": some(CODEBOOKS * vocab, WIDTH),
            "table": some(CODEBOOKS * vocab, TALKER),
            "text": some(50, TALKER),
            "x": torch.full((2 * n, WIDTH), float("nan"), dtype=BF16),
            "state_inputs": torch.full((slots, TALKER), float("nan"), dtype=BF16),
            "log_probabilities": torch.full((n,), 9.0),
        }
        return cls(**{name: guarded(tensor) for name, tensor in tensors.items()})

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def end(self) -> int:
        """The code that ends speech; those from 20 before the last one on are never drawn but for it."""
        return self.vocab - 7

    def copy(self) -> Draws:
        return Draws(**{name: guarded(getattr(self, name)) for name in self.__dataclass_fields__})

    def run(self, stage: int) -> Draws:
        """The tensors after a launch."""
        after = self.copy()
        tensors = [getattr(after, name) for name in self.__dataclass_fields__]
        numbers = (
            self.end, self.vocab - 20, DEAD, len(self.rows), self.vocab, FIRST_CODEBOOK[stage], CODEBOOKS, WIDTH, TALKER, TRAILING, 1,
        )  # fmt: skip
        lm_cuda.draw(tensors, numbers, stage)
        return after

    def twin(self, stage: int) -> Draws:
        """The tensors after the same in PyTorch. Dead rows share a slot, so only their own row of each
        tensor is meant."""
        after, rows, codebook = self.copy(), self.rows, FIRST_CODEBOOK[stage]
        logits, frames, n = self.logits.float(), self.frames[rows], len(self.rows)
        if stage == lm_cuda.FIRST:
            early = frames < self.min_new[rows]
            logits = process_first(
                logits, self.seen[rows] != 0, self.penalty[rows], early, (self.end,), self.vocab - 20
            )
        noise = frame_noise(self.seeds[rows], frames, CODEBOOKS)[:, codebook]
        settings = (self.temperature[rows], self.top_k[rows], self.top_p[rows], self.greedy[rows] != 0)
        code = sample(logits, noise, settings, DrawFlags(self.vocab, True, False))
        after.codes[:, codebook] = code
        fine = all_finite(self.logits.float())
        if stage != lm_cuda.LAST:
            after.finite.copy_(fine if stage == lm_cuda.FIRST else self.finite * fine)
            start = n if stage == lm_cuda.FIRST else 0
            after.x[start : start + n] = self.inputs[self.starts[codebook] + code]
            if stage == lm_cuda.FIRST:
                after.x[:n] = self.hidden
                after.seen[rows, code] = 1
                own = log_probability(self.logits, code, (self.end,), self.vocab - 20)
                after.log_probabilities.copy_(own)
            return after
        after.flags.copy_((after.codes[:, 0] == self.end).int() + 2 * (~fine | (self.finite == 0)).int())
        text = self.text[self.trailing[rows, frames.clamp(max=TRAILING - 1)]]
        after.state_inputs[rows] = self.table[after.codes + self.starts].sum(1) + text
        live = rows[rows != DEAD]
        after.positions[live] += 1
        after.frames[live] += 1
        return after


def differing(found: Draws, wanted: Draws) -> list[str]:
    """Names of the tensors that are not the same, rows of the dead slot apart, whose draws share one slot."""
    names = []
    for name in found.__dataclass_fields__:
        one, other = getattr(found, name), getattr(wanted, name)
        if name in ("seen", "state_inputs"):
            one, other = one[:DEAD], other[:DEAD]
        close = torch.equal
        if limit := {"state_inputs": 2e-2, "log_probabilities": 1e-5}.get(name):
            close = partial(torch.allclose, rtol=limit, atol=limit)
        if not close(
            one.nan_to_num(7) if one.is_floating_point() else one,
            other.nan_to_num(7) if other.is_floating_point() else other,
        ):
            names.append(name)
    return names


@pytest.mark.parametrize("stage", FIRST_CODEBOOK)
@pytest.mark.parametrize(("vocab", "coarse"), [(256, False), (512, True), (2048, False), (3072, True)])
def test_a_draw_equals_its_twin(
    vocab: int, coarse: bool, stage: int, emulated: Callable[[int], None]
) -> None:
    draws = Draws.of(vocab, seed=stage, coarse=coarse)
    emulated(vocab)
    assert differing(draws.run(stage), draws.twin(stage)) == []


@pytest.mark.parametrize("stage", FIRST_CODEBOOK)
def test_the_edges_of_the_settings(stage: int, emulated: Callable[[int], None]) -> None:
    draws = Draws.of(512, seed=9, coarse=True)
    edges = torch.tensor([0, 1, 2, 511, 512, 513, 1 << 40])
    draws.top_k[:21] = edges.repeat(3)
    draws.top_p[:21] = torch.tensor([1.0, 1e-7, 0.999999]).repeat_interleave(7)
    draws.logits[3] = 1.0  # all of them tied
    draws.logits[4] = -0.0
    draws.logits[4, 100:] = 0.0
    draws.logits[5], draws.logits[5, 17] = -float("inf"), 2.0
    draws.logits[6, 30] = float("nan")
    draws.finite[7] = 0
    negative = draws.rows[9]  # of logits below 0 that are likely if top-k keeps them
    draws.logits[9] = -1 - torch.arange(512) % 128 / 32
    draws.top_k[negative], draws.top_p[negative], draws.greedy[negative] = 2, 1.0, 0
    draws.logits[21:] -= 60.0  # none is above 0, and all are far below it once they are divided
    draws.temperature[draws.rows[21:]] = 0.3
    made, twin = draws.run(stage), draws.twin(stage)
    made.codes[6], twin.codes[6] = 0, 0  # a row with NaN draws some code, and says so
    if stage == lm_cuda.LAST:
        assert made.flags[5:8].tolist() == [flag | 2 for flag in made.flags[5:8].tolist()]
        slot = draws.rows[6]
        made.state_inputs[slot], twin.state_inputs[slot] = 0, 0
    else:
        at = 6 + (len(draws.rows) if stage == lm_cuda.FIRST else 0)
        made.x[at], twin.x[at] = 0, 0
        made.seen[draws.rows[6]], twin.seen[draws.rows[6]] = 0, 0
        made.log_probabilities[6], twin.log_probabilities[6] = 0, 0
    assert differing(made, twin) == []


@pytest.mark.parametrize("stage", FIRST_CODEBOOK)
def test_the_order_of_threads_changes_no_bit(stage: int, emulated: Callable[[int], None]) -> None:
    draws = Draws.of(512, seed=3, coarse=True)
    first = draws.run(stage)
    for seed in range(1, 4):
        emulated(seed)
        again = draws.run(stage)
        assert torch.equal(again.codes, first.codes)
        assert torch.equal(
            again.state_inputs[:DEAD].view(torch.int16), first.state_inputs[:DEAD].view(torch.int16)
        )
        assert torch.equal(again.log_probabilities, first.log_probabilities)
        assert differing(again, first) == []
