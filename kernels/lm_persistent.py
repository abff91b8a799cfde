"""Persistent kernels, each of which computes a part of a frame in one cooperative launch: the code predictor, or the
talker's layers. Their supported models, packed weights and launches.

The kernels are in `kernels/cuda/persistent.cuh` and `persistent_talker.cuh`. Their twins are
`kernels.reference.depth_frame` and the layers of `kernels.reference.backbone_step`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_longlong, c_uint, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cuda_driver import Source, addresses, fields, index_of
from kernels.frame import FrameTensors, Layer, StackTensors, StateTensors
from kernels.lm_cuda import known_to_cuda

#: The sources in `kernels/cuda`: of the predictor, of the talker, and of the kernels that a `Trial` needs.
SOURCE = "persistent"
TALKER_SOURCE = "persistent_talker"
TESTED_SOURCE = "persistent_tested"
#: The numbers of rows for which there are kernels.
ROWS = (1, 2)
#: A bit of a frame's flags, in addition to those of `kernels.reference`: a block waited too long, so the frame is
#: invalid, and no other frame must follow it.
FAILED = 4
#: Number of times that a reader polls for packets before it gives up. They take seconds on a GPU, while a frame takes
#: a millisecond. For its weights a block may wait 32 times this many clocks per launch, which is 80 ms.
PATIENCE = 1 << 22
#: Clocks between two copies of a block's weight stream; the fastest in measurements (docs/adr/0009).
GAP = 1100
_FAULT = 1
#: The kernel and the wait that the word of a fault encodes, as in `Wait` of kernels/cuda/persistent_shape.cuh.
_KERNELS = ("predictor", "talker")
_WAITS = (
    "exchange {}",
    "the weights after exchange {}",
    "room for chunk {} of its weights",
    "the last copy into stage {}",
)
_TILE = 256  # elements: 8 rows of 32


class TileConfig(NamedTuple):
    """A kernel and its tiles: name, blocks, computing warps per block, tiles per warp in a chunk, shared memory."""

    name: str
    blocks: int
    warps: int
    tiles: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        """Threads of a block: those of the computing warps, and of one warp that streams weights."""
        return 32 * (self.warps + 1)


#: The compute capability on which `GAP` and the times of docs/adr/0009 were measured.
MEASURED_ON = (9, 0)
#: (width, inner width, heads, kv heads, size of a head, codes, layers, codebooks after code 0) -> kernel.
PREDICTORS: dict[tuple[int, ...], TileConfig] = {
    (1024, 3072, 16, 8, 128, 2048, 5, 15): TileConfig("persistent_published", 128, 8, 4, 232_448)
}
#: (width, inner width, heads, kv heads, size of a head) -> kernel.
TALKERS: dict[tuple[int, ...], TileConfig] = {
    (1024, 3072, 16, 8, 128): TileConfig("persistent_talker_published", 128, 8, 4, 232_448)
}


class Trial(NamedTuple):
    """Faults that a test injects into a launch of its kernels.

    Blocks sleep up to `delay` times for a short while, at random by `seed`; block `silent` sends nothing, block
    `starved` never receives one of its chunks of weights, and block `keeping` frees no chunk. -1: no block.
    """

    delay: int = 0
    silent: int = -1
    starved: int = -1
    keeping: int = -1
    seed: int = 0


#: The last fields of a launch's arguments.
_LAST_FIELDS = (
    *fields(c_int, "patience gap delay silent starved keeping"),
    ("seed", c_uint),
    *fields(c_float, "eps scale"),
)


class Arguments(ctypes.Structure):
    """`Args` of kernels/cuda/persistent_shape.cuh."""

    _fields_ = (
        *fields(
            c_void_p,
            "weights norms rope x inputs table text rows seeds top_k starts trailing codes frames positions finite flags",
        ),
        *fields(c_void_p, "temperature top_p greedy state_inputs packets control"),
        *fields(c_longlong, "end dead"),
        *fields(c_int, "talker trailing_width"),
        *_LAST_FIELDS,
    )


class TalkerArguments(ctypes.Structure):
    """`TalkArgs` of kernels/cuda/persistent_shape.cuh."""

    _fields_ = (
        *fields(
            c_void_p, "weights norms rope inputs x rows positions page_table keys values packets control"
        ),
        ("layer_size", c_longlong),
        *fields(c_int, "layers table_width page_size"),
        *_LAST_FIELDS,
    )


def predictor_config(weights: FrameTensors) -> TileConfig | None:
    """The kernel for the predictor of these weights; None if none supports its sizes and draw rules."""
    if (depth := weights.depth) is None or weights.backbone.hidden % 8 or not _plain(weights):
        return None
    later, codes, _ = depth.heads.shape
    return PREDICTORS.get((*_sizes(depth.stack), codes, len(depth.stack.layers), later))


def talker_config(weights: FrameTensors) -> TileConfig | None:
    """The kernel for the talker's layers of these weights; None if there is none."""
    return TALKERS.get(_sizes(weights.backbone)) if _plain(weights) else None


