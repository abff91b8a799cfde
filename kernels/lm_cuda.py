"""The CUDA C++ kernels of `kernels/cuda`: which shapes they know, and their launches on the current stream of a device."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from kernels import binaries, toolchain
from kernels.cuda_driver import Kernel, Module

log = logging.getLogger(__name__)

PLAIN, RESIDUAL, SWIGLU, BIAS = range(4)
FIRST, MIDDLE, LAST = range(3)

#: How a skinny product is cut: groups of 8 weight rows a block, tiles of 16 rows, warps, and blocks of 32 along the inner size a warp.
Partition = tuple[int, int, int, int]
#: By (inner size, has norm, epilogue): the partitions for up to 8 rows, up to 16, and more.
_PARTITIONS: dict[tuple[int, bool, int], tuple[Partition, Partition, Partition]] = {
    (1024, True, PLAIN): ((2, 1, 8, 4), (2, 1, 8, 4), (2, 2, 8, 4)),
    (1024, False, PLAIN): ((4, 1, 16, 2), (4, 1, 16, 2), (4, 2, 16, 2)),
    (1024, False, SWIGLU): ((6, 1, 16, 2), (6, 1, 16, 2), (6, 2, 16, 2)),
    (1024, True, SWIGLU): ((6, 1, 8, 4), (6, 1, 8, 4), (6, 2, 8, 4)),
    (2048, True, PLAIN): ((4, 1, 16, 4), (4, 1, 16, 4), (4, 1, 16, 4)),
    (2048, True, SWIGLU): ((4, 1, 16, 4), (4, 1, 16, 4), (4, 1, 16, 4)),
    (2048, False, RESIDUAL): ((1, 1, 8, 8), (1, 1, 16, 4), (1, 2, 16, 4)),
    (2048, False, BIAS): ((1, 1, 8, 8), (1, 1, 8, 8), (1, 2, 8, 8)),
    (3072, False, RESIDUAL): ((1, 1, 12, 8), (1, 1, 16, 6), (1, 2, 16, 6)),
    (6144, False, RESIDUAL): ((1, 1, 16, 12), (1, 1, 16, 12), (1, 1, 16, 12)),
}
#: The same for (1024, True, PLAIN) where the output is wide.
_WIDE_OUTPUT: tuple[Partition, Partition, Partition] = ((4, 1, 8, 4), (4, 1, 8, 4), (4, 2, 8, 4))
_WIDE_FROM = 4096
_DRAWS = {FIRST: "draw_first", MIDDLE: "draw_middle", LAST: "draw_last"}
_ATTENTION_WARPS, _DRAW_EACH, _MAX_CODEBOOKS = 4, 8, 32
#: Blocks of the predictor's attention, at most: four on each multiprocessor of an H200 or H100.
_ATTENTION_BLOCKS = 4 * 132


class _SkinnyArguments(ctypes.Structure):
    """`Args` of kernels/cuda/skinny.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "norm", "extra", "y", "normed", "ahead")),
        ("ahead_bytes", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "n", "x_stride", "y_stride", "late")),
        ("eps", ctypes.c_float),
    )


