"""The code predictor's part of a frame in one cooperative launch: which models it knows, its weights, its launch, and frames with it.

The kernel is `kernels/cuda/persistent.cuh`, its twin `kernels.reference.depth_frame`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from kernels import binaries
from kernels.cuda_driver import Kernel, Module
from kernels.frame import DepthTensors, FrameTensors, Layer, StackTensors, StateTensors
from kernels.lm_frame import known_to_cuda
from kernels.persistent_cuts import PREDICTORS, Cut

#: The source in `kernels/cuda`, and the numbers of rows that it has kernels for.
SOURCE, ROWS = "persistent", (1, 2)
#: The source of the kernels that a `Trial` needs.
TESTED_SOURCE = "persistent_tested"
#: A bit of a frame's flags, beside those of `kernels.reference`: blocks waited in vain, so the frame is void and no other one may follow.
FAILED = 4
#: Times that a reader asks for packets before it gives up: seconds on a GPU, where a frame takes a millisecond. For each of them, a block
#: also waits 32 clocks of a launch for its weights: 80 ms.
PATIENCE = 1 << 22
#: Clocks between two copies of a block's weight stream; measured best (benchmarks/NOTES.md).
GAP = 1100
_FAULT = 1
#: What the word of a fault names, as `Wait` of kernels/cuda/persistent_shape.cuh says.
_KERNELS = ("predictor", "talker")
_WAITS = ("exchange {}", "the weights after exchange {}", "room for chunk {} of its weights", "the last copy into stage {}")
_TILE = 256  # elements: 8 rows of 32


class Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/persistent_shape.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "norms", "rope", "x", "inputs", "table", "text")),
        *((name, ctypes.c_void_p) for name in ("rows", "seeds", "top_k", "starts", "trailing", "codes", "frames", "positions")),
        *((name, ctypes.c_void_p) for name in ("finite", "flags", "temperature", "top_p", "greedy", "state_inputs", "packets", "control")),
        *((name, ctypes.c_longlong) for name in ("end", "dead")),
        *((name, ctypes.c_int) for name in ("talker", "trailing_width", "patience", "gap", "delay", "silent", "starved", "keeping")),
        ("seed", ctypes.c_uint),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """What a launch of the kernels for tests does wrong.

    Blocks stumble for up to `delay` short naps; block `silent` says nothing, a chunk of weights never comes to block `starved`, and block
    `keeping` frees none for the next ones.
    """

    seed: int = 0
    delay: int = 0
    silent: int = -1
    starved: int = -1
    keeping: int = -1


def cut_of(depth: DepthTensors) -> Cut | None:
    """How this predictor is cut; None where there is no kernel for it."""
    stack, (behind, codes, _) = depth.stack, depth.heads.shape
    inner = stack.layers[0].down.shape[1]
    cut = PREDICTORS.get((stack.hidden, inner, stack.heads, stack.kv_heads, stack.head_dim, codes, len(stack.layers), behind))
    return cut if cut is not None and all_blocks_speak(cut.blocks, stack.hidden, inner) else None


def all_blocks_speak(blocks: int, width: int, inner: int) -> bool:
    """Whether each block owns rows of the state or of the inner width, as `Shape` of persistent_shape.cuh wants it.

    A block without any could still read attention's result of a layer when the others write that of the next one over it.
    """
    return any((blocks - 1) * 8 * -(-n // (8 * blocks)) < n for n in (width, inner))


def known(weights: FrameTensors) -> bool:
    """Whether there is a kernel for the predictor of these weights, and for the rules of its draws."""
    depth = weights.depth
    plain = known_to_cuda(weights) and weights.backbone.hidden % 8 == 0
    return plain and depth is not None and cut_of(depth) is not None and weights.head.dtype == torch.bfloat16


def _tiles(weight: Tensor, cut: Cut, halves: int = 1) -> Tensor:
    """A matrix [n, inner] in the order of use, [blocks, chunks, elements of a chunk]; with two halves a block has rows of both."""
    n, inner = weight.shape[0] // halves, weight.shape[1]
    groups, steps = -(-n // (8 * cut.blocks)), -(-inner // (32 * cut.warps))
    filled = functional.pad(weight.view(halves, n, inner), (0, steps * cut.warps * 32 - inner, 0, groups * cut.blocks * 8 - n))
    cells = filled.view(halves, cut.blocks, groups, 8, cut.warps, steps, 32)
    # A lane of a warp reads the 8 values at 8 * (lane % 4) of row lane / 4.
    tiles = cells.permute(1, 4, 5, 0, 2, 3, 6).reshape(cut.blocks, cut.warps, steps * halves * groups, _TILE)
    chunks = -(-tiles.shape[2] // cut.tiles)
    tiles = functional.pad(tiles, (0, 0, 0, chunks * cut.tiles - tiles.shape[2]))
    return tiles.view(cut.blocks, cut.warps, chunks, cut.tiles, _TILE).transpose(1, 2).reshape(cut.blocks, chunks, -1)


def packed_layers(stack: StackTensors, cut: Cut) -> Tensor:
    """The matrices of a stack in the order of use, [blocks, chunks, elements of a chunk]. Meanwhile a layer exists once more."""

    def layer_tiles(layer: Layer) -> Tensor:
        return torch.cat([_tiles(layer.qkv, cut), _tiles(layer.o, cut), _tiles(layer.gate_up, cut, 2), _tiles(layer.down, cut)], dim=1)

    first = layer_tiles(stack.layers[0])
    packed = first.new_empty(cut.blocks, len(stack.layers), *first.shape[1:])
    for index, layer in enumerate(stack.layers):
        packed[:, index] = layer_tiles(layer)
    return packed.flatten(1, 2)


def packed_weights(depth: DepthTensors, cut: Cut) -> Tensor:
    """All matrices of the predictor, [blocks, chunks, elements of a chunk]: those of the layers, then the heads."""
    return torch.cat([packed_layers(depth.stack, cut), *(_tiles(head, cut) for head in depth.heads)], dim=1)


def packed_norms(stack: StackTensors, cut: Cut) -> Tensor:
    """The weights of all norms one after the other, those of the state filled up to whole blocks of 32 for each warp."""
    padding = (0, -stack.hidden % (32 * cut.warps))

    def norms(layer: Layer) -> list[Tensor]:
        assert layer.q_norm is not None and layer.k_norm is not None  # noqa: PT018
        return [functional.pad(layer.input_norm, padding), functional.pad(layer.post_norm, padding), layer.q_norm, layer.k_norm]

    return torch.cat([*(norm for layer in stack.layers for norm in norms(layer)), functional.pad(stack.norm, padding)])


def packets_of(depth: DepthTensors, rows: int) -> int:
    """Packets of two values that blocks exchange: q, k and v; attention; the state twice; the inner width; logits; two tokens a row."""
    stack = depth.stack
    inner, mixed = stack.layers[0].down.shape[1], stack.heads * stack.head_dim
    values = stack.layers[0].qkv.shape[0] + mixed + 2 * stack.hidden + inner + depth.heads.shape[1]
    return rows * values


def epochs_of(depth: DepthTensors) -> int:
    """Exchanges of a frame."""
    return len(depth.heads) * (5 * len(depth.stack.layers) + 1)


def kernel_name(cut: Cut, rows: int, tested: bool = False) -> str:
    """The kernel for so many rows, as the sources name it; `tested`: the one that a `Trial` needs."""
    return f"{cut.name}_{rows}" + ("_tested" if tested else "")


@cache
def _kernel(source: str, name: str, shared_bytes: int, device: int) -> Kernel:
    """A kernel on a device, made by the first code of its source that the driver takes."""
    fault = RuntimeError(f"there is no code of {source}")
    for code in binaries.candidates(source, torch.cuda.get_device_capability(device)):
        try:
            return Module(code, device).kernel(name, shared_bytes)
        except RuntimeError as error:
            fault = error
    raise fault


def resident_kernel(source: str, cut: Cut, rows: int, tested: bool, device: torch.device) -> Kernel:
    """The kernel of a cut. Raises RuntimeError where there is no code, or where the device does not hold all blocks at once."""
    kernel = _kernel(TESTED_SOURCE if tested else source, kernel_name(cut, rows, tested), cut.shared_bytes, device.index or 0)
    if (room := kernel.resident_blocks(cut.threads)) < cut.blocks:
        raise RuntimeError(f"The persistent kernel has {cut.blocks} blocks; this device holds {room} of them at once.")
    return kernel


class Predictor:
    """The packed weights of one predictor, which the launches for all numbers of rows share."""

    def __init__(self, weights: FrameTensors) -> None:
        """Raises ValueError for a predictor without a kernel (`known`)."""
        depth = weights.depth
        cut = cut_of(depth) if depth is not None and known(weights) else None
        if depth is None or cut is None:
            raise ValueError("There is no persistent kernel for this predictor.")
        self.frame, self.depth, self.cut = weights, depth, cut
        self.weights, self.norms = packed_weights(depth, cut), packed_norms(depth.stack, cut)

    @property
    def device(self) -> torch.device:
        return self.weights.device


class PredictorRun:
    """Launches for one number of rows: the packets that their blocks exchange, and what they count and report."""

    def __init__(
        self, predictor: Predictor, rows: int, patience: int = PATIENCE, gap: int | None = None, trial: Trial | None = None
    ) -> None:
        """`gap`: None means `GAP`; `trial`: for tests, what goes wrong in each launch.

        Raises RuntimeError where there is no code, or where the device does not hold all blocks at once.
        """
        self.predictor, self.rows, self.patience, self.trial = predictor, rows, patience, trial
        self.gap = GAP if gap is None else gap
        cut, depth, device = predictor.cut, predictor.depth, predictor.device
        self._kernel = resident_kernel(SOURCE, cut, rows, trial is not None, device)
        self.packets = torch.zeros(packets_of(depth, rows), 2, dtype=torch.int32, device=device)
        self.control = torch.zeros(3, dtype=torch.int32, device=device)

    @property
    def fault(self) -> str | None:
        """Who waited in vain first in an earlier launch, and for what, or None. Waits for the device."""
        word = int(self.control[_FAULT]) & 0xFFFFFFFF
        if not word:
            return None
        who, wanted = f"Block {word >> 20 & 0xFF} of the {_KERNELS[word >> 30 & 1]}", _WAITS[word >> 28 & 3]
        return f"{who} waited in vain for {wanted.format(word & 0xFFFFF)}."

    def launch(self, x: Tensor, rows: Tensor, codes: Tensor, finite: Tensor, flags: Tensor, state: StateTensors) -> None:
        """What `kernels.reference.run_frame` does behind code 0, on the current stream of the device.

        x: [2 * rows, width], the talker's states, projected where the model does, then the embeddings of the codes 0; rows: int64 [rows],
        the slots; codes: int64 [rows, codebooks] with code 0 filled in; finite: int32 [rows], whether its logits were; flags: uint8 [rows].
        Writes the other codes, the flags (with `FAILED`), and in `state` the next inputs, positions and frames.
        """
        frame, depth = self.predictor.frame, self.predictor.depth
        draws, feedback, text = state.residual, frame.feedback, frame.feedback.text
        assert text is not None
        tensors = (
            self.predictor.weights, self.predictor.norms, depth.stack.rope_table, x, depth.inputs, feedback.table, text, rows, state.seeds,
            draws.top_k, depth.starts, state.trailing, codes, state.frames, state.positions, finite, flags, draws.temperature, draws.top_p,
            draws.greedy, state.inputs, self.packets, self.control,
        )  # fmt: skip
        trial = self.trial or Trial()
        arguments = Arguments(
            *[tensor.data_ptr() for tensor in tensors], frame.draw.ends[0], state.dead, frame.backbone.hidden, state.trailing.shape[1],
            self.patience, self.gap, trial.delay, trial.silent, trial.starved, trial.keeping, trial.seed,
            depth.stack.eps, depth.stack.scale,
        )  # fmt: skip
        self._kernel.launch((self.predictor.cut.blocks, 1), self.predictor.cut.threads, arguments, stream_of(x.device), cooperative=True)


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
