"""The entry point `vllm.general_plugins`: called in every process of vLLM, before a model is looked up."""

# vLLM is an extra, so its imports are checked only if it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import multiprocessing
import os
from typing import Any

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from vllm import ModelRegistry
from vllm.transformers_utils.config import register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from pipelines.child_process import die_with_parent
from pipelines.registry import FAMILIES
from pipelines.vllm_engine.library import architecture

#: The format of configs that are given by `ModelSpec.config`, not by the folder.
CONFIG_FORMAT = "nightjar"
#: Names of the processes that vLLM starts.
_CHILDREN = ("EngineCore", "VllmWorker")


@register_config_parser(CONFIG_FORMAT)
class _GivenConfig(ConfigParserBase):
    """A config with the keys of Qwen3, from `ModelSpec.config` and not from the folder."""

    def parse(
        self, model: Any, *_: Any, hf_overrides: Any = None, **__: Any
    ) -> tuple[dict[str, Any], Qwen3Config]:
        return {}, Qwen3Config(**(hf_overrides or {}))


def register() -> None:
    """Registers Nightjar's models in vLLM, and binds its processes to their parent. May be called more than once."""
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith(_CHILDREN):
        # Otherwise an engine core would keep its GPU after the worker was killed.
        die_with_parent()
        if os.getppid() != parent.pid:
            os._exit(1)
    known = ModelRegistry.get_supported_archs()
    for family in FAMILIES:
        if family.vllm_model and architecture(family.vllm_model) not in known:
            ModelRegistry.register_model(
                architecture(family.vllm_model), f"pipelines.{family.name}.vllm_model:{family.vllm_model}"
            )
