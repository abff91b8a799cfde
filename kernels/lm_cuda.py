"""CUDA C++ kernels of decoding for few rows: supported shapes and models, and launches.

They are products (`kernels/cuda/skinny.cu`), the attention of the depth, which is also called the code predictor
(`predictor_attention.cu`), and draws (`sampler.cu`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_longlong, c_void_p
from typing import NamedTuple

from torch import Tensor

from kernels.cuda_driver import Source, addresses, fields
from kernels.frame import FrameTensors, Layer, StackTensors

#: What a product does with its sums: nothing, add a residual, SwiGLU, or add a bias.
PLAIN, RESIDUAL, SWIGLU, BIAS = range(4)
#: Which codebook of a frame a launch draws: the first, one in between, the last, or the only one (in Triton alone).
FIRST, MIDDLE, LAST, ONLY = range(4)


class Partition(NamedTuple):
    """How a skinny product is divided. Per block: groups of 8 weight rows, tiles of 16 rows of x, and warps; per
    warp: blocks of 32 values of the inner size."""

    groups: int
    tiles: int
    warps: int
    blocks: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: its weights, the warps' partial sums, and the squares for the norm."""
        width = self.groups * 8
        padded = width if width % 32 in (8, 24) else width + 8
        return self.warps * (
            self.groups * self.blocks * 32 * 16 + self.tiles * 16 * padded * 4 + self.tiles * 16 * 4
        )


#: (inner size, has norm, epilogue) -> (groups, warps for up to 8 rows, warps for more rows, tiles for more than 16
#: rows).
TILE_CONFIGS = {
    (1024, True, PLAIN): (2, 8, 8, 2),
    (1024, True, SWIGLU): (6, 8, 8, 2),
    (2048, True, PLAIN): (4, 16, 16, 1),
    (2048, True, SWIGLU): (4, 16, 16, 1),
    (2048, False, RESIDUAL): (1, 8, 16, 2),
    (2048, False, BIAS): (1, 8, 8, 2),
    (3072, False, RESIDUAL): (1, 12, 16, 2),
    (6144, False, RESIDUAL): (1, 16, 16, 1),
}
#: A shape, its number of groups if it has many outputs, and the minimum number of outputs for that.
_WIDE_SHAPE = (1024, True, PLAIN)
_WIDE_GROUPS = 4
WIDE_FROM = 4096
_ATTENTION_WARPS = 4
_DRAW_EACH = 8
_MAX_CODEBOOKS = 32
#: Maximum blocks of the predictor's attention: four on each multiprocessor of an H200 or H100.
ATTENTION_BLOCKS = 4 * 132


def partition_of(shape: tuple[int, bool, int], rows: int, wide: bool) -> Partition:
    """The tiles of a product with a shape in `TILE_CONFIGS`, for this number of rows."""
    groups, few, more, tiles = TILE_CONFIGS[shape]
    warps = few if rows <= 8 else more
    return Partition(
        _WIDE_GROUPS if wide else groups, tiles if rows > 16 else 1, warps, shape[0] // (32 * warps)
    )


def skinny_name(partition: Partition, normed: bool, epilogue: int) -> str:
    """The skinny kernel of a partition, as named in kernels/cuda/skinny.cu."""
    return "_".join(["skinny", *(str(int(part)) for part in (*partition, normed, epilogue))])


def _skinny_kernels() -> dict[str, int]:
    shapes = [(shape, False) for shape in TILE_CONFIGS] + [(_WIDE_SHAPE, True)]
    configs = [(shape, partition_of(shape, rows, wide)) for shape, wide in shapes for rows in (8, 16, 17)]
    return {
        skinny_name(config, normed, epilogue): config.shared_bytes
        for (_, normed, epilogue), config in configs
    }


SKINNY = Source(
    "skinny", _skinny_kernels(), "batches of few requests run on Triton's kernels, which are slower"
)
ATTENTION = Source("predictor_attention", {f"predictor_attention_{pairs}": 0 for pairs in range(1, 9)})
DRAWS = Source("sampler", dict.fromkeys(("draw_first", "draw_middle", "draw_last"), 0))
#: The sources that every captured frame needs.
SOURCES = (SKINNY, ATTENTION, DRAWS)


class SkinnyArguments(ctypes.Structure):
    """`Args` of kernels/cuda/skinny.cu."""

    _fields_ = (
        *fields(c_void_p, "x w norm extra y normed ahead"),
        ("ahead_bytes", c_longlong),
        *fields(c_int, "rows n x_stride y_stride late"),
        ("eps", c_float),
    )


class AttentionArguments(ctypes.Structure):
    """`Args` of kernels/cuda/predictor_attention.cu."""

    _fields_ = (
        ("tensors", c_void_p * 7),
        *fields(c_int, "rows kv_heads position"),
        *fields(c_float, "eps scale"),
    )


class DrawArguments(ctypes.Structure):
    """`Args` of kernels/cuda/sampler.cu."""

    _fields_ = (("tensors", c_void_p * 24), ("large", c_longlong * 3), ("small", c_int * 8))