def _plain(weights: FrameTensors) -> bool:
    return known_to_cuda(weights) and weights.head.dtype == torch.bfloat16


def _sizes(stack: StackTensors) -> tuple[int, ...]:
    return stack.hidden, stack.inner, stack.heads, stack.kv_heads, stack.head_dim


def _tiles(weight: Tensor, config: TileConfig, halves: int = 1) -> Tensor:
    """Packs a matrix [n, inner] in the order in which the kernel reads it, [blocks, chunks, elements of a chunk].
    halves: 2 for a matrix of two halves (gate and up); each block gets rows of both."""
    n = weight.shape[0] // halves
    inner = weight.shape[1]
    groups = -(-n // (8 * config.blocks))
    steps = -(-inner // (32 * config.warps))
    filled = functional.pad(
        weight.view(halves, n, inner),
        (0, steps * config.warps * 32 - inner, 0, groups * config.blocks * 8 - n),
    )
    cells = filled.view(halves, config.blocks, groups, 8, config.warps, steps, 32)
    # A lane of a warp reads the 8 values at 8 * (lane % 4) of row lane / 4.
    tiles = cells.permute(1, 4, 5, 0, 2, 3, 6).reshape(
        config.blocks, config.warps, steps * halves * groups, _TILE
    )
    chunks = -(-tiles.shape[2] // config.tiles)
    tiles = functional.pad(tiles, (0, 0, 0, chunks * config.tiles - tiles.shape[2]))
    return (
        tiles.view(config.blocks, config.warps, chunks, config.tiles, _TILE)
        .transpose(1, 2)
        .reshape(config.blocks, chunks, -1)
    )


def packed_layers(stack: StackTensors, config: TileConfig) -> Tensor:
    """Packs the matrices of a stack in the order in which the kernel reads them, [blocks, chunks, elements of a
    chunk]. Needs memory for a second copy of only one layer at a time."""

    def layer_tiles(layer: Layer) -> Tensor:
        return torch.cat(
            [
                _tiles(layer.qkv, config),
                _tiles(layer.o, config),
                _tiles(layer.gate_up, config, 2),
                _tiles(layer.down, config),
            ],
            dim=1,
        )

    first = layer_tiles(stack.layers[0])
    packed = first.new_empty(config.blocks, len(stack.layers), *first.shape[1:])
    for index, layer in enumerate(stack.layers):
        packed[:, index] = layer_tiles(layer)
    return packed.flatten(1, 2)


def packed_norms(stack: StackTensors, config: TileConfig) -> Tensor:
    """The concatenated weights of all norms. Those of the norms of the state are padded to a multiple of 32 values
    per warp."""
    padding = (0, -stack.hidden % (32 * config.warps))

    def norms(layer: Layer) -> list[Tensor]:
        assert layer.q_norm is not None and layer.k_norm is not None  # noqa: PT018
        return [
            functional.pad(layer.input_norm, padding),
            functional.pad(layer.post_norm, padding),
            layer.q_norm,
            layer.k_norm,
        ]

    return torch.cat(
        [*(norm for layer in stack.layers for norm in norms(layer)), functional.pad(stack.norm, padding)]
    )


def _exchanged(stack: StackTensors) -> int:
    """Number of values that blocks exchange per row in a layer: q, k and v; the result of attention; the state, twice;
    the activations of the inner width."""
    return stack.layers[0].qkv.shape[0] + stack.heads * stack.head_dim + 2 * stack.hidden + stack.inner


def kernel_name(config: TileConfig, rows: int, tested: bool) -> str:
    """The name of the kernel for this number of rows. `tested`: the name of the one that a `Trial` needs."""
    return f"{config.name}_{rows}" + ("_tested" if tested else "")


@cache
def _source(source: str, kernel: str, shared_bytes: int) -> Source:
    return Source(source, {kernel: shared_bytes})


class _Kernel:
    """A kernel whose blocks all run at the same time on its device."""

    def __init__(
        self, source: str, config: TileConfig, rows: int, tested: bool, device: torch.device
    ) -> None:
        """Raises RuntimeError if there is no code for the device, or if it cannot hold all blocks at once."""
        self._name = kernel_name(config, rows, tested)
        self._config = config
        self._source = _source(TESTED_SOURCE if tested else source, self._name, config.shared_bytes)
        self._device = index_of(device.index)
        room = self._source.on(self._device)[self._name].resident_blocks(config.threads)
        if room < config.blocks:
            raise RuntimeError(
                f"The persistent kernel has {config.blocks} blocks; this device holds {room} of them at once."
            )

    def launch(self, arguments: ctypes.Structure) -> None:
        config = self._config
        self._source.launch(
            self._name, (config.blocks, 1), config.threads, arguments, self._device, cooperative=True
        )


class Predictor:
    """The packed weights of one predictor. Launches for all numbers of rows share them."""

    def __init__(self, weights: FrameTensors) -> None:
        """Raises ValueError for a predictor without a kernel (`predictor_config`)."""
        depth = weights.depth
        config = predictor_config(weights)
        if depth is None or config is None:
            raise ValueError("There is no persistent kernel for this predictor.")
        self.frame = weights
        self.depth = depth
        self.config = config
        #: [blocks, chunks, elements of a chunk]: the matrices of the layers, then the heads.
        self.weights = torch.cat(
            [packed_layers(depth.stack, config), *(_tiles(head, config) for head in depth.heads)], dim=1
        )
        self.norms = packed_norms(depth.stack, config)


class PredictorRun:
    """Launches the predictor's kernel for one number of rows. Holds the packets that its blocks exchange, the epochs
    that they count, and the fault that they report."""

    def __init__(
        self,
        predictor: Predictor,
        rows: int,
        patience: int = PATIENCE,
        gap: int | None = None,
        trial: Trial | None = None,
    ) -> None:
        """`gap`: None means `GAP`; `trial`: the faults that a test injects into each launch.

        Raises RuntimeError if there is no code for the device, or if it cannot hold all blocks at once.
        """
        self.predictor = predictor
        self.rows = rows
        self.patience = patience
        self.trial = trial
        self.gap = GAP if gap is None else gap
        depth = predictor.depth
        device = predictor.weights.device
        self._kernel = _Kernel(SOURCE, predictor.config, rows, trial is not None, device)
        # A packet has two values, and a row has two tokens in the first pass.
        self.packets = torch.zeros(
            rows * (_exchanged(depth.stack) + depth.heads.shape[1]), 2, dtype=torch.int32, device=device
        )
        self.control = torch.zeros(3, dtype=torch.int32, device=device)

    @property
    def fault(self) -> str | None:
        """Which block first waited too long in an earlier launch, and what for, or None. Waits for the device."""
        word = int(self.control[_FAULT]) & 0xFFFFFFFF
        if not word:
            return None
        who = f"Block {word >> 20 & 0xFF} of the {_KERNELS[word >> 30 & 1]}"
        wanted = _WAITS[word >> 28 & 3]
        return f"{who} waited too long for {wanted.format(word & 0xFFFFF)}."

    def rest(self, stack: StackTensors) -> tuple[float, ...]:
        """The values of `_LAST_FIELDS` for a launch."""
        return self.patience, self.gap, *(self.trial or Trial()), stack.eps, stack.scale

    def launch(
        self, x: Tensor, rows: Tensor, codes: Tensor, finite: Tensor, flags: Tensor, state: StateTensors
    ) -> None:
        """Computes `kernels.reference.draw_frame` after code 0, on the current stream of the device.

        x: [2 * rows, width], the talker's states, which are projected if the model does so, then the embeddings of
        the codes 0; rows: int64 [rows], the slots; codes: int64 [rows, codebooks], of which code 0 is set;
        finite: int32 [rows], whether the logits of code 0 were finite; flags: uint8 [rows]. Writes the other codes,
        the flags (`FAILED` too), and in `state` the next inputs, positions and frames.
        """
        predictor = self.predictor
        frame = self.predictor.frame
        depth = self.predictor.depth
        draws = state.residual
        feedback = frame.feedback
        pointers = addresses(
            predictor.weights, predictor.norms, depth.stack.rope_table, x, depth.inputs, feedback.table, feedback.text, rows, state.seeds,
            draws.top_k, depth.starts, state.trailing, codes, state.frames, state.positions, finite, flags, draws.temperature, draws.top_p,
            draws.greedy, state.inputs, self.packets, self.control,
        )  # fmt: skip
        numbers = (frame.draw.ends[0], state.dead, frame.backbone.hidden, state.trailing.shape[1])
        self._kernel.launch(Arguments(*pointers, *numbers, *self.rest(depth.stack)))


class Talker:
    """The packed weights of one talker. Launches for all numbers of rows share them."""

    def __init__(self, weights: FrameTensors) -> None:
        """Raises ValueError for a talker without a kernel (`talker_config`)."""
        if (config := talker_config(weights)) is None:
            raise ValueError("There is no persistent kernel for this talker.")
        self.stack = weights.backbone
        self.config = config
        self.weights = packed_layers(self.stack, config)
        self.norms = packed_norms(self.stack, config)


class TalkerRun:
    """Launches the talker's kernel for the same number of rows as a `PredictorRun`, to which it also reports its
    faults."""

    def __init__(self, talker: Talker, predictor_run: PredictorRun) -> None:
        """Raises RuntimeError if there is no code for the device, or if it cannot hold all blocks at once."""
        self.talker = talker
        self.predictor_run = predictor_run
        stack = talker.stack
        config = talker.config
        device = talker.weights.device
        self._kernel = _Kernel(
            TALKER_SOURCE, config, predictor_run.rows, predictor_run.trial is not None, device
        )
        # A packet has two values, but a packet of attention's partial results has only one.
        packets = _exchanged(stack) // 2 + config.blocks // stack.kv_heads * stack.heads * (
            stack.head_dim + 2
        )
        self.packets = torch.zeros(predictor_run.rows * packets, 2, dtype=torch.int32, device=device)

    def launch(self, x: Tensor, rows: Tensor, state: StateTensors, keys: Tensor, values: Tensor) -> None:
        """Runs the talker's step of the slots `rows` int64 [rows], and writes its state before the final norm into x
        [rows, width].

        keys, values: [layers, pages, kv_heads, page_size, head_dim], to which the keys and values of the new position
        are appended.
        """
        talker = self.talker
        predictor_run = self.predictor_run
        stack = self.talker.stack
        pointers = addresses(
            talker.weights, talker.norms, stack.rope_table, state.inputs, x, rows, state.positions, state.page_table, keys, values,
            self.packets, predictor_run.control,
        )  # fmt: skip
        numbers = (keys.stride(0), len(stack.layers), state.page_table.shape[1], keys.shape[3])
        self._kernel.launch(TalkerArguments(*pointers, *numbers, *predictor_run.rest(stack)))
