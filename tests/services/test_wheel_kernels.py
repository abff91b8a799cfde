"""A wheel that is built where there is a compiler brings the machine code of the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kernels import binaries, lm_cuda, toolchain
from kernels.cuda_driver import Source
from tests.support.wheel_kit import CODE, built_wheel, copy_sources, names_in, shipped

if toolchain.cuda_compiler() is None:
    pytest.skip("needs a CUDA compiler", allow_module_level=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(copy_sources(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel"))


def test_all_machine_code_is_in_the_wheel_and_its_package_finds_it(wheel: Path, tmp_path: Path) -> None:
    names = names_in(wheel)
    assert sorted(name for name in names if not name.endswith(CODE)) == shipped()
    code = {f"kernels/cuda/{binaries.file_name(name, target)}" for name, target in binaries.shipped_code()}
    assert {name for name in names if name.endswith(CODE)} == code
    assert wheel.name.endswith("-py3-none-any.whl"), "machine code of GPUs runs beside any CPU"
    zipfile.ZipFile(wheel).extractall(tmp_path)
    ask = "import kernels.binaries as binaries; print(binaries.__file__, binaries.shipped())"
    said = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.split() == [str(tmp_path / "kernels/binaries.py"), "True"]


@pytest.mark.parametrize("kernel", lm_cuda.SOURCES, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("target", [binaries.HOPPER, binaries.NEWER])
def test_its_code_has_the_kernels_that_are_launched(kernel: Source, target: str, wheel: Path) -> None:
    code = zipfile.ZipFile(wheel).read(f"kernels/cuda/{binaries.file_name(kernel.name, target)}")
    for name in kernel.kernels:
        assert name.encode() in code
    assert code.startswith(b"\x7fELF") != target.startswith("compute_")
