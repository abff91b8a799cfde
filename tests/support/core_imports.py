"""What an engine core of vLLM on the CPU imports, for `tests.support.forked_cores`."""

from __future__ import annotations

from importlib import import_module

from setproctitle import getproctitle

for name in (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "pipelines.vllm_engine.plugin",
):
    import_module(name)

# It finds its place in memory before the environment is another one.
getproctitle()
