"""Launches of the CUDA C++ kernels, against a driver that records them and has the structures of NVIDIA's
header."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kernels import binaries, cuda_driver, lm_cuda, toolchain
from kernels.cuda_driver import Source, available
from tests.support.attention_layers import attention_layer
from tests.support.fake_gpus import FakeGpus

FAKE = Path(__file__).parents[2] / "support/fake_cuda.c"


def header_folder() -> Path | None:
    """Where cuda.h is: Triton brings it, the CUDA toolkit too."""
    spec = find_spec("triton")
    folders = (
        [Path(folder) / "backends/nvidia/include" for folder in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    return next(
        (folder for folder in (*folders, Path("/usr/local/cuda/include")) if (folder / "cuda.h").exists()),
        None,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = header_folder()
    if shutil.which("gcc") is None or folder is None:
        pytest.skip("needs gcc and cuda.h")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-w", "-I", folder, "-o", library, FAKE], check=True, timeout=120
    )
    return ctypes.CDLL(str(library))


@pytest.fixture
def said(built: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What the driver was asked."""
    monkeypatch.setattr(cuda_driver, "_driver", lambda: built)
    built.fake_said.restype = ctypes.c_char_p
    built.fake_current.restype = ctypes.c_size_t
    built.fake_forget()
    cached = (cuda_driver._context, Source.on, available)
    for function in cached:
        function.cache_clear()
    yield lambda: built.fake_said().decode().splitlines()
    for function in cached:
        function.cache_clear()


class Arguments(ctypes.Structure):
    _fields_ = (("first", ctypes.c_size_t),)


def test_a_launch_is_what_the_driver_reads(said: Callable[[], list[str]]) -> None:
    kernel = cuda_driver.Module(b"code", 1).kernel("name", 4096)
    kernel.launch((5, 6), 256, Arguments(0xABC), 0x1234567890, programmatic=True)
    kernel.launch((1, 1), 32, Arguments(1), 0, programmatic=False)
    assert said() == [
        "context 1",
        "load code",
        "kernel name",
        f"launch 5 6 1 x 256 1 1 shared 4096 stream {0x1234567890} programmatic 1 first abc",
        "launch 1 1 1 x 32 1 1 shared 4096 stream 0 first 1",
    ]


def test_a_cooperative_launch_says_so_and_its_room_is_known(
    said: Callable[[], list[str]], gpus: FakeGpus
) -> None:
    gpus.processors = 131
    module = cuda_driver.Module(b"code", 1)
    assert module.kernel("name", 200_000).resident_blocks(288) == 131
    kernel = module.kernel("name", 4096)
    assert kernel.resident_blocks(512) == 4 * 131
    kernel.launch((128, 1), 288, Arguments(1), 7, cooperative=True)
    assert said()[-1] == "launch 128 1 1 x 288 1 1 shared 4096 stream 7 cooperative 1 first 1"


def test_a_launch_of_clusters_says_so_and_takes_less_shared_memory(said: Callable[[], list[str]]) -> None:
    kernel = cuda_driver.Module(b"code", 1).kernel("name", 200_000, all_shared=True)
    assert said()[-1] == "carveout 100"
    kernel.launch((128, 2), 256, Arguments(1), 7, programmatic=True, cluster=8, shared_bytes=100_000)
    assert (
        said()[-1] == "launch 128 2 1 x 256 1 1 shared 100000 stream 7 programmatic 1 cluster 8 1 1 first 1"
    )


def test_the_room_for_clusters_of_a_kernel_is_known(said: Callable[[], list[str]]) -> None:
    module = cuda_driver.Module(b"code", 1)
    assert module.kernel("name", 200_000).resident_clusters(288, 8) == 16
    assert module.kernel("name", 4096).resident_clusters(512, 4) == 4 * 32


def test_a_map_of_a_tensor_is_what_the_driver_reads(said: Callable[[], list[str]]) -> None:
    assert bytes(cuda_driver.tensor_map(0x1230, (96, 1000, 4), (32, 182, 1))) == b"\7" * 128
    assert said() == ["map 1230 of 96 1000 4 strides 192 192000 box 32 182 1"]
    with pytest.raises(RuntimeError, match="A map of a tensor was refused"):
        cuda_driver.tensor_map(0x1231, (96, 1000, 4), (32, 182, 1))


