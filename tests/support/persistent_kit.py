"""The persistent kernel on a CPU: launches of `kernels.lm_persistent` in the emulator, and the same frame
of the twin."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import binaries, lm_persistent, reference, toolchain
from kernels.cuda_driver import Kernel, Module, Source
from kernels.frame import FrameTensors, StateTensors
from kernels.lm_persistent import Predictor, PredictorRun, TileConfig, kernel_name
from kernels.reference import ENDED, NOT_FINITE, depth_frame, next_inputs
from kernels.sampler import DrawFlags, frame_noise
from tests.support import cuda_emulated
from tests.support.lm_tensors import TINY, Maker, Shape

SMALLEST = replace(TINY, layers=1)
#: The predictor of the golden checkpoints, which fills no tile.
GOLDEN = Shape(
    hidden=40, inter=96, layers=1, heads=4, kv_heads=2, head_dim=32, vocab=1280, width=40, width_inter=80, predictor_layers=2, codes=256,
    codebooks=16, control=1024,
)  # fmt: skip
#: Three query heads a kv head, groups that are not full, chunks that a product leaves unfinished.
ODD = Shape(
    hidden=56, inter=64, layers=1, heads=6, kv_heads=2, head_dim=16, vocab=96, width=72, width_inter=124, predictor_layers=3, codes=60,
    codebooks=4, control=32,
)  # fmt: skip
#: Four blocks a head, each with a quarter of the values.
SHARED = Shape(
    hidden=96, inter=64, layers=1, heads=2, kv_heads=2, head_dim=64, vocab=96, width=96, width_inter=64, predictor_layers=2, codes=100,
    codebooks=6, control=32,
)  # fmt: skip
#: As little as a frame can be, so that many of them pass in a second.
LEAST = Shape(
    hidden=32, inter=32, layers=1, heads=2, kv_heads=1, head_dim=16, vocab=64, width=32, width_inter=32, predictor_layers=1, codes=32,
    codebooks=3, control=32,
)  # fmt: skip
#: What any settings need.
ANY_DRAWS = DrawFlags(1 << 20, any_top_p=True, all_greedy=False)
SOURCE = Path(__file__).parent / "persistent_small.cu"
#: A line of it with the kernels of one config.
_CONFIG = re.compile(r"(PREDICTOR|TALKER)S?\(")
#: What `persistent_small.cu` has, beside sizes that it has for the emulator alone.
TILE_CONFIGS = {
    (64, 96, 4, 2, 32, 48, 2, 4): TileConfig("persistent_tiny", 4, 2, 1, 32_768),
    (40, 80, 4, 2, 32, 256, 2, 15): TileConfig("persistent_golden", 4, 2, 2, 65_536),
}
TALKER_CONFIGS = {
    (48, 80, 4, 2, 32): TileConfig("persistent_talker_tiny", 4, 2, 1, 32_768),
    (40, 96, 4, 2, 32): TileConfig("persistent_talker_golden", 4, 2, 2, 65_536),
}
EMULATED_CONFIGS = {
    **TILE_CONFIGS,
    (72, 124, 6, 2, 16, 60, 3, 3): TileConfig("persistent_odd", 6, 4, 3, 49_152),
    (96, 64, 2, 2, 64, 100, 2, 5): TileConfig("persistent_shared", 8, 2, 2, 49_152),
    (32, 32, 2, 1, 16, 32, 1, 2): TileConfig("persistent_least", 2, 1, 1, 16_384),
}
EMULATED_TALKER_CONFIGS = {
    **TALKER_CONFIGS,
    (72, 124, 6, 2, 16): TileConfig("persistent_talker_odd", 6, 4, 3, 49_152),
    (96, 64, 2, 2, 64): TileConfig("persistent_talker_shared", 8, 2, 2, 49_152),
}


@cache
def library(name: str) -> ctypes.CDLL:
    """The kernels of the config with this name, built for the emulator."""
    config = next(
        one for one in (*EMULATED_CONFIGS.values(), *EMULATED_TALKER_CONFIGS.values()) if one.name == name
    )
    kernels = [kernel_name(config, rows, tested) for rows in (1, 2) for tested in (False, True)]
    others = [
        line
        for line in SOURCE.read_text().splitlines()
        if _CONFIG.match(line) and not re.match(rf"\w+\({name}(_1\w*)?,", line)
    ]
    edits = {"#ifdef EMULATED": "#if 1"} | dict.fromkeys(others, "")
    return cuda_emulated.build(SOURCE, [kernel for kernel in kernels if "least_2" not in kernel], edits)


class Emulated:
    """A kernel as `lm_persistent` launches it, in the order of threads that `seed` gives."""

    seed = 0

    def __init__(
        self, name: str, shared_bytes: int, built: Callable[[str], ctypes.CDLL], room: Callable[[], int]
    ) -> None:
        self._name, self._shared_bytes, self._built, self._room = name, shared_bytes, built, room

    def resident_blocks(self, threads: int) -> int:
        return self._room()

    def launch(
        self, grid: tuple[int, int], threads: int, arguments: ctypes.Structure, stream: int, cooperative: bool
    ) -> None:
        built = self._built(re.sub(r"_[12](_tested)?$", "", self._name))
        kernel = cuda_emulated.Kernel(
            built, self._name, self._shared_bytes, Emulated.seed, together=cooperative
        )
        kernel.launch(grid, threads, arguments)


#: An edit for `rebuild`: producers see the reports of others at their first try in vain.
LOOKS_AT_ONCE = {"TRIES_PER_LOOK = 256": "TRIES_PER_LOOK = 1"}


def rebuild(monkeypatch: pytest.MonkeyPatch, folder: Path, kernel: str, edits: dict[str, str]) -> None:
    """One kernel alone, as `SOURCE` would have it, takes the place of all others, with these edits."""
    source, name = folder / "edited.cu", kernel.partition("(")[2].partition(",")[0]
    source.write_text(
        f'#include "persistent{"_talker" if kernel.startswith("TALKER") else ""}.cuh"\n{kernel}\n'
    )
    built = cuda_emulated.build(source, [name], edits)
    emulate(monkeypatch, lambda _: built)


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    built: Callable[[str], ctypes.CDLL] = library,
    room: Callable[[], int] = lambda: 132,
) -> None:
    """Small sizes alone are known, and run here, on a machine that says it has a GPU. `room`: how many blocks the device
    holds at once."""
    cuda_emulated.emulate(monkeypatch)
    _know(
        monkeypatch,
        EMULATED_CONFIGS,
        EMULATED_TALKER_CONFIGS,
        lambda source, _: {name: Emulated(name, size, built, room) for name, size in source.kernels.items()},
    )


def _know(monkeypatch: pytest.MonkeyPatch, configs: Any, talker_cuts: Any, on: Callable[..., Any]) -> None:
    """Sizes of models for which there are kernels, and where those come from."""
    monkeypatch.setattr(lm_persistent, "PREDICTORS", configs)
    monkeypatch.setattr(lm_persistent, "TALKERS", talker_cuts)
    monkeypatch.setattr(Source, "on", on)


@cache
def _small(device: int) -> Module:
    """The small kernels, built for a GPU, and kept as others are."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        for file in (SOURCE, *binaries.SOURCES.glob("*.cuh")):
            shutil.copy(file, name)
        patched.setattr(binaries, "SOURCES", Path(name))
        return Module(
            next(binaries.candidates(SOURCE.stem, torch.cuda.get_device_capability(device))), device
        )


