"""Which engine runs a model that more than one can run. Imports no torch."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pipelines.errors import ConfigError, ErrorCode

#: What `SPEECH_ENGINE__KIND` and the option `engine` of such a model take; "auto" is native.
EngineKind = Literal["auto", "native", "vllm"]
#: What CUDA shows a process, and the values that show it nothing; the last is that of Slurm.
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = ("", "-1", "NoDevFiles")
#: Is there where NVIDIA's driver is, and stays when a GPU is lost.
DRIVER = Path("/dev/nvidiactl")


def has_gpu() -> bool:
    """Whether CUDA will find a device; asking it takes seconds, and memory of the device."""
    return os.environ.get(VISIBLE, "0") not in NO_GPU and DRIVER.exists()


#: What to do where vLLM cannot draw frames of several codes.
FRAMES_ADVICE = "Set SPEECH_ENGINE__KIND to native, or unset it."


def check_frames_on_vllm() -> None:
    """Raises `ConfigError` (`config.invalid`) where vLLM cannot draw frames of several codes: it does so
    with Triton, on a CPU too.

    It imports neither. Says nothing where vLLM is not installed, or is told which of its model runners to
    take.
    """
    told = "VLLM_USE_V2_MODEL_RUNNER" in os.environ
    if told or find_spec("vllm") is None or has_gpu() or entry_points(group="triton.backends", name="cpu"):
        return
    message = "On a CPU the engine vllm runs this model with a Triton that makes code for CPUs, and there is none here."
    raise ConfigError(ErrorCode.CONFIG_INVALID, message, FRAMES_ADVICE)
