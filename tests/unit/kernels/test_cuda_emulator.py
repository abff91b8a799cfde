"""The emulator of CUDA: kernels that are right give one result in any order of threads, and each kind of
fault shows."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.support.cuda_emulated import EMULATOR, Kernel, KernelError, build, guarded

(
    RIGHT,
    NO_BARRIER,
    NO_WAIT,
    NEVER_SENT,
    NO_ARRIVAL,
    APART,
    TOO_FAR,
    NOT_WRITTEN,
    NOT_FINISHED,
    NO_FENCE,
    NO_BEGIN,
) = range(11)
SEEDS = range(20)


class Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("in", "out", "words")),
        ("n", ctypes.c_int),
        ("fault", ctypes.c_int),
    )


@cache
def library() -> ctypes.CDLL:
    return build(
        EMULATOR / "examples.cu",
        ("turned", "relay", "read_back", "streamed", "multiplied_96", "multiplied_192"),
    )


def run(
    name: str,
    given: Tensor,
    size: int,
    blocks: int,
    threads: int,
    n: int,
    fault: int,
    seed: int,
    together: bool,
    shared: int = 256,
) -> list[int]:
    """What a kernel of examples.cu writes, `size` words."""
    out, words = (
        guarded(torch.full((size,), -2, dtype=torch.int32)),
        guarded(torch.zeros(blocks, dtype=torch.int32)),
    )
    kernel = Kernel(library(), name, shared, seed, together)
    kernel.launch(
        (blocks, 1), threads, Arguments(given.data_ptr(), out.data_ptr(), words.data_ptr(), n, fault)
    )
    return out.tolist()


def turned(fault: int, seed: int) -> list[int]:
    return run(
        "turned", guarded(torch.arange(320, dtype=torch.int32)), 320, 5, 64, 0, fault, seed, seed % 2 == 0
    )


def relay(fault: int, seed: int) -> list[int]:
    return run("relay", guarded(torch.ones(192, dtype=torch.int32)), 6, 6, 32, 0, fault, seed, True)


def read_back(fault: int, seed: int) -> list[int]:
    return run("read_back", guarded(torch.arange(64, dtype=torch.int32)), 128, 2, 32, 0, fault, seed, True)


def streamed(fault: int, seed: int) -> list[int]:
    return run(
        "streamed", guarded(torch.ones(3 * 7 * 32, dtype=torch.int32)), 96, 3, 64, 7, fault, seed, True
    )


def pieces(count: int, n: int) -> Tensor:
    """Small whole numbers as bf16, [count, 8]."""
    return torch.randint(-2, 3, (count, 8), generator=torch.Generator().manual_seed(n)).bfloat16()


def multiplied(columns: int, fault: int, seed: int) -> list[int]:
    given = pieces(140 + 6 * columns, columns)
    shared = 2 * 71 * 16 + 6 * columns * 16
    return run(
        f"multiplied_{columns}",
        guarded(given).view(torch.int32),
        64 * columns,
        1,
        160,
        0,
        fault,
        seed,
        False,
        shared,
    )


def multiplied_96(fault: int, seed: int) -> list[int]:
    return multiplied(96, fault, seed)


def multiplied_192(fault: int, seed: int) -> list[int]:
    return multiplied(192, fault, seed)


def products(columns: int) -> list[int]:
    """What `multiplied` has to write, as its threads hold it."""
    given = pieces(140 + 6 * columns, columns).float()
    slabs, matrices = given[:140].view(2, 70, 8), given[140:].view(3, 2, columns, 8)
    rows = slabs.transpose(0, 1).reshape(70, 16)
    first, second, third = matrices.transpose(1, 2).reshape(3, columns, 16)
    hidden = rows[:64] @ first.T + rows[5:69] @ second.T
    out = hidden[:, :16].bfloat16().float() @ third.T
    # d[4 i + 2 r + j] of thread t of warp w is row 16 w + t / 4 + 8 r, column 8 i + 2 (t % 4) + j.
    held = out.view(4, 2, 8, columns // 8, 4, 2).permute(3, 1, 5, 0, 2, 4)
    return held.reshape(-1).view(torch.int32).tolist()


CASES = {
    turned: torch.arange(320).view(5, 64).flip(1).flatten().tolist(),
    relay: [32, 64, 96, 128, 160, 192],
    read_back: [word for n in range(64) for word in (2 * n + 3 + (n // 32 * 32 + (n + 1) % 32 + 2), n + 2)],
    streamed: [7] * 96,
    multiplied_96: products(96),
    multiplied_192: products(192),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_that_is_right_gives_one_result_in_any_order(case) -> None:
    assert [seed for seed in SEEDS if case(RIGHT, seed) != CASES[case]] == []


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (turned, NO_BARRIER),
        (turned, NOT_WRITTEN),
        (relay, NO_WAIT),
        (relay, NO_BARRIER),
        (relay, NO_FENCE),
        (read_back, NO_BARRIER),
        (streamed, NO_WAIT),
        (multiplied_96, NO_WAIT),
        (multiplied_192, NOT_FINISHED),
    ],
)
def test_a_race_gives_other_results_with_some_seeds(case, fault: int) -> None:
    assert sum(_differs(case, fault, seed) for seed in SEEDS) > 1


def _differs(case, fault: int, seed: int) -> bool:
    try:
        return case(fault, seed) != CASES[case]
    except KernelError:
        return True


@pytest.mark.parametrize(
    ("case", "fault", "said"),
    [
        (
            relay,
            NEVER_SENT,
            r"nothing changes any more: block \(3, 0\), thread 0 waits for what another thread writes",
        ),
        (
            streamed,
            NO_ARRIVAL,
            "nothing changes any more: block .* thread 0 waits for what another thread writes",
        ),
        (turned, APART, "the lanes of a warp meet at different instructions"),
        (turned, TOO_FAR, "outside of a tensor or of shared memory"),
        (turned, NOT_FINISHED, "asynchronous copies were waited for"),
        (multiplied_96, NO_FENCE, "copy16 wrote, which a GPU shows it behind a fence only"),
        (multiplied_192, APART, "the warps of a group call different products"),
        (multiplied_96, NO_BEGIN, "a product without products_begin before it"),
    ],
)
def test_what_a_gpu_would_not_survive_is_an_error(case, fault: int, said: str) -> None:
    for seed in range(3):
        with pytest.raises(KernelError, match=said):
            case(fault, seed)


def test_a_structure_of_another_size_is_refused() -> None:
    class Longer(ctypes.Structure):
        _fields_ = (*Arguments._fields_, ("more", ctypes.c_longlong))

    with pytest.raises(KernelError, match="takes a structure of 32 bytes, not of 40"):
        Kernel(library(), "relay", 0).launch((1, 1), 32, Longer())
