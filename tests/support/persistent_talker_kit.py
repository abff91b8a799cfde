"""The persistent kernel of the talker's layers on a CPU: launches in the emulator, and the same step of the twin."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels import binaries, lm_persistent, lm_persistent_talker, reference
from kernels.attention import gather_pages
from kernels.dummy import Maker, Shape
from kernels.frame import FrameTensors, StateTensors
from kernels.lm_persistent import Cut, Predictor, PredictorRun, kernel_name
from kernels.lm_persistent_talker import Talker, TalkerRun
from kernels.reference import backbone_step
from tests.support import cuda_emulated, persistent_kit
from tests.support.persistent_kit import GOLDEN, SMALLEST

#: Two layers each; the predictors are those of the other kit.
SMALL_TALKER, GOLDEN_TALKER = replace(SMALLEST, layers=2), replace(GOLDEN, layers=2)
#: Three query heads a kv head; one query head a kv head, four blocks each.
ODD_TALKER = replace(persistent_kit.ODD, hidden=72, inter=124, layers=3)
SHARED_TALKER = replace(persistent_kit.SHARED, layers=2)
_PUBLISHED = "TALKERS(persistent_talker_published, 232448, 1024, 3072, 16, 8, 128, 8, 1, 1, 128, 8, 4, 8)"
_SMALL = """
TALKERS(persistent_talker_tiny, 32768, 48, 80, 4, 2, 32, 8, 1, 1, 4, 2, 1, 3)
TALKERS(persistent_talker_golden, 65536, 40, 96, 4, 2, 32, 8, 1, 1, 4, 2, 2, 4)
TALKERS(persistent_talker_odd, 49152, 72, 124, 6, 2, 16, 8, 1, 1, 6, 4, 3, 2)
TALKERS(persistent_talker_shared, 49152, 96, 64, 2, 2, 64, 8, 1, 1, 8, 2, 2, 3)
"""
CUTS = {
    (48, 80, 4, 2, 32): Cut("persistent_talker_tiny", 4, 2, 1, 32_768),
    (40, 96, 4, 2, 32): Cut("persistent_talker_golden", 4, 2, 2, 65_536),
    (72, 124, 6, 2, 16): Cut("persistent_talker_odd", 6, 4, 3, 49_152),
    (96, 64, 2, 2, 64): Cut("persistent_talker_shared", 8, 2, 2, 49_152),
}
PAGE = 16


@cache
def library() -> ctypes.CDLL:
    """The kernels for small shapes, built for the emulator."""
    names = [kernel_name(cut, rows, tested) for cut in CUTS.values() for rows in (1, 2) for tested in (False, True)]
    return cuda_emulated.build(binaries.SOURCES / "persistent_talker.cu", names, {_PUBLISHED: _SMALL})


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of both sources run here."""
    libraries = {lm_persistent.SOURCE: persistent_kit.library, lm_persistent_talker.SOURCE: library}

    def kernel(source: str, name: str, shared_bytes: int, _device: int) -> persistent_kit.Emulated:
        return persistent_kit.Emulated(name, shared_bytes, libraries[source])

    persistent_kit.emulate(monkeypatch)
    monkeypatch.setattr(lm_persistent_talker, "CUTS", CUTS)
    monkeypatch.setattr(lm_persistent, "_kernel", kernel)


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
    return Case(weights, state, torch.randperm(slots, device=device, generator=maker.generator)[:rows], keys, values)


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

    def attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, _most: int, scale: float) -> Tensor:
        out = torch.zeros_like(q)
        for row, length in enumerate(lengths.tolist()):
            if length:
                k, v = (
                    part.double().repeat_interleave(q.shape[1] // keys.shape[1], 0)
                    for part in gather_pages(keys, values, table[row], length)
                )
                shares = torch.softmax((k @ q[row].double()[:, :, None])[..., 0] * scale, -1)
                out[row] = (shares[:, None] @ v)[:, 0].to(q.dtype)
        return out.flatten(1)

    monkeypatch.setattr(reference, "paged_decode_attention", attention)