def known_to_cuda(weights: FrameTensors) -> bool:
    """Whether the CUDA C++ kernels support the frame's attention, draws and feedback, regardless of sizes."""
    depth = weights.depth
    rules = weights.draw
    feedback = weights.feedback
    if (
        depth is None
        or feedback.starts is not depth.starts
        or feedback.text is None
        or feedback.text_by_code
        or feedback.scale != 1
    ):
        return False
    plain = not rules.nucleus_first and not rules.window and len(rules.ends) == 1
    layers = [layer for stack in weights.stacks for layer in stack.layers]
    normed = all(
        layer.qkv_bias is None and layer.q_norm is not None and layer.k_norm is not None for layer in layers
    )
    return plain and normed and not any(stack.wide_rope for stack in weights.stacks)


def skinny(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    epilogue: int = PLAIN,
    extra: Tensor | None = None,
    normed: Tensor | None = None,
    ahead: Tensor | None = None,
    late: bool = True,
    pdl: bool = True,
) -> Tensor:
    """y = epilogue(norm(x) @ weight.T) for few rows, bfloat16, launched on the current stream of x's device.

    x: [rows, inner]; weight: [n, inner], for SWIGLU [2 * n, inner] with the gate's rows first; y: [rows,
    n]; norm: [inner], weight of an RMSNorm of x, which rounds like the published model; extra: the residual
    [rows, n] for RESIDUAL (may be y), or the bias [n] for BIAS; normed: [rows, inner], receives norm(x); ahead:
    a weight of a later launch, which is prefetched into the L2 cache; late: the next kernel may start only after
    the activations have been read; pdl: programmatic dependent launch. A row's bits do not depend on other rows,
    and depend on `rows` only by whether it is more than 8. Raises RuntimeError for a shape without a kernel.
    """
    rows, inner = x.shape
    width = y.shape[1]
    shape = (inner, norm is not None, epilogue)
    if shape not in TILE_CONFIGS:
        raise RuntimeError(
            f"There is no skinny product of inner={inner}, norm={norm is not None}, epilogue={epilogue}."
        )
    partition = partition_of(
        shape, rows, wide=shape == _WIDE_SHAPE and width % 32 == 0 and width >= WIDE_FROM
    )
    block_width = (partition.groups // 2 if epilogue == SWIGLU else partition.groups) * 8
    if width % block_width:
        raise RuntimeError(f"A skinny product's n={width} is no multiple of {block_width}.")
    bytes_ahead = 0 if ahead is None else ahead.numel() * ahead.element_size()
    pointers = addresses(x, weight, norm, extra, y, normed, ahead)
    arguments = SkinnyArguments(*pointers, bytes_ahead, rows, width, x.stride(0), y.stride(0), int(late), eps)
    kernel = skinny_name(partition, norm is not None, epilogue)
    grid = (width // block_width, -(-rows // (partition.tiles * 16)))
    SKINNY.launch(kernel, grid, partition.warps * 32, arguments, x.device.index, programmatic=pdl)
    return y


def has_predictor_attention(heads: int, kv_heads: int, span: int, head_dim: int) -> bool:
    """Whether the predictor's attention kernel supports these sizes."""
    return heads == 2 * kv_heads and span == 16 and head_dim == 128


def predictor_attention(
    qkv: Tensor, layer: Layer, stack: StackTensors, k_cache: Tensor, v_cache: Tensor, position: int, out: Tensor, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """`kernels.lm_attention.predictor_attention` for one token per row at `position` 1 to 15, in bfloat16, with
    normalized heads of size 128 and two query heads per kv head."""
    if not 1 <= position < k_cache.shape[2]:
        raise RuntimeError(f"Predictor attention has no position {position}.")
    rows = qkv.shape[0]
    kv_heads = k_cache.shape[1]
    tensors = qkv, layer.q_norm, layer.k_norm, stack.rope_table, k_cache, v_cache, out
    pointers = (c_void_p * 7)(*addresses(*tensors))
    arguments = AttentionArguments(pointers, rows, kv_heads, position, stack.eps, stack.scale)
    grid = (min(-(-rows // _ATTENTION_WARPS), max(1, ATTENTION_BLOCKS // kv_heads)), kv_heads)
    kernel = f"predictor_attention_{(position + 1) // 2}"
    ATTENTION.launch(kernel, grid, _ATTENTION_WARPS * 32, arguments, qkv.device.index, programmatic=pdl)
    return out


def has_draw(vocab: int, width: int, hidden: int) -> bool:
    """Whether the sampler kernel supports these sizes."""
    return vocab % 256 == 0 and vocab <= 4096 and width % 8 == 0 and hidden % 8 == 0


def draw(pointers: Sequence[Tensor], numbers: Sequence[int], stage: int, pdl: bool = True) -> None:
    """Launches a kernel of `kernels/cuda/sampler.cu`; pointers and numbers have the order of its `Args`. Raises
    RuntimeError for sizes without a kernel."""
    large = numbers[:3]
    small = numbers[3:]
    rows, vocab, _, codebooks, width, talker, *_ = small
    if not has_draw(vocab, width, talker) or codebooks > _MAX_CODEBOOKS:
        raise RuntimeError(
            f"There is no draw of vocab={vocab}, codebooks={codebooks}, width={width}, talker={talker}."
        )
    arguments = DrawArguments(
        (c_void_p * 24)(*addresses(*pointers)), (c_longlong * 3)(*large), (c_int * 8)(*small)
    )
    kernel = list(DRAWS.kernels)[stage]
    DRAWS.launch(
        kernel, (rows, 1), vocab // _DRAW_EACH, arguments, pointers[0].device.index, programmatic=pdl
    )
