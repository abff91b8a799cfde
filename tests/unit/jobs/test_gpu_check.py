"""What `nightjar doctor` says of GPUs, the settings that need one, compilers and the package that shares
its name with ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.doctor import Machine, check_compilers, check_gpu, check_kernels

WHOLE = Machine(1, "580.159.04", "2.13.0", "13.0", ("NVIDIA H200",), "3.7.1", "prebuilt", "/usr/bin/gcc")


def test_a_whole_machine_needs_no_advice() -> None:
    assert check_gpu(WHOLE) == ("NVIDIA H200; driver 580.159.04, torch 2.13.0 for CUDA 13.0", "")
    assert check_compilers(WHOLE) == ("triton 3.7.1, /usr/bin/gcc, CUDA kernels: prebuilt", "")


def test_a_machine_without_gpus_needs_none_of_it() -> None:
    assert check_gpu(Machine(0))[1] == check_compilers(Machine(0))[1] == ""


@pytest.mark.parametrize(
    ("change", "said", "advice"),
    [
        ({"torch": None}, "torch is not installed", "its extra `gpu`"),
        ({"cuda": None}, "built without CUDA", "build for CUDA"),
        ({"names": ()}, "cannot use the GPUs (driver 580.159.04", "driver for CUDA 13.0"),
        ({"names": (), "driver": None}, "driver unknown", "nvidia-smi"),
    ],
)
def test_gpus_that_torch_cannot_use(change: dict[str, object], said: str, advice: str) -> None:
    found = check_gpu(WHOLE._replace(**change))  # type: ignore[arg-type]
    assert said in found[0]
    assert advice in found[1]


@pytest.mark.parametrize(
    ("change", "said", "advice"),
    [
        ({"triton": None}, "Triton missing", "Install triton"),
        ({"c_compiler": None}, "A C compiler missing", "apt-get install gcc"),
        ({"triton": None, "c_compiler": None}, "Triton and a C compiler missing", "Install triton, gcc"),
        ({"cuda_kernels": None}, "The CUDA kernels are not prebuilt", "nvidia-cuda-nvrtc"),
    ],
)
def test_missing_compilers_are_told_with_what_is_slower(
    change: dict[str, object], said: str, advice: str
) -> None:
    found = check_compilers(WHOLE._replace(**change))  # type: ignore[arg-type]
    assert found[0].startswith(said)
    assert "slower" in found[0]
    assert advice in found[1]


def test_hugging_faces_kernels_beside_ours_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kernels()[1] == ""
    (tmp_path / "kernels-0.17.1.dist-info").mkdir()
    (tmp_path / "kernels-0.17.1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    said, advice = check_kernels()
    assert "kernels 0.17.1 is installed beside" in said
    assert "pip uninstall kernels" in advice