def add_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes are known on a GPU too."""
    published, names = (
        Source.on,
        [config.name for config in (*TILE_CONFIGS.values(), *TALKER_CONFIGS.values())],
    )

    def found(source: Source, device: int) -> dict[str, Kernel]:
        small = all(any(kernel.startswith(f"{known}_") for known in names) for kernel in source.kernels)
        module = _small(device) if small else None
        return (
            published(source, device)
            if module is None
            else {name: module.kernel(name, size) for name, size in source.kernels.items()}
        )

    _know(monkeypatch, lm_persistent.PREDICTORS | TILE_CONFIGS, lm_persistent.TALKERS | TALKER_CONFIGS, found)


@dataclass(frozen=True, slots=True)
class Case:
    """A frame behind code 0: where it starts."""

    weights: FrameTensors
    state: StateTensors
    rows: Tensor
    hidden: Tensor
    first: Tensor


@dataclass(frozen=True, slots=True)
class Made:
    """What a frame leaves."""

    codes: Tensor
    flags: Tensor
    inputs: Tensor
    positions: Tensor
    frames: Tensor


def case(
    shape: Shape, rows: int, seed: int = 0, greedy: bool = False, top_p: bool = True, device: str = "cpu"
) -> Case:
    maker = Maker(device, torch.bfloat16, seed)
    weights = maker.frame(shape, positions=64, text_ids=512)
    slots = 3
    state = maker.state(shape, slots, slots * 9 + 1, 16, maker.integers(0, 60, slots), greedy, top_p)
    depth = weights.depth
    assert depth is not None
    hidden = maker.normal(rows, depth.stack.hidden)
    first = maker.integers(0, shape.vocab - shape.control, rows)
    return Case(
        weights, state, torch.randperm(slots, device=device, generator=maker.generator)[:rows], hidden, first
    )


def copied(state: StateTensors) -> StateTensors:
    return state._replace(
        inputs=state.inputs.clone(), positions=state.positions.clone(), frames=state.frames.clone()
    )


def launched(run: PredictorRun, one: Case) -> Made:
    """A frame of the kernel."""
    depth, state = one.weights.depth, copied(one.state)
    assert depth is not None
    x = torch.cat((one.hidden, depth.inputs[one.first + depth.starts[0]]))
    codes = torch.full((len(one.rows), one.weights.codebooks), -1, device=x.device)
    codes[:, 0] = one.first
    finite = torch.ones(len(one.rows), dtype=torch.int32, device=x.device)
    flags = torch.full((len(one.rows),), 99, dtype=torch.uint8, device=x.device)
    run.launch(x, one.rows, codes, finite, flags, state)
    return Made(codes, flags, state.inputs, state.positions, state.frames)


def twin(one: Case, forced: Tensor | None = None) -> tuple[Made, Tensor]:
    """The frame in single PyTorch ops, and its logits float32 [codebooks behind, rows, codes]."""
    depth, state, rows = one.weights.depth, copied(one.state), one.rows
    assert depth is not None
    noise = frame_noise(state.seeds[rows], state.frames[rows], one.weights.codebooks)
    settings = state.residual.rows(rows)
    bare = depth._replace(project=None)  # the states are given as the projection left them
    codes, finite, logits = depth_frame(
        bare, one.hidden, one.first, noise[:, 1:], settings, ANY_DRAWS, nucleus_first=False, forced=forced
    )
    fed = codes if forced is None else forced
    text = state.trailing[rows, state.frames[rows].clamp(max=state.trailing.shape[1] - 1)]
    state.inputs[rows] = next_inputs(one.weights.feedback, fed, text)
    alive = (rows != state.dead).long()
    state.positions[rows] += alive
    state.frames[rows] += alive
    flags = (one.first == one.weights.draw.ends[0]).to(torch.uint8) * ENDED + (~finite).to(
        torch.uint8
    ) * NOT_FINITE
    return Made(codes, flags, state.inputs, state.positions, state.frames), logits


def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin's products and attention are exact before they are rounded, so that the order of a sum is
    not in the way."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None
        return functional.linear(x.double(), weight.double()).to(x.dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: bool | float) -> Tensor:
        return functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options).to(
            q.dtype
        )  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "linear", linear)
    monkeypatch.setattr(reference, "scaled_dot_product_attention", attention)


def last_logits(run: PredictorRun, one: Case) -> Tensor:
    """Those of the last codebook, float32 [rows, codes], as blocks sent them to each other."""
    depth = one.weights.depth
    assert depth is not None
    rows, codes = len(one.rows), depth.heads.shape[1]
    sent = run.packets[len(run.packets) - rows * codes :][: rows * codes // 2, 0]
    return sent.contiguous().view(torch.bfloat16).view(rows, codes).float()


def run_of(one: Case, **options: object) -> PredictorRun:
    return PredictorRun(Predictor(one.weights), len(one.rows), **options)  # type: ignore[arg-type]


def spilled(source: str) -> list[int]:
    """Bytes of registers that each kernel of a source in `kernels/cuda` stores for want of room. Skips the
    test where there is no nvcc."""
    if (nvcc := toolchain.nvcc()) is None:
        pytest.skip("needs nvcc")
    command = [
        nvcc,
        "-cubin",
        "-arch=sm_90a",
        "-std=c++17",
        "-O3",
        "-Xptxas",
        "-v",
        "-o",
        os.devnull,
        str(binaries.SOURCES / f"{source}.cu"),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stderr
    found = [int(each) for each in re.findall(r"(\d+) bytes spill stores", said)]
    assert len(found) == 2, said
    return found


def check_published(source: str, sizes: list[int], config: TileConfig) -> None:
    """The kernels of a source have these sizes and the config that their launch asks for, with the stumbling
    ones beside them."""
    macro = "TALKER" if "talker" in source else "PREDICTOR"
    header = (binaries.SOURCES / f"{source}.cuh").read_text()
    wanted = [*sizes, config.blocks, config.warps, config.tiles]
    assert f"#define PUBLISHED_{macro} {', '.join(map(str, wanted))}, " in header
    for text, tested in (
        ((binaries.SOURCES / f"{source}.cu").read_text(), False),
        ((binaries.SOURCES / "persistent_tested.cu").read_text(), True),
    ):
        for rows in lm_persistent.ROWS:
            assert (
                f"{macro}({kernel_name(config, rows, tested)}, {config.shared_bytes}, {str(tested).lower()}, PUBLISHED_{macro}, {rows}"
                in text
            )
    assert config.shared_bytes <= 227 * 1024
