"""The kernels of `kernels/cuda` on a CPU: their sources, built with g++ for the emulator of
`tests/support/cuda_emulator`.

`kernels.cuda_driver.Kernel` and `Kernel` here are launched alike, so tests call the launches of `kernels`
with CPU tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import binaries, codec_cuda, cuda_driver
from kernels.cuda_driver import Source, TensorMap

EMULATOR = Path(__file__).parent / "cuda_emulator"
_COMPILER = "g++"
_FLAGS = (
    "-std=c++17", "-fPIC", "-w", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE",
    "-ftrivial-auto-var-init=pattern", "-include", str(EMULATOR / "emulator.h"),
)  # fmt: skip
#: Makes a kernel whose parameter is a structure callable with the structure's address.
_ENTRIES = """
template <typename A> void call_kernel(void (*kernel)(A), const void* arguments) {{ kernel(*static_cast<const A*>(arguments)); }}
template <typename A> constexpr int arguments_bytes(void (*)(A)) {{ return sizeof(A); }}
{entries}
"""
_ENTRY = """
extern "C" void run_{0}(const void* arguments) {{ call_kernel({0}, arguments); }}
extern "C" int bytes_{0}() {{ return arguments_bytes({0}); }}
"""


class KernelError(RuntimeError):
    """A launch that a GPU would not survive, or may not."""


class Kernel:
    """A kernel with its dynamic shared memory in bytes, launched like `kernels.cuda_driver.Kernel`.

    seed: the order in which threads run, and when copies arrive; together: all blocks are there at once,
    as in a cooperative launch, or else one after the other.
    """

    def __init__(
        self, library: ctypes.CDLL, name: str, shared_bytes: int, seed: int = 0, together: bool = False
    ) -> None:
        self._library, self._name, self._shared_bytes, self._seed, self._together = (
            library,
            name,
            shared_bytes,
            seed,
            together,
        )

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        arguments: ctypes.Structure,
        stream: int = 0,
        programmatic: bool = False,
        cooperative: bool = False,
        *,
        cluster: int = 1,
        shared_bytes: int | None = None,
    ) -> None:
        """Runs grid[0] x grid[1] blocks of `threads` to their end. Raises `KernelError`."""
        expected = self._library[f"bytes_{self._name}"]()
        if expected != ctypes.sizeof(arguments):
            raise KernelError(
                f"{self._name} takes a structure of {expected} bytes, not of {ctypes.sizeof(arguments)}."
            )
        start = self._library.emulator_launch
        start.restype = ctypes.c_char_p
        kernel = ctypes.cast(self._library[f"run_{self._name}"], ctypes.c_void_p)
        size = self._shared_bytes if shared_bytes is None else shared_bytes
        fault = start(
            kernel,
            ctypes.byref(arguments),
            *grid,
            threads,
            size,
            ctypes.c_ulonglong(self._seed),
            int(self._together),
            cluster,
        )
        if fault is not None:
            raise KernelError(f"{self._name}, seed {self._seed}: {fault.decode()}")


def build(source: Path, kernels: Iterable[str], edits: Mapping[str, str] | None = None) -> ctypes.CDLL:
    """The library of one source for the emulator. Skips the test where there is no g++.

    kernels: those that will be launched; edits: text to replace, each of which stands once in the source
    and its headers.
    """
    if shutil.which(_COMPILER) is None:
        pytest.skip("needs g++")
    # The emulator's own header stands in for the one of the same name.
    texts = {
        path.name: path.read_text()
        for path in (source, *binaries.SOURCES.glob("*.cuh"), *EMULATOR.glob("*.cuh"))
    }
    for old, new in (edits or {}).items():
        found = [name for name, text in texts.items() for _ in range(text.count(old))]
        assert len(found) == 1, f"{old!r} stands in {found}"
        texts[found[0]] = texts[found[0]].replace(old, new)
    texts[source.name] += _ENTRIES.format(entries="".join(_ENTRY.format(name) for name in kernels))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in texts.items():
            (folder / file).write_text(text)
        (folder / "emulator.o").write_bytes(_emulator())
        _compile(
            ["-O1", "-shared", folder / "emulator.o", "-x", "c++", folder / source.name], folder / "kernel.so"
        )
        return ctypes.CDLL(str(folder / "kernel.so"))


@cache
def _emulator() -> bytes:
    """The object file of the emulator itself, which every library has."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "emulator.o"
        _compile(["-O2", "-c", EMULATOR / "emulator.cpp"], made)
        return made.read_bytes()


def _compile(words: list[str | Path], made: Path) -> None:
    done = subprocess.run(
        [_COMPILER, *_FLAGS, *words, "-o", made], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"g++ failed on {words[-1]}: {done.stderr[-2000:]}")


@cache
def _library(source: Source) -> ctypes.CDLL:
    return build(binaries.SOURCES / f"{source.name}.cu", source.kernels)


def kernels(source: Source, seed: int = 0) -> dict[str, Kernel]:
    """The kernels of one source, which are built once in a session."""
    return {kernel: Kernel(_library(source), kernel, size, seed) for kernel, size in source.kernels.items()}


def emulated_map(
    address: int, sizes: tuple[int, int, int], box: tuple[int, int, int]
) -> ctypes.Array[ctypes.c_byte]:
    """`TensorMap` of the emulator."""
    return TensorMap.from_buffer_copy(struct.pack("P3q3i", address, *sizes, *box).ljust(128, b"\0"))


def emulate(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Lets launches run here, with the order of `seed`, on a machine that says it has a GPU (the fixture `gpus`)."""
    monkeypatch.setattr(Source, "on", lambda source, _: kernels(source, seed))
    for module in (cuda_driver, codec_cuda):
        monkeypatch.setattr(module, "tensor_map", emulated_map)


def choose_order(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets launches run here; what it returns chooses the order in which the threads of the next ones run."""
    emulate(monkeypatch)
    return lambda seed: emulate(monkeypatch, seed)


def guarded(tensor: Tensor) -> Tensor:
    """A contiguous copy whose last byte is followed by memory that must not be touched: a kernel that does
    is a `KernelError`."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + whole), page, 0):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=whole - size).view(
        tensor.shape
    )
    return copy.copy_(tensor)
