"""The fused convolution stack, which families share."""

from __future__ import annotations

from pipelines.nn.codec_fused import FusedStack

__all__ = ["FusedStack"]
