"""The choice of an engine for models that both engines can run, and of a device. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

#: Values of `SPEECH_ENGINE__KIND` and of the option `engine` of such a model; "auto" means native.
EngineKind = Literal["auto", "native", "vllm"]
#: The environment variable that selects the GPUs of a process, and its values for no GPU; Slurm sets the last
#: one.
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = ("", "-1", "NoDevFiles")
#: Exists if NVIDIA's driver is loaded, and stays when a GPU is lost.
DRIVER = Path("/dev/nvidiactl")


def has_gpu() -> bool:
    """Whether CUDA should find a GPU. CUDA itself is not asked, because that takes seconds and device
    memory."""
    return os.environ.get(VISIBLE, "0") not in NO_GPU and DRIVER.exists()