class _AttentionArguments(ctypes.Structure):
    """`Args` of kernels/cuda/predictor_attention.cu."""

    _fields_ = (
        ("tensors", ctypes.c_void_p * 7),
        *((name, ctypes.c_int) for name in ("rows", "kv_heads", "position")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _DrawArguments(ctypes.Structure):
    """`Args` of kernels/cuda/sampler.cu."""

    _fields_ = (("tensors", ctypes.c_void_p * 23), ("large", ctypes.c_longlong * 3), ("small", ctypes.c_int * 8))


def kernel_name(partition: Partition, normed: bool, epilogue: int) -> str:
    """The skinny kernel of a partition, as kernels/cuda/skinny.cu names it."""
    return "_".join(["skinny", *(str(int(part)) for part in (*partition, normed, epilogue))])


def shared_bytes(partition: Partition) -> int:
    """Dynamic shared memory of a skinny kernel: a block's weights, the warps' partial sums, and squares for the norm."""
    groups, tiles, warps, blocks = partition
    width = groups * 8
    padded = width if width % 32 in (8, 24) else width + 8
    return warps * groups * blocks * 32 * 16 + warps * tiles * 16 * padded * 4 + warps * tiles * 16 * 4


def kernels_of(name: str) -> dict[str, int]:
    """All kernels of one source of `kernels.binaries.NAMES`, with their dynamic shared memory in bytes."""
    if name == "skinny":
        known = [(shape, partition) for shape, three in _PARTITIONS.items() for partition in three]
        known += [((1024, True, PLAIN), partition) for partition in _WIDE_OUTPUT]
        return {kernel_name(partition, normed, epilogue): shared_bytes(partition) for (_, normed, epilogue), partition in known}
    return dict.fromkeys(_DRAWS.values() if name == "sampler" else (f"predictor_attention_{pairs}" for pairs in range(1, 9)), 0)


@cache
def _kernels(name: str, device: int) -> dict[str, Kernel]:
    """The kernels of one source on a device, made by the first code that its driver takes."""
    fault = RuntimeError(f"there is no code of {name}")
    for code in binaries.candidates(name, torch.cuda.get_device_capability(device)):
        try:
            module = Module(code, device)
            return {kernel: module.kernel(kernel, size) for kernel, size in kernels_of(name).items()}
        except RuntimeError as error:
            fault = error
    raise fault


def available(device: int | None = None) -> bool:
    """Whether the CUDA C++ kernels can run on a device (None: the current one): sm_90 or newer, with a driver that takes their code,
    brought, kept or compiled now.

    Where that fails on a device that could run them, one warning for each device says so.
    """
    return torch.cuda.is_available() and prepared(_index(device))


@cache
def prepared(device: int) -> bool:
    """As `available`, for the index of a device that is there."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        with ThreadPoolExecutor(len(binaries.NAMES)) as pool:
            list(pool.map(lambda name: _kernels(name, device), binaries.NAMES))
    except (RuntimeError, OSError) as error:
        log.warning(
            "the CUDA C++ kernels cannot be made (%s); batches of few requests run on Triton's kernels, which are slower. %s",
            toolchain.first_line(error), toolchain.CUDA_ADVICE, exc_info=True,
        )  # fmt: skip
        return False
    return True


def _index(device: int | None) -> int:
    return torch.cuda.current_device() if device is None else device


def has_skinny(inner: int, normed: bool, epilogue: int) -> bool:
    """Whether the skinny kernel knows this shape."""
    return (inner, normed, epilogue) in _PARTITIONS


def _launch(
    name: str, kernel: str, grid: tuple[int, int], threads: int, arguments: ctypes.Structure, programmatic: bool, device: int | None
) -> None:
    index = _index(device)
    _kernels(name, index)[kernel].launch(grid, threads, arguments, torch.cuda.current_stream(index).cuda_stream, programmatic)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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

    x: [rows, inner]; weight: [n, inner], for SWIGLU [2 * n, inner] with the gate's rows first; y: [rows, n]; norm: [inner], RMSNorm of
    x in the order of the reference; extra: what RESIDUAL adds, [rows, n] (may be y), or BIAS, [n]; normed: [rows, inner] to keep
    norm(x); ahead: a weight that a later launch reads, brought into the L2 meanwhile; late: the next kernel may start once the
    activations are here, not before; pdl: programmatic dependent launch.
    A row's bits do not depend on its neighbours, and on `rows` only by whether they are more than 8.
    Raises RuntimeError for a shape that has no kernel.
    """
    rows, inner = x.shape
    width, shape = y.shape[1], (inner, norm is not None, epilogue)
    if shape not in _PARTITIONS:
        raise RuntimeError(f"There is no skinny product of inner={inner}, norm={norm is not None}, epilogue={epilogue}.")
    wide = shape == (1024, True, PLAIN) and width % 32 == 0 and width >= _WIDE_FROM
    partition = (_WIDE_OUTPUT if wide else _PARTITIONS[shape])[0 if rows <= 8 else 1 if rows <= 16 else 2]
    groups, tiles, warps, _ = partition
    block_width = (groups // 2 if epilogue == SWIGLU else groups) * 8
    if width % block_width:
        raise RuntimeError(f"A skinny product's n={width} is no multiple of {block_width}.")
    bytes_ahead = 0 if ahead is None else ahead.numel() * ahead.element_size()
    pointers = [_address(tensor) for tensor in (x, weight, norm, extra, y, normed, ahead)]
    arguments = _SkinnyArguments(*pointers, bytes_ahead, rows, width, x.stride(0), y.stride(0), int(late), eps)
    grid = (width // block_width, -(-rows // (tiles * 16)))
    _launch("skinny", kernel_name(partition, norm is not None, epilogue), grid, warps * 32, arguments, pdl, x.device.index)
    return y


def has_predictor_attention(heads: int, kv_heads: int, span: int, head_dim: int) -> bool:
    """Whether the predictor's attention kernel knows these sizes."""
    return heads == 2 * kv_heads and span == 16 and head_dim == 128


def predictor_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, rope_table: Tensor, k_cache: Tensor, v_cache: Tensor, position: int,
    scale: float, out: Tensor, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """`kernels.lm_attention.predictor_attention` for one token a row at `position` 1..15: bfloat16, heads of 128, pairs of query heads."""
    if not 1 <= position < k_cache.shape[2]:
        raise RuntimeError(f"Predictor attention has no position {position}.")
    rows, kv_heads = qkv.shape[0], k_cache.shape[1]
    tensors = (qkv, q_weight, k_weight, rope_table, k_cache, v_cache, out)
    pointers = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
    arguments = _AttentionArguments(pointers, rows, kv_heads, position, eps, scale)
    kernel = f"predictor_attention_{(position + 1) // 2}"
    grid = (min(-(-rows // _ATTENTION_WARPS), max(1, _ATTENTION_BLOCKS // kv_heads)), kv_heads)
    _launch("predictor_attention", kernel, grid, _ATTENTION_WARPS * 32, arguments, pdl, qkv.device.index)
    return out


def has_draw(vocab: int, width: int, hidden: int) -> bool:
    """Whether the sampler kernel knows these sizes."""
    return vocab % 256 == 0 and vocab <= 4096 and width % 8 == 0 and hidden % 8 == 0


def draw(pointers: Sequence[Tensor], numbers: Sequence[int], stage: int, pdl: bool = True) -> None:
    """One launch of `kernels/cuda/sampler.cu`; pointers are in the order of its `Args`, so are numbers. Raises RuntimeError as `skinny`."""
    large, small = numbers[:3], numbers[3:]
    rows, vocab, _, codebooks, width, talker, *_ = small
    if not has_draw(vocab, width, talker) or codebooks > _MAX_CODEBOOKS:
        raise RuntimeError(f"There is no draw of vocab={vocab}, codebooks={codebooks}, width={width}, talker={talker}.")
    tensors = (ctypes.c_void_p * len(pointers))(*[tensor.data_ptr() for tensor in pointers])
    arguments = _DrawArguments(tensors, (ctypes.c_longlong * 3)(*large), (ctypes.c_int * 8)(*small))
    _launch("sampler", _DRAWS[stage], (rows, 1), vocab // _DRAW_EACH, arguments, pdl, pointers[0].device.index)
