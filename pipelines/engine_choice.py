"""Which engine runs a model that more than one can run. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

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
