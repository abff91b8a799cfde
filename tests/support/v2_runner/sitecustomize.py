"""Python imports this at the start of the processes that `tests.support.vllm_v2` arranges for: Triton then
has a backend for CPUs.

vLLM's V2 model runner, which CUDA uses, wants Triton. On a CPU its kernels run in Triton's interpreter;
vLLM only has to believe that there is a backend. The entry must be there when vLLM is imported, so it is
made as `triton.backends` is. Where the command asks for it, engine cores are forked.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


class _Changed(MetaPathFinder):
    """One module that is changed as soon as it has been imported."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def _add_backend(backends: Any) -> None:
    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def _fork_cores(utils: Any) -> None:
    spawning = utils.get_mp_context

    def context() -> Any:
        from pipelines.vllm_engine.library import on_cpu
        from tests.support.forked_cores import ForkedCores

        return ForkedCores() if on_cpu() else spawning()

    utils.get_mp_context = context


if os.environ.get("TRITON_INTERPRET") == "1":
    sys.meta_path.insert(0, _Changed("triton.backends", _add_backend))
if os.environ.get("NIGHTJAR_FORKED_CORES"):
    sys.meta_path.insert(0, _Changed("vllm.v1.engine.utils", _fork_cores))
