"""The entry point `vllm.general_plugins`: called in every process of vLLM, before a model is looked up."""

# vLLM is an extra: its imports are checked where it is installed.
# pyright: reportMissingImports=false
from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

#: Architectures of ours, and where their classes are. vLLM imports a module when its architecture is asked for.
ARCHITECTURES = {
    "NightjarPaddedQwen2ForCausalLM": "pipelines.vllm_engine.padded_heads:PaddedQwen2ForCausalLM",
    "NightjarFishForCausalLM": "pipelines.fish_speech.slow_ar:FishForCausalLM",
    "NightjarSpeechLmForCausalLM": "pipelines.speechlm.model:SpeechLmForCausalLM",
}
#: Names of the processes that vLLM starts.
_CHILDREN = ("EngineCore", "VllmWorker")
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Makes our architectures known to vLLM, and its processes end with ours. May be called more than once."""
    from vllm import ModelRegistry

    from pipelines.speechlm.hf_config import register_configs

    register_configs()
    _die_with_parent()
    known = ModelRegistry.get_supported_archs()
    for name, place in ARCHITECTURES.items():
        if name not in known:
            ModelRegistry.register_model(name, place)


def _die_with_parent() -> None:
    """Left alone by a worker that was killed, an engine core would hold its GPU for ever."""
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or parent is None or not multiprocessing.current_process().name.startswith(_CHILDREN):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os.kill(os.getpid(), signal.SIGKILL)
