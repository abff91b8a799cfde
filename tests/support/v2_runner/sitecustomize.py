"""Python imports this at the start of the processes that `tests.support.vllm_v2` arranges for: Triton then has a backend for CPUs.

vLLM's V2 model runner, which CUDA uses, wants Triton. On a CPU its kernels run in Triton's interpreter; vLLM only has to believe
that there is a backend. The entry must be there when vLLM is imported, so it is made as `triton.backends` is.
"""

from __future__ import annotations

import os
import sys
import types
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


class _BackendForCpus(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            driver = types.SimpleNamespace(is_active=lambda: True)
            module.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("TRITON_INTERPRET") == "1":
    sys.meta_path.insert(0, _BackendForCpus())
