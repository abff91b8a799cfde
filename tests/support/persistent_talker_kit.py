"""The persistent kernel of the talker's layers on a CPU: launches in the emulator, and the same step of
the twin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.frame import FrameTensors, StateTensors
from kernels.lm_persistent import Predictor, PredictorRun, Talker, TalkerRun
from kernels.reference import backbone_step
from tests.support import persistent_kit
from tests.support.lm_tensors import Maker, Shape
from tests.support.persistent_kit import GOLDEN, SMALLEST

#: Two layers each; the predictors are those of the other kit.
SMALL_TALKER, GOLDEN_TALKER = replace(SMALLEST, layers=2), replace(GOLDEN, layers=2)
#: Three query heads a kv head; one query head a kv head, four blocks each.
ODD_TALKER = replace(persistent_kit.ODD, hidden=72, inter=124, layers=3)
SHARED_TALKER = replace(persistent_kit.SHARED, layers=2)
PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A step of the talker: where it starts."""

    weights: FrameTensors
    state: StateTensors
    rows: Tensor
    keys: Tensor
    values: Tensor


def case(shape: Shape, rows: int, seed: int = 0, longest: int = 60, device: str = "cpu") -> Case:
    """Slots at positions below `longest`, of which `rows` run."""
    maker, slots = Maker(device, torch.bfloat16, seed), 3
    weights = maker.frame(shape, positions=longest + 64, text_ids=512)
    contexts = maker.integers(0, longest, slots)
    pages = slots * (-(-(longest + 64) // PAGE)) + 1
    state = maker.state(shape, slots, pages, PAGE, contexts)
    keys, values = maker.caches(shape, pages, PAGE)
    return Case(
        weights, state, torch.randperm(slots, device=device, generator=maker.generator)[:rows], keys, values
    )


@dataclass(frozen=True, slots=True)
class Made:
    """What a step leaves: the state after the last norm, and all keys and values."""

    hidden: Tensor
    keys: Tensor
    values: Tensor


def run_of(one: Case, **options: object) -> TalkerRun:
    behind = PredictorRun(Predictor(one.weights), len(one.rows), **options)  # type: ignore[arg-type]
    return TalkerRun(Talker(one.weights), behind)


def launched(run: TalkerRun, one: Case) -> Made:
    """A step of the kernel."""
    keys, values, stack = one.keys.clone(), one.values.clone(), one.weights.backbone
    x = torch.full((len(one.rows), stack.hidden), float("nan"), dtype=torch.bfloat16, device=one.keys.device)
    run.launch(x, one.rows, one.state, keys, values)
    return Made(reference.rms_norm(x, stack.norm, stack.eps), keys, values)


def twin(one: Case) -> Made:
    """The step in single PyTorch ops."""
    keys, values = one.keys.clone(), one.values.clone()
    most = int(one.state.positions.max()) + 1
    return Made(backbone_step(one.weights.backbone, one.state, keys, values, one.rows, most), keys, values)


def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin's products and attention are exact before they are rounded."""
    persistent_kit.exact(monkeypatch)

    def attention(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        max_length: int,
        scale: float,
    ) -> Tensor:
        out = torch.zeros_like(q)
        for row, length in enumerate(lengths.tolist()):
            if length:
                k, v = (
                    cache[page_table[row]].transpose(0, 1).flatten(1, 2)[:, :length].double()
                    .repeat_interleave(q.shape[1] // keys.shape[1], 0)
                    for cache in (keys, values)
                )  # fmt: skip
                shares = torch.softmax((k @ q[row].double()[:, :, None])[..., 0] * scale, -1)
                out[row] = (shares[:, None] @ v)[:, 0].to(q.dtype)
        return out.flatten(1)

    monkeypatch.setattr(reference, "paged_decode_attention", attention)