def test_what_the_driver_refuses_is_an_error_with_its_name(said: Callable[[], list[str]]) -> None:
    with pytest.raises(RuntimeError, match=r"machine code was refused: CUDA_ERROR_INVALID_IMAGE \(200\)"):
        cuda_driver.Module(b"bad", 0)
    with pytest.raises(RuntimeError, match="232449 bytes of shared memory"):
        cuda_driver.Module(b"code", 0).kernel("name", 227 * 1024 + 1)


def test_a_kernel_runs_on_its_own_device_and_the_thread_stays_on_its(
    built: ctypes.CDLL, said: Callable[[], list[str]]
) -> None:
    kernels = [cuda_driver.Module(b"code", device).kernel("name") for device in (0, 1)]
    for context in (16, 17):
        built.cuCtxSetCurrent(ctypes.c_void_p(context))
        for kernel in kernels:
            kernel.launch((1, 1), 32, Arguments(1), 0, programmatic=False)
            assert built.fake_current() == context
    assert [line for line in said() if line.startswith("context")] == ["context 0", "context 1"]


@pytest.fixture
def gpu(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> Callable[[], list[str]]:
    """Launches from CPU tensors, as if they were on device 0. The stream of device d is 7 + d."""
    monkeypatch.setattr(binaries, "candidates", lambda *_: iter([b"bad", b"good"]))
    return said


@pytest.mark.parametrize(
    ("rows", "inner", "width", "normed", "epilogue", "grid", "threads", "shared"),
    [
        (1, 1024, 4096, True, lm_cuda.PLAIN, "128 1", 256, 128 * 512 + 8 * 16 * 40 * 4 + 512),
        (17, 1024, 2048, True, lm_cuda.PLAIN, "128 1", 256, 64 * 512 + 16 * 16 * 24 * 4 + 1024),
        (40, 1024, 3072, True, lm_cuda.SWIGLU, "128 2", 256, 192 * 512 + 8 * 32 * 56 * 4 + 1024),
        (8, 3072, 1024, False, lm_cuda.RESIDUAL, "128 1", 384, 96 * 512 + 12 * 16 * 8 * 4 + 768),
        (9, 3072, 1024, False, lm_cuda.RESIDUAL, "128 1", 512, 96 * 512 + 16 * 16 * 8 * 4 + 1024),
        (33, 6144, 2048, False, lm_cuda.RESIDUAL, "256 3", 512, 192 * 512 + 16 * 16 * 8 * 4 + 1024),
    ],
)
def test_a_skinny_product_covers_its_rows_and_outputs(
    rows: int,
    inner: int,
    width: int,
    normed: bool,
    epilogue: int,
    grid: str,
    threads: int,
    shared: int,
    gpu: Callable[[], list[str]],
) -> None:
    x, y = (torch.zeros(rows, size, dtype=torch.bfloat16) for size in (inner, width))
    norm = torch.ones(inner, dtype=torch.bfloat16) if normed else None
    lm_cuda.skinny(x, torch.zeros(1, dtype=torch.bfloat16), y, norm=norm, epilogue=epilogue, extra=y)
    assert (
        gpu()[-1]
        == f"launch {grid} 1 x {threads} 1 1 shared {shared} stream 7 programmatic 1 first {x.data_ptr():x}"
    )
    assert gpu()[:3] == ["context 0", "load bad", "load good"], (
        "code that the driver refuses is followed by the next"
    )


def test_shapes_without_a_kernel_are_refused(gpu: Callable[[], list[str]]) -> None:
    x, y = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(1, 20, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="no skinny product of inner=512"):
        lm_cuda.skinny(x, x, y)
    with pytest.raises(RuntimeError, match="n=20 is no multiple of 16"):
        lm_cuda.skinny(torch.zeros(1, 1024, dtype=torch.bfloat16), x, y, norm=x)
    assert gpu() == []


def test_attention_and_draws_cover_their_rows(gpu: Callable[[], list[str]]) -> None:
    qkv, cache = torch.zeros(5, 32, dtype=torch.bfloat16), torch.zeros(5, 8, 16, 128, dtype=torch.bfloat16)
    layer = attention_layer((qkv, qkv), qkv)
    lm_cuda.predictor_attention(qkv, *layer, cache, cache, 3, qkv)
    assert gpu()[-1].startswith("launch 2 8 1 x 128 1 1 shared 0 stream 7 programmatic 1")
    many = torch.zeros(1000, 32, dtype=torch.bfloat16)
    lm_cuda.predictor_attention(many, *layer, cache, cache, 3, qkv)
    assert gpu()[-1].startswith("launch 66 8 1 x 128 "), "not more blocks than the device holds at once"
    with pytest.raises(RuntimeError, match="position 16"):
        lm_cuda.predictor_attention(qkv, *layer, cache, cache, 16, qkv)
    lm_cuda.draw([qkv] * 24, [1, 2, 3, 5, 2048, 0, 16, 1024, 1024, 4, 1], lm_cuda.LAST, pdl=False)
    assert gpu()[-1] == f"launch 5 1 1 x 256 1 1 shared 0 stream 7 first {qkv.data_ptr():x}"
    with pytest.raises(RuntimeError, match="vocab=2050"):
        lm_cuda.draw([qkv] * 24, [1, 2, 3, 5, 2050, 0, 16, 1024, 1024, 4, 1], lm_cuda.LAST)


def test_each_device_has_kernels_of_its_own(gpu: Callable[[], list[str]], gpus: FakeGpus) -> None:
    gpus.capabilities = {2: (8, 0)}
    assert [available(device, *lm_cuda.SOURCES) for device in (2, 0, 1)] == [False, True, True]
    asked = len(gpu())
    assert sum(line == "load good" for line in gpu()) == 2 * len(lm_cuda.SOURCES)
    for device in (0, 1):
        lm_cuda.DRAWS.launch("draw_last", (1, 1), 32, Arguments(5), device)
    assert gpu()[asked:] == [
        f"launch 1 1 1 x 32 1 1 shared 0 stream {7 + device} first 5" for device in (0, 1)
    ]


def test_one_device_whose_driver_takes_no_code_says_nothing_of_the_other(
    gpu: Callable[[], list[str]],
    gpus: FakeGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    codes = {(9, 0): b"good", (12, 0): b"bad"}
    gpus.capabilities = {0: (12, 0)}
    monkeypatch.setattr(binaries, "candidates", lambda _, capability: iter([codes[capability]]))
    assert [available(device, *lm_cuda.SOURCES) for device in (0, 1, 0, 1)] == [False, True, False, True]
    assert len(caplog.records) == 1


def test_a_source_that_no_wheel_brings_is_not_available(gpu: Callable[[], list[str]]) -> None:
    assert binaries.targets_of("persistent_tested") == []
    assert not available(0, Source("persistent_tested", {"name": 0}))
    assert gpu() == []


def fields(source: str) -> int:
    """Bytes of `Args` of a source as C++ lays them out, counted from its text."""
    text = re.search(r"struct Args \{(.*?)\n\};", (binaries.SOURCES / source).read_text(), re.S)
    assert text is not None
    size = 0
    for line in re.sub(r"//.*", "", text[1]).split(";"):
        words = line.split(",")
        for word in words:
            pointer = "*" in word or ("*" in words[0] and "*" in line and word.strip().startswith("*"))
            bytes_each = 8 if pointer or "long long" in words[0] else 4
            size += bytes_each if word.strip() else 0
    return size


@pytest.mark.parametrize(
    ("source", "structure"),
    [
        ("skinny.cu", lm_cuda.SkinnyArguments),
        ("predictor_attention.cu", lm_cuda.AttentionArguments),
        ("sampler.cu", lm_cuda.DrawArguments),
    ],
)
def test_arguments_are_as_long_as_the_sources_say(source: str, structure: type[ctypes.Structure]) -> None:
    assert -(-fields(source) // 8) * 8 == ctypes.sizeof(structure)


@pytest.mark.parametrize("source", lm_cuda.SOURCES, ids=lambda source: source.name)
def test_the_sources_compile_to_the_kernels_that_are_launched(source: Source) -> None:
    """On a GPU that no wheel has code for; what a wheel brings is looked at in
    tests/services/test_wheel_kernels.py."""
    if toolchain.cuda_compiler() is None:
        pytest.skip("needs a CUDA compiler")
    code = binaries.compiled(source.name, "sm_120")
    for kernel in source.kernels:
        assert kernel.encode() in code
    assert code.startswith(b"\x7fELF")
