"""Compiles the CUDA kernels into a wheel, where the machine that builds it has nvcc or nvrtc; else the
wheel has their sources only."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from kernels import binaries


class BuildWithKernels(build_py):
    """Python files, and the machine code of `kernels/cuda` beside its sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "kernels/cuda"
        for path in (*folder.glob("*.cubin"), *folder.glob("*.ptx")):
            path.unlink()  # of an earlier build, perhaps of other sources
        try:
            self._compiled = [str(path) for path in binaries.write_shipped(folder)]
        except RuntimeError as error:
            self.warn(
                f"this wheel has the sources of the CUDA kernels only, which are compiled at their first use: {error}"
            )

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *getattr(self, "_compiled", [])]


setup(cmdclass={"build_py": BuildWithKernels})
