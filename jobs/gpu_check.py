"""What `nightjar doctor` sees of a machine's GPUs: driver, torch's CUDA, the compilers of the kernels, and whose `kernels` is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from kernels import toolchain

_ASK_TORCH = """
import json, torch
can = torch.cuda.is_available()
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if can else []
print(json.dumps([torch.version.cuda, names]))
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is for GPUs; None for what is missing. `names` are the GPUs that torch can use, `cuda` the CUDA it was built for."""

    devices: int
    driver: str | None = None
    torch: str | None = None
    cuda: str | None = None
    names: tuple[str, ...] = ()
    triton: str | None = None
    nvcc: str | None = None
    c_compiler: str | None = None


#: (message, advice); no advice where there is nothing to do.
Verdict = tuple[str, str]


@cache
def look() -> Machine:
    """This machine. torch is asked in a process of its own, and only where there is a GPU."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not devices:
        return Machine(0)
    torch = _version("torch")
    cuda, names = _ask_torch() if torch else (None, ())
    return Machine(devices, _driver(), torch, cuda, names, _version("triton"), toolchain.nvcc(), toolchain.c_compiler())


def judge_gpu(machine: Machine) -> Verdict:
    """Whether torch can use the GPUs."""
    if not machine.devices:
        return "none; models for the CPU run", ""
    if machine.torch is None:
        return f"{machine.devices} GPUs, but torch is not installed.", "Install it with: pip install 'nightjar-speech[gpu]'."
    if machine.cuda is None:
        return f"{machine.devices} GPUs, but torch {machine.torch} is built without CUDA.", "Install torch's build for CUDA."
    driver = f"driver {machine.driver or 'unknown'}, torch {machine.torch} for CUDA {machine.cuda}"
    if not machine.names:
        return (
            f"torch cannot use the GPUs ({driver}).",
            f"Install a driver for CUDA {machine.cuda} or newer; `nvidia-smi` shows the driver's.",
        )
    return f"{', '.join(machine.names)}; {driver}", ""


def judge_compilers(machine: Machine) -> Verdict:
    """Whether the kernels can be made."""
    if not machine.devices:
        return "not needed without a GPU", ""
    if machine.triton is None or machine.c_compiler is None:
        missing = [name for name, found in (("Triton", machine.triton), ("a C compiler", machine.c_compiler)) if found is None]
        said = f"{' and '.join(missing)} missing: models run as single PyTorch ops, which is much slower."
        return said[0].upper() + said[1:], toolchain.TRITON_ADVICE
    if machine.nvcc is None:
        return "nvcc is missing: batches of few requests run on Triton's kernels, which are slower.", toolchain.NVCC_ADVICE
    return f"triton {machine.triton}, {machine.c_compiler}, {machine.nvcc}", ""


def judge_kernels() -> Verdict:
    """Whether the package `kernels` is ours alone: Hugging Face has one of the same name, and both write into one folder."""
    theirs, spec = _version("kernels"), find_spec("kernels")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    ours = any((Path(folder) / "toolchain.py").exists() for folder in folders)
    again = "Then install Nightjar again: pip install --force-reinstall --no-deps nightjar-speech."
    if theirs is not None:
        said = (
            f"Hugging Face's kernels {theirs} is installed beside Nightjar's package of the same name; they overwrite each other's files."
        )
        return said, f"Remove it: pip uninstall kernels. {again}"
    if not ours:
        return "Nightjar's kernels are not installed.", again
    return "Nightjar's own; Hugging Face's package of that name is not installed", ""


def _driver() -> str | None:
    try:
        found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return None if found is None else found[1]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ask_torch() -> tuple[str | None, tuple[str, ...]]:
    try:
        said = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=True)
        cuda, names = json.loads(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, ()
    return cuda, tuple(names)
