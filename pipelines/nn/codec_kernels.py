"""Whether a codec's fused ops get their kernels."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

from kernels.toolchain import TRITON_ADVICE, triton_fault

log = logging.getLogger(__name__)


@cache
def codec_kernels() -> bool:
    """Gives the fused ops of codecs their kernels on the current CUDA device.

    False, with one warning, where Triton cannot make them: codecs then run as single PyTorch ops.
    """
    fault = triton_fault()
    if fault is None:
        import_module("kernels.codec_launch")
        return True
    log.warning("%s Codecs run as single PyTorch ops instead of fused kernels, which is slower. %s", fault, TRITON_ADVICE)
    return False
