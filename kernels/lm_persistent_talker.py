"""The talker's layers of a frame in one cooperative launch: which models it knows, its weights, its launch, and frames with it.

The kernel is `kernels/cuda/persistent_talker.cuh`, its twin the layers of `kernels.reference.backbone_step`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from kernels import lm_persistent
from kernels.frame import DepthTensors, FrameTensors, StackTensors, StateTensors
from kernels.lm_frame import FusedFrame, Plan, known_to_cuda
from kernels.lm_persistent import PredictorRun, all_blocks_speak, packed_layers, packed_norms, resident_kernel, stream_of
from kernels.persistent_cuts import TALKERS, Cut

#: The source in `kernels/cuda`.
SOURCE = "persistent_talker"


class Arguments(ctypes.Structure):
    """`TalkArgs` of kernels/cuda/persistent_shape.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "norms", "rope", "inputs", "x", "rows", "positions", "page_table")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "packets", "control")),
        ("layer_size", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in ("layers", "table_width", "page_size", "patience", "gap", "delay", "silent", "starved", "keeping")
        ),
        ("seed", ctypes.c_uint),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


def cut_of(stack: StackTensors) -> Cut | None:
    """How these layers are cut; None where there is no kernel for them."""
    inner = stack.layers[0].down.shape[1]
    cut = TALKERS.get((stack.hidden, inner, stack.heads, stack.kv_heads, stack.head_dim))
    return cut if cut is not None and all_blocks_speak(cut.blocks, stack.hidden, inner) else None


def known(weights: FrameTensors) -> bool:
    """Whether there is a kernel for the talker of these weights."""
    return known_to_cuda(weights) and cut_of(weights.backbone) is not None and weights.head.dtype == torch.bfloat16


def packets_of(stack: StackTensors, cut: Cut, rows: int) -> int:
    """Packets that blocks exchange: q, k and v; attention; the state twice; the inner width; and each value of attention's parts."""
    inner, mixed = stack.layers[0].down.shape[1], stack.heads * stack.head_dim
    pairs = (stack.layers[0].qkv.shape[0] + mixed + 2 * stack.hidden + inner) // 2
    return rows * (pairs + cut.blocks // stack.kv_heads * stack.heads * (stack.head_dim + 2))


class Talker:
    """The packed weights of one talker, which the launches for all numbers of rows share."""

    def __init__(self, weights: FrameTensors) -> None:
        """Raises ValueError for a talker without a kernel (`known`)."""
        cut = cut_of(weights.backbone) if known(weights) else None
        if cut is None:
            raise ValueError("There is no persistent kernel for this talker.")
        self.stack, self.cut = weights.backbone, cut
        self.weights, self.norms = packed_layers(self.stack, cut), packed_norms(self.stack, cut)


class TalkerRun:
    """Launches for the number of rows of a predictor's, with which they share what blocks report."""

    def __init__(self, talker: Talker, behind: PredictorRun) -> None:
        """Raises RuntimeError where there is no code, or where the device does not hold all blocks at once."""
        self.talker, self.behind = talker, behind
        device = talker.weights.device
        self._kernel = resident_kernel(SOURCE, talker.cut, behind.rows, behind.trial is not None, device)
        self.packets = torch.zeros(packets_of(talker.stack, talker.cut, behind.rows), 2, dtype=torch.int32, device=device)

    def launch(self, x: Tensor, rows: Tensor, state: StateTensors, keys: Tensor, values: Tensor) -> None:
        """The talker's step of the slots `rows` int64 [rows] into x [rows, width], its state before the last norm.

        keys, values: [layers, pages, kv_heads, page_size, head_dim], to which those of the new position are added.
        """
        talker, behind, stack = self.talker, self.behind, self.talker.stack
        tensors = (
            talker.weights, talker.norms, stack.rope_table, state.inputs, x, rows, state.positions, state.page_table, keys, values,
            self.packets, behind.control,
        )  # fmt: skip
        trial = behind.trial or lm_persistent.Trial()
        arguments = Arguments(
            *[tensor.data_ptr() for tensor in tensors], keys.stride(0), len(stack.layers), state.page_table.shape[1], keys.shape[3],
            behind.patience, behind.gap, trial.delay, trial.silent, trial.starved, trial.keeping, trial.seed, stack.eps, stack.scale,
        )  # fmt: skip
        self._kernel.launch((talker.cut.blocks, 1), talker.cut.threads, arguments, stream_of(x.device), cooperative=True)


class PersistentFrame(FusedFrame):
    """A frame of persistent kernels, for the one number of rows of their launches: the codebooks behind code 0, and the talker's layers
    where `talker` is given."""

    def __init__(
        self, behind: PredictorRun, state: StateTensors, k_cache: Tensor, v_cache: Tensor, plan: Plan, talker: Talker | None = None
    ) -> None:
        # No kernel is launched early behind a cooperative one.
        plan = plan if talker is None else replace(plan, pdl=False)
        super().__init__(behind.predictor.frame, state, k_cache, v_cache, behind.rows, plan)
        self.behind, self.talker = behind, None if talker is None else TalkerRun(talker, behind)

    def _backbone(self, rows: Tensor, x: Tensor) -> None:
        if self.talker is None:
            super()._backbone(rows, x)
        else:
            self.talker.launch(x, rows, self.state, self._keys, self._values)
            self._pending = None

    def _behind(self, depth: DepthTensors, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        self.behind.launch(self._x[1], rows, codes, self._finite, flags, self.state)
